"""Messages as models of each dialect write them, with two calls, and how tests run parsers."""

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from quire.text.parsers.dialect import Dialect
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse

TOOLS = (
    Tool(
        "find",
        "Finds a text in files.",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "limit": {"type": "integer"},
                "folders": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["text"],
        },
    ),
    Tool("stop"),
)
USE = ToolUse(TOOLS, ToolMode.AUTO)
FORCED = ToolUse(TOOLS, ToolMode.REQUIRED)
STRICT = ToolUse(tuple(replace(tool, is_strict=True) for tool in TOOLS), ToolMode.AUTO)

THOUGHT, TEXT = "It is in <src>.", "I'll look."
FIND = {"text": 'a "b"\n</c> é🙂', "limit": 3, "folders": ["x", "y"]}

SAMPLES: dict[str, str] = tomllib.loads(
    (Path(__file__).parent / "dialect_samples.toml").read_text(encoding="utf-8")
)
"""By the dialect's name: a message with calls of both tools, the first with FIND."""


def events_of(
    dialect: Dialect,
    pieces: Iterable[str],
    *,
    tool_use: ToolUse = USE,
    prompt_end: str = "",
    has_answer_format: bool = False,
) -> list[MessageEvent]:
    """What a message's pieces become, adjacent pieces of one kind joined."""
    parser = dialect.parser(tool_use, prompt_end, has_answer_format=has_answer_format)
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    joined: list[MessageEvent] = []
    for kind, group in groupby(events, type):
        if kind in (CallStart, CallEnd):
            joined += group
        else:
            joined.append(_join(list(group)))
    return joined


def _join(group: list[MessageEvent]) -> MessageEvent:
    first = group[0]
    text = "".join(map(_text_of, group))
    if isinstance(first, CallArguments):
        return CallArguments(first.index, text)
    return ReasoningPiece(text) if isinstance(first, ReasoningPiece) else text


def parts_of(events: list[MessageEvent], kind: type[MessageEvent]) -> list[str]:
    """The texts of one kind of pieces."""
    return [_text_of(event) for event in events if isinstance(event, kind)]


def _text_of(event: MessageEvent) -> str:
    return event if isinstance(event, str) else getattr(event, "text", "")
