"""A hub on a loopback port: lists models, and serves their files as huggingface.co does.

Answers the requests of the hub's client that quire makes: the model's facts, its tree, HEAD and GET
of a file at a commit, with ranges. Can cut connections, refuse files, and be switched off.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 4096
"""Files from here on are stored as large files: their version is their SHA-256."""


@dataclass
class FakeHub:
    """files: name -> content. revisions: what names the commit. token: asked for; None: nobody is.
    gated: files are refused to all. cut_after: bytes of a body after which the connection is cut,
    once for each entry, or, if there is one, after waiting for `stall`. requests: (method, path,
    Range or None) of all that came.
    """

    files: dict[str, bytes]
    name: str = "org/model"
    revisions: tuple[str, ...] = ("main", COMMIT)
    token: str | None = None
    gated: bool = False
    cut_after: list[int] = field(default_factory=list)
    stall: threading.Event | None = None
    takes_ranges: bool = True
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def fetched(self) -> list[str]:
        """The names of files whose content was asked for."""
        found = [
            path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path
        ]
        return [path.rpartition(f"/{COMMIT}/")[2] for path in found]

    def ranges(self, name: str) -> list[str | None]:
        """Of each request for the file's content, what it asked for."""
        return [
            part for method, path, part in self.requests if method == "GET" and path.endswith(name)
        ]

    def etag(self, name: str) -> str:
        content = self.files[name]
        is_large = len(content) >= LARGE_BYTES
        return (hashlib.sha256 if is_large else hashlib.sha1)(content).hexdigest()

    def facts(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": self.etag(name)}
            for name, content in self.files.items()
        ]
        return {"id": self.name, "modelId": self.name, "sha": COMMIT, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": self.etag(name)}
            for name, content in self.files.items()
        ]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub at its endpoint, until the end of the `with`."""

    class Handler(_Handler):
        served = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        hub, path = self.served, self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "RepoNotFound")
        if (
            found := re.fullmatch(rf"/api/models/{hub.name}(?:/revision/([^/]+))?", path)
        ) is not None:
            known = found[1] is None or found[1] in hub.revisions
            return self._json(hub.facts()) if known else self._refuse(404, "RevisionNotFound")
        if path.startswith(f"/api/models/{hub.name}/tree/"):
            return self._json(hub.tree())
        file = re.fullmatch(rf"/{hub.name}/resolve/([^/]+)/(.+)", path)
        if file is None:
            return self._refuse(404, "RepoNotFound")
        if hub.gated:
            return self._refuse(403, "GatedRepo")
        if file[2] not in hub.files:
            return self._refuse(404, "EntryNotFound")
        return self._send_file(file[2], has_body=has_body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"no: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, found: Any) -> None:
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_file(self, name: str, *, has_body: bool) -> None:
        hub, content = self.served, self.served.files[name]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted is not None and hub.takes_ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hub.etag(name)}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if not has_body:
            return
        body = content[start:]
        if hub.cut_after and len(content) >= LARGE_BYTES:
            self.close_connection = True
            self.wfile.write(body[: hub.cut_after.pop(0)])
            if hub.stall is not None:
                hub.stall.wait(60)
            return
        self.wfile.write(body)
