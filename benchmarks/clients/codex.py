"""OpenAI's Codex against `quire serve`: one turn with a tool, on the embedded model.

    npm install --prefix clients @openai/codex
    python -m benchmarks.clients.codex --codex clients/node_modules/.bin/codex

starts `quire serve` and, before it, a proxy that does what a large model would do by itself: the
first request of the turn must call `exec_command`, with the one command that is allowed, and the
second must answer in text. Descriptions of tools, 18,000 characters, are left out: the embedded
model's context is shorter. Nothing else of the requests is touched. Prints what Codex sent, what it
made of the answers, and how much of the first request and its answer was in the prefix cache for
the second. The exit code is 1 where the loop did not end, or less than 99% of them was found again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.server.serving import served

LOG = Path(tempfile.gettempdir()) / "quire_codex.log"
SERVE_ARGUMENTS = ["--num-blocks", "1024", "--max-num-seqs", "4"]
WORDS = "quire-was-here"
COMMAND = f"echo {WORDS}"
LEAST_SHARE = 0.99
ONLY_COMMAND = {
    "type": "object",
    "properties": {"cmd": {"enum": [COMMAND]}},
    "required": ["cmd"],
    "additionalProperties": False,
}
TIMEOUT_S = 240

CONFIG = """\
model = "embedded"
model_provider = "quire"
model_instructions_file = "{home}/instructions.md"
[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "QUIRE_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
INSTRUCTIONS = "You are a careful agent that works in a terminal."
"""Codex' own, of 17,000 characters, do not fit into the embedded model's context."""


def steered(body: dict[str, Any]) -> dict[str, Any]:
    """The request with what the embedded model can't decide."""
    body = body | {"tools": [shortened(tool) for tool in body["tools"]]}
    if any(item.get("type") == "function_call_output" for item in body["input"]):
        return body | {"tool_choice": "none"}
    choice = {"type": "function", "name": "exec_command"}
    return body | {"tool_choice": choice, "parallel_tool_calls": False}


def shortened(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without descriptions and parameters, but for the command that it may run."""
    short = {name: value for name, value in tool.items() if name != "parameters"}
    if "description" in tool:
        short["description"] = ""
    if "tools" in tool:
        short["tools"] = [shortened(inner) for inner in tool["tools"]]
    if tool.get("name") == "exec_command":
        short |= {"parameters": ONLY_COMMAND, "strict": True}
    return short


class Proxy:
    """Passes requests on to a server. calls: (path, body, status, answer) of each."""

    def __init__(self, target: str) -> None:
        self.calls: list[tuple[str, dict[str, Any], int, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                sent = json.dumps(steered(body)).encode()
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in ("host", "content-length", "connection")
                }
                call = urllib.request.Request(target + self.path, sent, headers)
                try:
                    with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
                        self._pass_on(body, answer.status, answer.headers, answer.read())
                except urllib.error.HTTPError as error:
                    self._pass_on(body, error.code, error.headers, error.read())

            def _pass_on(
                self, body: dict[str, Any], status: int, headers: Any, data: bytes
            ) -> None:
                proxy.calls.append((self.path, body, status, data.decode()))
                self.send_response(status)
                self.send_header("Content-Type", headers["Content-Type"])
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Nothing: what matters is in `calls`."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def run_codex(codex: Path, url: str, folder: Path) -> list[dict[str, Any]]:
    """The events that Codex prints of one turn. folder: becomes its home and its workplace."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIG.format(home=home, url=url))
    (home / "instructions.md").write_text(INSTRUCTIONS)
    command = [str(codex), "exec", "--json", "--skip-git-repo-check", "-C", str(work)]
    # The one command that can come is an echo; a sandbox may not be had in a container.
    command += ["--dangerously-bypass-approvals-and-sandbox", "say that you were here"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)}
    done = subprocess.run(
        command,
        env=environment | {"QUIRE_KEY": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0:
        print(done.stdout, done.stderr, file=sys.stderr)
    return [json.loads(line) for line in lines]


def last_event(answer: str) -> dict[str, Any]:
    """The response at the end of a stream."""
    data = [
        line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")
    ]
    return dict(json.loads(data[-1])["response"]) if data else {}


def report(events: Sequence[dict[str, Any]], proxy: Proxy) -> list[str]:
    """Print what happened; returns what went wrong."""
    usages = []
    for path, body, status, answer in proxy.calls:
        tools = [f"{tool['type']} {tool.get('name', '')}".strip() for tool in body["tools"]]
        print(f"POST {path}: {len(body['input'])} items, tools: {', '.join(tools)}")
        print(f"  other fields: {', '.join(sorted(body.keys() - {'input', 'tools'}))}")
        if status != 200:
            return [f"status {status}: {answer}"]
        response = last_event(answer)
        usages.append(response["usage"])
        print(f"  {response['status']}: {json.dumps(response['output'])[:300]}")
        print(f"  usage: {json.dumps(response['usage'])}")
    kinds = [event["item"] for event in events if event["type"] == "item.completed"]
    commands = [item for item in kinds if item["type"] == "command_execution"]
    print(f"Codex: {[item['type'] for item in kinds]}, commands: {commands}")
    wrong = []
    if not any(WORDS in item["aggregated_output"] for item in commands):
        wrong.append("the command was not run")
    if not events or events[-1]["type"] != "turn.completed":
        wrong.append("the turn was not completed")
    if len(usages) != 2:
        return [*wrong, f"there were {len(usages)} requests instead of 2"]
    prompt, answer = (usages[0][f"{which}_tokens"] for which in ("input", "output"))
    found = usages[1]["input_tokens_details"]["cached_tokens"]
    share = found / (prompt + answer)
    print(
        f"second request: {found} tokens found in the cache, {share:.2%} of the first prompt's"
        f" {prompt} and its answer's {answer} (the last of which is never in the cache);"
        f" {min(found, prompt) / prompt:.2%} of the prompt"
    )
    return wrong + ([f"less than {LEAST_SHARE:.0%} was found again"] if share < LEAST_SHARE else [])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--codex", type=Path, required=True, help="Codex' program")
    add("--log", type=Path, default=LOG, help="the server's error output (%(default)s)")
    add("serve_arguments", nargs="*", help="for quire serve, behind --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    version = subprocess.run([args.codex, "--version"], capture_output=True, text=True, check=True)
    print(version.stdout.strip())
    with (
        served([*SERVE_ARGUMENTS, *args.serve_arguments], args.log) as server,
        Proxy(f"http://{server.host}:{server.port}").running() as proxy,
        tempfile.TemporaryDirectory() as folder,
    ):
        events = run_codex(args.codex.resolve(), proxy.url, Path(folder))
    wrong = report(events, proxy)
    print("\n".join(wrong) or "the loop ended")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
