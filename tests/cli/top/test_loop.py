"""Tests of the command `quire top` against a server that sends events."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.cli.top.watching import engine, event, memory, request

from quire.cli import main
from quire.cli.top.feed import Feed

KEY = "operator"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self.send_error(401)
            return
        if not self.path.startswith("/stats/events?"):
            self.send_error(404)
            return
        if "&model=a%2Fb" in self.path:
            self.send_response(404)
            self.end_headers()
            error = {"message": "the model 'a/b' is not served here", "param": "model"}
            self.wfile.write(json.dumps({"error": error}).encode())
            return
        self.send_response(200)
        self.end_headers()
        shown = event(engine(requests=[request("r1", tenant="ann")], memory=memory()))
        for _ in range(3):
            self.wfile.write(b": keep-alive\n\ndata: " + json.dumps(shown).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a server that sends three events to a reader with KEY, then ends the stream."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_once_prints_a_picture(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--url", url, "--api-key", KEY, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "requests: 1" in shown and "ann" in shown and "\x1b" not in shown


def test_a_refused_key_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--url", url, "--api-key", "other"]) == 1
    assert "operator's key" in capsys.readouterr().err


def test_an_unknown_model_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--url", url, "--api-key", KEY, "--once", "--model", "a/b"]) == 1
    assert "the model 'a/b' is not served here" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "11", "fast"])
def test_intervals_are_checked(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["top", "--interval", interval])
    assert "from 0.25 to 10" in capsys.readouterr().err


def test_the_feed_connects_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.top.feed.PAUSE_S", 0.01)
    seen = 0
    with Feed(url, KEY, None, 0.5) as feed:
        while seen < 7:
            for change in feed.take(5.0):
                assert isinstance(change, dict), change
                seen += 1
