"""Claude Code against `quire serve`: what it sends, and whether a loop over a tool ends.

    npm install --prefix DIR @anthropic-ai/claude-code
    node DIR/node_modules/@anthropic-ai/claude-code/install.cjs
    python -m benchmarks.clients.claude_code --claude DIR/node_modules/.bin/claude

The embedded model knows no tools, so a proxy between the two asks for one: it sets `tool_choice` to
a tool at the first call, and to none after its result, where the answer must obey a schema, which
ends it. The model is the
embedded one with a longer context, since Claude Code's prompt alone has more tokens than its own.
Prints each call, and fails unless the tool was run, the second turn found 99% of its prefix in the
cache, and Claude Code ended by itself.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.server.serving import served
from quire.hub.model_folder import EMBEDDED_MODEL

MAX_MODEL_LEN = 65536
TOOL = "TaskList"
MAX_TOKENS = 200
LEAST_HIT = 0.99
LAST_FORMAT = {
    "type": "json_schema",
    "schema": {
        "type": "object",
        "properties": {"tasks": {"enum": ["none", "some"]}},
        "required": ["tasks"],
        "additionalProperties": False,
    },
}


@dataclass(slots=True)
class Call:
    """One request of the client, and what came. data: of the answer's events, or the answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int = 0
    ignored: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_turn(self) -> bool:
        return self.path.partition("?")[0] == "/v1/messages" and bool(self.body.get("tools"))

    @property
    def usage(self) -> dict[str, Any]:
        """The last one that came."""
        found: dict[str, Any] = {}
        for each in self.data:
            found |= each.get("message", each).get("usage", {})
        return found

    @property
    def hit(self) -> float:
        """The share of the prompt that was in the cache."""
        cached = self.usage.get("cache_read_input_tokens", 0)
        return float(cached / max(1, cached + self.usage.get("input_tokens", 0)))

    @property
    def stop_reason(self) -> str | None:
        for each in self.data:
            found = each.get("delta", each).get("stop_reason")
            if found is not None:
                return str(found)
        return None


class Proxy(ThreadingHTTPServer):
    """Between a client and the server at `url`. calls: what went through."""

    def __init__(self, url: str, tool: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url, self.tool = url, tool
        self.calls: list[Call] = []

    def steer(self, call: Call) -> None:
        """Ask for the tool until its result is there."""
        if not call.is_turn:
            return
        has_result = any(
            block.get("type") == "tool_result"
            for message in call.body["messages"]
            if isinstance(message["content"], list)
            for block in message["content"]
        )
        forced = {"type": "tool", "name": self.tool}
        call.body["tool_choice"] = {"type": "none"} if has_result else forced
        if has_result:
            call.body["output_config"] = {
                **call.body.get("output_config", {}),
                "format": LAST_FORMAT,
            }
        call.body["max_tokens"] = MAX_TOKENS
        call.body["temperature"] = 0


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(size) if size else b""
        body = json.loads(raw) if raw else {}
        call = Call(self.command, self.path, dict(self.headers), body)
        self.server.calls.append(call)
        self.server.steer(call)
        content, kind = self._forward(call, json.dumps(call.body).encode() if raw else None)
        self.send_response(call.status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        self.do_POST()

    def do_HEAD(self) -> None:
        self.do_POST()

    def _forward(self, call: Call, body: bytes | None) -> tuple[bytes, str]:
        request = urllib.request.Request(self.server.url + call.path, body, method=call.method)
        for name, value in call.headers.items():
            if name.lower() not in ("host", "connection", "content-length", "accept-encoding"):
                request.add_header(name, value)
        try:
            answer = urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            content, kind = answer.read(), answer.headers.get("content-type", "")
        call.status, call.ignored = answer.status, answer.headers.get("x-ignored-fields", "")
        lines = content.decode().splitlines() if "event-stream" in kind else []
        call.data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        if "json" in kind:
            call.data = [json.loads(content or b"{}")]
        return content, kind

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def proxied(url: str, tool: str) -> Iterator[Proxy]:
    """A running proxy; ended afterwards."""
    proxy = Proxy(url, tool)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def long_model(folder: Path) -> Path:
    """The embedded model, with a context for MAX_MODEL_LEN tokens."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ask(claude: Path, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """One run of Claude Code in a folder of its own, with nothing of this user's settings."""
    home, project = folder / "home", folder / "project"
    for each in (home, project):
        each.mkdir()
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "embedded",
        "ANTHROPIC_SMALL_FAST_MODEL": "embedded",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [claude.resolve(), "-p", "Which tasks are there?", "--output-format", "json"]
    return subprocess.run(
        command,
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def report(calls: Sequence[Call], run: subprocess.CompletedProcess[str]) -> list[str]:
    """Print what happened. Returns what fell short."""
    for call in calls:
        tokens = f"{call.usage.get('output_tokens', 0)} tokens, {call.hit:.2%} of the prompt cached"
        print(f"{call.method} {call.path}: {call.status} {call.stop_reason or ''} {tokens}")
        print(f"    fields: {', '.join(call.body)}; ignored: {call.ignored or 'none'}")
        print(f"    beta: {call.headers.get('anthropic-beta', '')}")
    print(f"Claude Code ended with {run.returncode}: {run.stdout[:400]} {run.stderr[:400]}")
    turns = [call for call in calls if call.is_turn]
    wrong = [f"{call.path}: {call.status}" for call in calls if call.status >= 500]
    wrong += [f"a turn got {turn.status}: {turn.data}" for turn in turns if turn.status != 200]
    if [turn.stop_reason for turn in turns[:1]] != ["tool_use"]:
        wrong.append("the first turn called no tool")
    if len(turns) < 2 or turns[1].hit < LEAST_HIT:
        wrong.append(f"the second turn found less than {LEAST_HIT:.0%} of its prefix")
    if run.returncode:
        wrong.append("Claude Code failed")
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--claude", type=Path, required=True, help="the program")
    parser.add_argument("--tool", default=TOOL, help="one of its tools (%(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = long_model(folder / "model")
        options = ["--model", str(model), "--served-model-name", "embedded"]
        options += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "4"]
        with (
            served(options, folder / "serve.log") as server,
            proxied(f"http://{server.host}:{server.port}", args.tool) as proxy,
        ):
            run = ask(args.claude, folder, f"http://127.0.0.1:{proxy.server_port}")
    wrong = report(proxy.calls, run)
    for each in wrong:
        print(each)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
