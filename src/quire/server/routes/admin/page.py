"""GET / and /page/NAME: the page for people, whose files are in the folder `static`.

The files hold no data, so they need no key: the page asks the same endpoints as every client, with
the key that its reader enters. Its Content-Security-Policy lets a browser load nothing from another
host and run no inline code. Without a page, or for a client that wants no HTML, `/` is one line of
text, for which Ollama's clients ask first.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.errors import QuireError
from quire.server.routes.endpoint import Endpoints
from quire.server.served_models import models_of

FOLDER = Path(__file__).parents[2] / "static"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types of the page's files, by the end of their names."""

NAMES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES))
"""The page's files."""

INDEX = "index.html"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers compare the ETag at each use
}

router = Endpoints(
    is_suggested=False,
    open_paths=("/", *(f"/page/{name}" for name in NAMES)),
    probes=("/",),
)


class NoFileError(QuireError):
    """The page has no file of this name, or the server has no page."""

    http_status = 404
    code = "page_file_not_found"


class PageFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str
    #: Value of the header ETag, which changes with the content.
    etag: str


@cache
def page_file(name: str) -> PageFile:
    """One of the files in NAMES."""
    content = (FOLDER / name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return PageFile(content, TYPES[Path(name).suffix], etag)


@router.route("/", "GET", "HEAD", include_in_schema=False)
async def page(http: HTTPRequest) -> Response:
    """The page for browsers, and a line of text for other clients."""
    wants_html = "text/html" in http.headers.get("accept", "")
    if models_of(http).shared.has_page and wants_html:
        return _answer(http, INDEX)
    return Response("quire is running", media_type="text/plain", headers={"Vary": "Accept"})


@router.route("/page/{name}", "GET", "HEAD", include_in_schema=False)
async def page_part(http: HTTPRequest, name: str) -> Response:
    """A file that the page loads. Raises NoFileError."""
    if name not in NAMES or not models_of(http).shared.has_page:
        raise NoFileError(f"the page has no file {name!r:.80}")
    return _answer(http, name)


def _answer(http: HTTPRequest, name: str) -> Response:
    found = page_file(name)
    headers = HEADERS | {"ETag": found.etag, "Vary": "Accept"}
    known = [each.strip().removeprefix("W/") for each in _known_etags(http)]
    if found.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


def _known_etags(http: HTTPRequest) -> list[str]:
    return http.headers.get("if-none-match", "").split(",")
