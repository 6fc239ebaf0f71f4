"""Do streams of every kind outlive kill -9 of the engine, equal to the bit?

    python -m benchmarks.server.mixed_kills --rounds 8 --streams 32 --seed 0 [--speculation ngram]

A server on the embedded model serves all streams at once: chats, completions, Responses, Messages
and Ollama's chats, plain, with a form, with forced calls, one or several, and with reasoning, which
a template begins that is the model's own otherwise. The first run is undisturbed. In each
round after it the engine is killed up to --kills times, each time once a random share of the
events has come. What a client has in the end must be the same: texts, arguments, token ids, finish
reasons, usage, and the order of the kinds of events. Only ids, which are numbered as they come,
clocks, and where a text is cut into pieces may differ. The exit code is 1 if anything else did.

With --speculation, the first run is of a server without drafts, and the engine that is killed
verifies all drafts that the named proposers find.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.server.serving import Server, served
from quire.hub.model_folder import EMBEDDED_MODEL

ARGUMENTS = (
    *("--num-blocks", "768", "--max-num-seqs", "48", "--max-model-len", "512"),
    *("--max-engine-restarts", "1000000", "--keep-alive-s", "0.2", "--log-level", "error"),
)
REASONING = ("--reasoning-parser", "hermes", "--chat-template")
THINK = r"{%- if add_generation_prompt and enable_thinking %}{{- '<think>\n' }}{%- endif %}"
"""At the end of the template: the model is thinking already."""

EAGER_DRAFTS = ("--plugin", "benchmarks.server.eager_drafts", "--max-itl-ratio", "0")
LIMIT_S = 120.0

# ---- the calls ----------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
TEXT = {"type": "string", "maxLength": 40}
WRITE = {
    "type": "object",
    "properties": {"path": TEXT, "lines": {"type": "integer"}, "mode": {"enum": ["a", "w"]}},
    "required": ["path", "lines", "mode"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"code": TEXT, "tags": {"type": "array", "items": {"enum": ["io", "os", 3]}}},
    "required": ["code", "tags"],
    "additionalProperties": False,
}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = {"type": "function", "function": {"name": "write", "parameters": WRITE}}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
LISTING = {"type": "function", "function": {"name": "list_files", "parameters": NO_ARGUMENTS}}
NOTHING = {"type": "function", "function": {"name": "wait", "parameters": NO_ARGUMENTS}}
CHAT_TOOLS = {"tools": [FUNCTION, LISTING]}
FORM = {"type": "json_schema", "name": "answer", "schema": ANSWER}
CHAT_FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
FLAT_TOOLS = {"tools": [{"type": "function", "name": "write", "parameters": WRITE}]}
BLOCK_TOOLS = {"tools": [{"name": "write", "input_schema": WRITE}]}
NAMED = {"type": "function", "function": {"name": "write"}}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat, n 2": (CHAT, {"n": 2}),
    "chat, a call required": (CHAT, CHAT_TOOLS | {"tool_choice": "required"}),
    "chat, a function named": (CHAT, CHAT_TOOLS | {"tool_choice": NAMED}),
    "chat, a schema": (CHAT, {"response_format": CHAT_FORM}),
    "completion": ("/v1/completions", {}),
    "completion, a pattern": ("/v1/completions", {"guided_regex": r"([a-z]{2,9} = \d+\n){4,30}"}),
    "response": (RESPONSES, {}),
    "response, a call required": (RESPONSES, FLAT_TOOLS | {"tool_choice": "required"}),
    "response, a function named": (
        RESPONSES,
        FLAT_TOOLS | {"tool_choice": {"type": "function", "name": "write"}},
    ),
    "response, a schema": (RESPONSES, {"text": {"format": FORM}}),
    "message": (MESSAGES, {}),
    "message, any tool": (MESSAGES, BLOCK_TOOLS | {"tool_choice": {"type": "any"}}),
    "message, a schema": (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}},
    ),
    "chat, several calls": (
        CHAT,
        {"tools": [LISTING, NOTHING], "tool_choice": "required", "parallel_tool_calls": True},
    ),
    "chat, reasoning": (CHAT, {"reasoning": {"enabled": True}}),
    "chat, reasoning, a call": (
        CHAT,
        CHAT_TOOLS | {"tool_choice": "required", "reasoning": {"enabled": True}},
    ),
    "message, thinking": (MESSAGES, {"thinking": {"type": "adaptive"}}),
    "message, thinking, any tool": (
        MESSAGES,
        BLOCK_TOOLS | {"tool_choice": {"type": "any"}, "thinking": {"type": "adaptive"}},
    ),
    "response, reasoning": (RESPONSES, {"chat_template_kwargs": {"enable_thinking": True}}),
    "Ollama, thinking": ("/api/chat", {"think": True}),
    "Ollama": ("/api/chat", {}),
    "Ollama, a schema": ("/api/chat", {"format": ANSWER}),
}


@dataclass(frozen=True)
class Call:
    kind: str
    path: str
    body: dict[str, Any]


def make_call(index: int) -> Call:
    """Make a call. Calls of one kind differ in seed, temperature and length."""
    kind, (path, fields) = list(KINDS.items())[index % len(KINDS)]
    count = 90 + 5 * (index % 7)
    drawn = {"seed": index, "temperature": (1.0, 0.6)[index // len(KINDS) % 2]}
    body: dict[str, Any] = {"model": "embedded", "stream": True}
    if path == "/api/chat":
        body |= {"messages": QUESTION, "options": drawn | {"num_predict": count}}
    elif path == RESPONSES:
        body |= {"input": QUESTION[0]["content"], "max_output_tokens": count} | drawn
    else:
        body |= {"max_tokens": count} | drawn
        body |= {"prompt": "def join("} if path == "/v1/completions" else {"messages": QUESTION}
    if path in (CHAT, "/v1/completions"):
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    return Call(kind, path, body | fields)


# ---- what a client has in the end ---------------------------------------------------------------

CLOCKS = re.compile(r"(^|\.)(created(_at)?|completed_at|\w*_duration|sequence_number|cache_salt)$")
IDS = re.compile(r"(^|\.)(id|\w+_id|request_id)$")
PIECES = (  # paths whose values are one after another a whole
    re.compile(r"^choices\.\d+\.(text|token_ids|delta\.(content|reasoning(_content)?))$"),
    re.compile(r"^choices\.\d+\.delta\.tool_calls\.\d+\.function\.arguments$"),
    re.compile(r"^(delta|delta\.(text|thinking|partial_json)|message\.(content|thinking))$"),
)
PLACES = ("output_index", "content_index")


@dataclass
class Joined:
    """All that came in a stream's events, however it was cut into pieces.

    values: by the kind of event and the path in it: the pieces joined; of other fields each value
    that came, but not one that repeats the last. order: of the kinds of events, without
    repetitions.
    """

    values: dict[str, Any] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    num_events: int = 0
    _ids: dict[str, str] = field(default_factory=dict, compare=False)

    def add(self, event: dict[str, Any]) -> None:
        kind = event.get("type", "")
        if kind == "ping":
            return
        self.num_events += 1
        place = "/".join(str(event[name]) for name in PLACES if name in event)
        if kind.startswith("content_block"):
            place = str(event["index"])
        if [f"{kind} {place}"] != self.order[-1:]:
            self.order.append(f"{kind} {place}")
        for path, value in self._leaves(event, ""):
            self._put(f"{kind} {place} {path}", path, value)

    def _put(self, name: str, path: str, value: Any) -> None:
        if any(pattern.search(path) for pattern in PIECES):
            known = self.values.get(name, value[:0])
            self.values[name] = known + value
        elif value != self.values.setdefault(name, [value])[-1]:
            self.values[name].append(value)

    def _leaves(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if value is None or CLOCKS.search(path):
            return
        if isinstance(value, dict | list) and not path.endswith("token_ids"):
            items = value.items() if isinstance(value, dict) else by_index(value)
            for name, inner in items:
                yield from self._leaves(inner, f"{path}.{name}" if path else str(name))
        elif IDS.search(path) and isinstance(value, str):
            prefix = re.split("[-_]", value)[0]
            yield path, self._ids.setdefault(value, f"{prefix} {len(self._ids)}")
        else:
            yield path, value


def by_index(items: list[Any]) -> Iterator[tuple[str, Any]]:
    """A chunk has only the choices and calls that have changed: they say which they are."""
    for at, item in enumerate(items):
        yield str(item.get("index", at) if isinstance(item, dict) else at), item


def differences(found: Joined, wanted: Joined) -> Iterator[str]:
    if found.order != wanted.order:
        yield f"order of events: {found.order} instead of {wanted.order}"
    for name in wanted.values | found.values:
        ours, theirs = found.values.get(name), wanted.values.get(name)
        if ours != theirs:
            yield f"{name}: {ours!r} instead of {theirs!r}"


class Progress:
    """The events of all streams together, and how long none came."""

    def __init__(self) -> None:
        self.num_events = 0
        self.is_over = False
        self.longest_pause_s = 0.0
        self._last_s = time.monotonic()

    def note(self) -> None:
        now_s = time.monotonic()
        self.num_events += 1
        self.longest_pause_s = max(self.longest_pause_s, now_s - self._last_s)
        self._last_s = now_s


async def ask(client: httpx.AsyncClient, call: Call, salt: str, progress: Progress) -> Joined:
    """salt: of the prefix cache: what a stream finds there must not depend on who came first."""
    joined = Joined()
    body = call.body | {"cache_salt": salt}
    async with client.stream("POST", call.path, json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{call.kind}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            data = line.strip().removeprefix("data: ")  # Ollama's keep-alives are spaces
            if not data.startswith("{"):
                continue
            before = joined.num_events
            joined.add(json.loads(data))
            if joined.num_events > before:  # a ping is none
                progress.note()
    return joined


# ---- the runs -----------------------------------------------------------------------------------


def kill_engine(server: Server) -> bool:
    """Whether there was one to kill."""
    for child in server.api_server.children():
        if child.status() != psutil.STATUS_ZOMBIE:
            os.kill(child.pid, signal.SIGKILL)
            return True
    return False


async def kill_at(server: Server, moments: Sequence[int], progress: Progress) -> int:
    """Kill the engine when the number of events reaches each of `moments`. Returns the number of
    kills."""
    num_kills = 0
    for moment in moments:
        while progress.num_events < moment and not progress.is_over:
            await asyncio.sleep(0.001)
        if progress.is_over:
            break
        num_kills += kill_engine(server)
    return num_kills


async def run(
    server: Server, calls: Sequence[Call], salt: str, moments: Sequence[int] = ()
) -> tuple[list[Joined], int, float]:
    """The final content of each stream, how often the engine was killed meanwhile, and the longest
    time without an event of any stream."""
    progress = Progress()
    limits = httpx.Limits(max_connections=len(calls))
    url = f"http://{server.host}:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        asked = [ask(client, call, f"{salt} {at}", progress) for at, call in enumerate(calls)]
        killer = asyncio.ensure_future(kill_at(server, moments, progress))
        found = await asyncio.gather(*asked)
        progress.is_over = True
        return list(found), await killer, progress.longest_pause_s


def num_restarts(server: Server) -> int:
    answer = httpx.get(f"http://{server.host}:{server.port}/health", timeout=LIMIT_S)
    return int(answer.json()["num_restarts"])


def print_table(calls: Sequence[Call], expected: Sequence[Joined], wrong: Counter[str]) -> None:
    print(f"\n{'kind':<28}{'streams':>8}{'events':>8}{'differ':>8}  an end")
    for kind in dict.fromkeys(call.kind for call in calls):
        mine = [one for call, one in zip(calls, expected, strict=True) if call.kind == kind]
        num_events = sum(one.num_events for one in mine)
        print(f"{kind:<28}{len(mine):>8}{num_events:>8}{wrong[kind]:>8}  {end_of(mine[0])}")


def end_of(joined: Joined) -> str:
    names = ("finish_reason", "stop_reason", "done_reason", "response.status")
    reasons = [
        value[-1]
        for name, value in joined.values.items()
        if name.endswith(names) and isinstance(value[-1], str)
    ]
    return reasons[-1] if reasons else "-"


@contextmanager
def reasoning_server(
    folder: Path, speculation: str = "off", num_replicas: int = 1
) -> Iterator[Server]:
    """folder: gets the server's log and its template."""
    drafts: list[str] = []
    if speculation != "off":
        drafts = ["--speculation", speculation, "--ngram-min-match", "1", *EAGER_DRAFTS]
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    template = folder / "template.jinja"
    template.write_text(config["chat_template"] + THINK)
    replicas = ["--replicas", str(num_replicas)] if num_replicas > 1 else []
    arguments = [*ARGUMENTS, *replicas, *drafts, *REASONING, str(template)]
    with served(arguments, folder / "log") as server:
        yield server


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kills", type=int, default=3, help="in a round at most; at least one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculation", default="off", help="as of quire serve")
    parser.add_argument("--replicas", type=int, default=1, help="of the engine that is killed")
    wish = parser.parse_args(argv)
    rng = random.Random(wish.seed)
    calls = [make_call(index) for index in range(wish.streams)]
    wrong: Counter[str] = Counter()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = stack.enter_context(reasoning_server(Path(folder)))
        expected, _, _ = asyncio.run(run(server, calls, "undisturbed"))
        num_events = sum(one.num_events for one in expected)
        if wish.speculation != "off" or wish.replicas > 1:
            stack.close()
            server = stack.enter_context(
                reasoning_server(Path(folder), wish.speculation, wish.replicas)
            )
        for number in range(wish.rounds):
            count = rng.randint(1, wish.kills)
            moments = sorted(int(rng.random() * num_events) for _ in range(count))
            before, begin_s = num_restarts(server), time.monotonic()
            found, num_kills, pause_s = asyncio.run(run(server, calls, f"round {number}", moments))
            total.update(rounds=1, kills=num_kills, streams=len(calls))
            print(
                f"round {number}: {num_kills} kills, at events {moments} of {num_events}, restarts"
                f" {num_restarts(server) - before}, {time.monotonic() - begin_s:.1f} s,"
                f" longest pause {pause_s:.1f} s, since the last death"
                f" {server.health()['num_drafts']} drafts,"
                f" {server.health()['num_accepted_drafts']} accepted",
                flush=True,
            )
            for call, ours, theirs in zip(calls, found, expected, strict=True):
                if lines := list(differences(ours, theirs)):
                    wrong[call.kind] += 1
                    print(f"  {call.kind} (seed {calls.index(call)}):", *lines, sep="\n    ")
        print_table(calls, expected, wrong)
    print(f"\n{dict(total)}; streams that differ: {wrong.total()}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
