"""The page's files: who gets them, with which headers, and that they can harm nobody."""

import re

import pytest
from tests.server.asgi import call

from quire.server.app import create_app
from quire.server.http.guard import AccessConfig
from quire.server.routes.admin.page import FOLDER, HEADERS, NAMES
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.server.tenants.keys import ApiKeys

HTML = (b"accept", b"text/html,application/xhtml+xml,*/*;q=0.8")
TEXT = {name: (FOLDER / name).read_text() for name in NAMES}
MODULES = [name for name in NAMES if name.endswith(".js")]


def get(path, *headers, has_page=True, keys=None, method="GET"):
    service = Service(None, None, None, "mine", has_page=has_page)
    return call(
        create_app(ServedModels.of(service), AccessConfig(keys=keys)),
        path,
        method=method,
        headers=headers,
    )


def test_a_browser_gets_the_page_and_other_clients_a_line_of_text():
    page, line = get("/", HTML), get("/", (b"accept", b"*/*"))
    assert page.content.decode() == TEXT["index.html"]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert line.content == b"quire is running" == get("/").content
    assert "accept" in page.headers["vary"].lower() and "accept" in line.headers["vary"].lower()
    assert get("/", HTML, method="HEAD").status == 200


@pytest.mark.parametrize("name", NAMES)
def test_each_file_has_its_type_the_policy_and_an_etag(name):
    answer = get(f"/page/{name}")
    assert answer.status == 200 and answer.content.decode() == TEXT[name]
    for header, value in HEADERS.items():
        assert answer.headers[header.lower()] == value
    known = get(f"/page/{name}", (b"if-none-match", answer.headers["etag"].encode()))
    assert (known.status, known.content) == (304, b"")
    assert known.headers["etag"] == answer.headers["etag"]
    assert get(f"/page/{name}", (b"if-none-match", b'"other"')).status == 200


def test_the_policy_allows_the_pages_own_files_and_nothing_inline():
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy and "*" not in policy
    for rule in ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
        assert rule in policy


def test_the_files_need_no_key_since_they_hold_no_data():
    keys = ApiKeys(["alice:alice-key-1"])
    assert get("/", HTML, keys=keys).status == 200
    assert get("/page/app.js", keys=keys).status == 200
    assert get("/stats", keys=keys).status == 401
    assert get("/page/other.js", keys=keys).status == 401


@pytest.mark.parametrize("path", ["/page/other.js", "/page/", "/page/../app.py", "/page/%2e%2e"])
def test_other_names_are_not_found(path):
    assert get(path).status == 404


def test_disabled_page_leaves_the_line_of_text():
    assert get("/", HTML, has_page=False).content == b"quire is running"
    assert get("/page/app.js", has_page=False).status == 404


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_host_or_makes_markup_from_text(name):
    for address in re.findall(r"https?://[\w.-]+", TEXT[name]):
        assert address == "http://www.w3.org"  # the name space of SVG
    bad = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert not re.search(bad, TEXT[name])


def test_the_page_has_no_inline_script_style_or_listener():
    page = TEXT["index.html"]
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page)
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page):
        assert path.removeprefix("/page/") in NAMES


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_names_that_exist(name):
    for names, target in re.findall(r'import \{([^}]*)\} from "\./([\w.]+)"', TEXT[name]):
        for each in names.split(","):
            wanted = each.strip()
            pattern = rf"export (?:async )?(?:function\*?|const|class) {wanted}\b"
            assert re.search(pattern, TEXT[target]), f"{name} imports {wanted} of {target}"
    assert len(TEXT[name].splitlines()) <= 500
