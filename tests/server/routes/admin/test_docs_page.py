"""The page of the API: whole in itself, and all that the document has."""

import base64
import hashlib
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from tests.server.asgi import call

from quire.server.app import create_app
from quire.server.http.body import NOT_SUPPORTED
from quire.server.routes.admin.docs_page import PATH, api_page
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest
from quire.server.routes.openapi import api_document
from quire.server.served_models import ServedModels
from quire.server.service import Service


@pytest.fixture(scope="module")
def app():
    return create_app(ServedModels.of(Service(None, None, None, "mine")))


@pytest.fixture(scope="module")
def page(app):
    return api_page(api_document(app.routes))


def rows_of(page, heading):
    """The cells of the first table after a heading's anchor, by the name in the first cell."""
    section = page.partition(f'id="{heading}"')[2].partition("<table>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr><td><code>(.*?)</code></td>(.*?)</tr>", section)
    return {name: unescape(re.sub(r"<[^>]*>", " ", cells)) for name, cells in rows}


TYPES = {"string", "boolean", "integer", "number", "list", "object", "any"}


class Tags(HTMLParser):
    """Every tag is closed, in its turn; ids are unique and links inside the page lead to one."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.names = [], [], [], set()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.names.add(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_it_is_served_and_may_load_nothing(app):
    answer = call(app, PATH, method="GET")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    style = answer.content.decode().partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "unsafe" not in policy
    assert call(app, PATH, method="HEAD").status == 200


def test_no_page_that_is_served_names_another_host(app):
    """Nor does any other path have a page that loads scripts from elsewhere."""
    for path in (PATH, "/redoc", "/docs/oauth2-redirect", "/"):
        answer = call(app, path, method="GET")
        text = answer.content.decode()
        assert not re.search(r"""https?:|=["']//|url\(|@import|<script|\bon\w+=""", text), path
        assert path in (PATH, "/") or answer.status == 404


def test_it_is_sound_html(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids)) > 10
    assert {link for link in tags.links if link != "openapi.json"} == {f"#{i}" for i in tags.ids}
    assert not tags.names & {"script", "link", "img", "iframe", "form"}


def test_every_route_is_there(app, page):
    for path, methods in api_document(app.routes)["paths"].items():
        for method in methods:
            assert re.search(
                rf"{method.upper()}</span><span class=\"path\">{re.escape(path)}", page
            )


@pytest.mark.parametrize(
    ("heading", "body"),
    [
        ("post-v1-completions", CompletionRequest),
        ("post-v1-chat-completions", ChatCompletionRequest),
    ],
)
def test_every_field_has_its_type_its_bounds_and_a_meaning(page, heading, body):
    rows = rows_of(page, heading)
    assert {*body.model_fields, *body.hints, "extra_body"} == {
        name for name in rows if "." not in name
    }
    fields = body.model_json_schema()["properties"]
    assert [name for name in fields if not fields[name].get("description")] == []
    firsts = {cells.split()[0] for cells in rows.values()}
    assert all(first in TYPES or first[0] == '"' for first in firsts)  # a type or a value
    assert "-2 to 2" in rows["presence_penalty"]
    assert "0 to 1" in rows["top_p"]
    assert "default false" in " ".join(rows["stream"].split())
    assert "-2^63 to 2^64-1" in rows["seed"]
    assert "list of string" in rows["stop"]
    required = "prompt" if body is CompletionRequest else "messages"
    assert next(iter(rows)) == required and "required" in rows[required]
    assert "stream_options.include_usage" in rows


def test_refused_fields_stand_apart_with_what_asks_for_nothing(page):
    section = page.partition('id="post-v1-chat-completions"')[2]
    folded = section.partition("<details>")[2].partition("</details>")[0]
    found = dict(re.findall(r"<tr><td><code>(.*?)</code></td><td>(.*?)</td></tr>", folded))
    assert set(found) == set(ChatCompletionRequest.not_supported)
    assert unescape(found["modalities"]) == 'but for <code>["text"]</code>'
    assert NOT_SUPPORTED not in page


def test_the_fields_of_an_answer_stand_by_their_path(page):
    section = page.partition('id="post-v1-chat-completions"')[2].partition("Answer 200")[2]
    names = re.findall(r"<tr><td><code>(.*?)</code>", section.partition("</table>")[0])
    assert "choices[].message.content" in names
    assert "usage.prompt_tokens_details.cached_tokens" in names


def test_the_errors_that_clients_can_meet_are_there(page):
    rows = rows_of(page, "errors")
    assert {"invalid_request", "not_ready", "not_supported", "not_found", "overloaded"} <= set(rows)
    assert not {"checkpoint_error", "configuration_error", "scheduler_stalled"} & set(rows)
    assert rows["rate_limit_exceeded"].split()[0] == "429"


def test_texts_of_a_document_are_escaped():
    document = {
        "info": {"title": "<b>", "version": "1"},
        "paths": {"/<x>": {"get": {"description": "a <i> `b` & `c", "responses": {}}}},
    }
    page = api_page(document)
    assert "<b>" not in page and "<i>" not in page and "/<x>" not in page
    assert "a &lt;i&gt; `b` &amp; `c" in page
