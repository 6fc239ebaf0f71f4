"""Compares /v1/messages/count_tokens with the input tokens that answers to the same calls report.

    python -m benchmarks.clients.count_tokens --calls 500

starts `quire serve` and sends random calls, with system prompts, histories of tools, thinking and
formats, through Anthropic's own client, each once to be counted and once to be answered with one
token. Also used by the tests of the server, with fewer calls.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic

from benchmarks.server.serving import served

LOG = Path(tempfile.gettempdir()) / "quire_count_tokens.log"

WORDS = ["alpha", "beta", "read_file()", "naïve", "数字", "🙂", "<|im_end|>", "<tool_call>"]
WORDS += ['{"a": 1}', "\n", "os.path.join"]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    {"type": "object", "properties": {}},
    {
        "type": "object",
        "properties": {"lines": {"type": "array", "items": {"type": "integer"}}},
        "additionalProperties": False,
    },
]


def random_calls(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The fields that make the prompts of `count` calls; equal seeds give equal fields."""
    choose = random.Random(seed)
    return (_call(choose) for _ in range(count))


def _call(choose: random.Random) -> dict[str, Any]:
    tools = [_tool(choose, at) for at in range(choose.choice([0, 0, 1, 2, 4]))]
    call: dict[str, Any] = {"messages": list(_messages(choose, tools))}
    if choose.random() < 0.6:
        call["system"] = choose.choice([_text(choose), _blocks(choose)])
    if tools:
        call["tools"] = tools
        if choose.random() < 0.5:
            call["tool_choice"] = {"type": choose.choice(["auto", "none", "any"])}
    if choose.random() < 0.4:
        call["thinking"] = choose.choice(
            [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}]
        )
    return call


def _messages(choose: random.Random, tools: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for turn in range(choose.randrange(1, 5)):
        yield {"role": "user", "content": choose.choice([_text(choose), _blocks(choose)])}
        if tools and choose.random() < 0.7:
            yield from _tool_turn(choose, tools, turn)
        else:
            yield {"role": "assistant", "content": _text(choose)}
    yield {"role": "user", "content": _text(choose)}


def _tool_turn(
    choose: random.Random, tools: Sequence[dict[str, Any]], turn: int
) -> Iterator[dict[str, Any]]:
    called = choose.sample(tools, choose.randrange(1, min(3, len(tools)) + 1))
    ids = [f"toolu_{turn}_{at}" for at in range(len(called))]
    thought = {"type": "thinking", "thinking": _text(choose), "signature": "x"}
    calls = [
        {"type": "tool_use", "id": call_id, "name": tool["name"], "input": _arguments(choose)}
        for call_id, tool in zip(ids, called, strict=True)
    ]
    spoken = _blocks(choose) if choose.random() < 0.5 else []
    yield {"role": "assistant", "content": [*choose.choice([[], [thought]]), *spoken, *calls]}
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": call_id, "content": _text(choose)} for call_id in ids
    ]
    if choose.random() < 0.3:
        results[0] |= {"is_error": True, "content": _blocks(choose)}
    yield {"role": "user", "content": results}
    if choose.random() < 0.5:
        yield {"role": "assistant", "content": _text(choose)}


def _tool(choose: random.Random, at: int) -> dict[str, Any]:
    tool = {"name": f"tool_{at}", "input_schema": choose.choice(SCHEMAS)}
    return tool | ({"description": _text(choose)} if choose.random() < 0.7 else {})


def _arguments(choose: random.Random) -> dict[str, Any]:
    return {word: choose.choice([1, None, [word], _text(choose)]) for word in _some(choose, 2)}


def _blocks(choose: random.Random) -> list[dict[str, Any]]:
    hints = [{}, {"cache_control": {"type": "ephemeral"}}]
    count = choose.randrange(1, 4)
    return [{"type": "text", "text": _text(choose)} | choose.choice(hints) for _ in range(count)]


def _text(choose: random.Random) -> str:
    return " ".join(_some(choose, 7)) or "x"


def _some(choose: random.Random, most: int) -> list[str]:
    return choose.choices(WORDS, k=choose.randrange(1, most + 1))


def counted_and_billed(client: anthropic.Anthropic, call: dict[str, Any]) -> tuple[int, int]:
    """The tokens of one call's prompt: as they are counted, and as its answer has them."""
    counted = client.messages.count_tokens(model="embedded", **call).input_tokens
    usage = client.messages.create(model="embedded", max_tokens=1, **call).usage
    return counted, usage.input_tokens + (usage.cache_read_input_tokens or 0)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve_arguments", nargs="*", help="for quire serve, behind --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    found = Counter[str]()
    num_tokens, began_s = 0, time.monotonic()
    names = ["--served-model-name", "embedded", *args.serve_arguments]
    with served(names, LOG) as server:
        url = f"http://{server.host}:{server.port}"
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            for call in random_calls(args.seed, args.calls):
                counted, billed = counted_and_billed(client, call)
                found["equal" if counted == billed else "different"] += 1
                found["with tools"] += "tools" in call
                found["with a system prompt"] += "system" in call
                found["with thinking"] += "thinking" in call
                num_tokens += billed
    for name, count in found.items():
        print(f"{count:6}  {name}")
    print(f"{num_tokens} prompt tokens, {time.monotonic() - began_s:.1f} s")
    sys.exit(1 if found["different"] else 0)


if __name__ == "__main__":
    main()
