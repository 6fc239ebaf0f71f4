"""Streamed equals whole for every dialect, every split and every text, however malformed."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.parsers.dialect_samples import (
    FIND,
    FORCED,
    SAMPLES,
    STRICT,
    TEXT,
    THOUGHT,
    USE,
    events_of,
    parts_of,
)

from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import DIALECTS, find_dialect
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)
from quire.text.parsers.tool_use import NO_TOOLS, ToolMode, ToolUse

BOTH_CALLS = [("find", FIND), ("stop", {})]
all_dialects = pytest.mark.parametrize("name", sorted(DIALECTS))


def calls_of(events: list[MessageEvent]) -> list[tuple[str, object]]:
    """Names and arguments of the whole calls; checks that events come in order."""
    calls = []
    name, arguments = "", ""
    for event in events:
        if isinstance(event, CallStart):
            name, arguments = event.name, ""
        elif isinstance(event, CallArguments):
            arguments += event.text
        elif isinstance(event, CallEnd):
            assert event.index >= len(calls)
            calls.append((name, json.loads(arguments)))
    return calls


def test_every_dialect_has_a_sample() -> None:
    assert set(SAMPLES) == set(DIALECTS)


@all_dialects
def test_a_message_is_read(name: str) -> None:
    text = SAMPLES[name]
    events = events_of(find_dialect(None, name), [text])
    assert calls_of(events) == BOTH_CALLS
    assert parts_of(events, str) == ([TEXT] if TEXT in text else [])
    assert parts_of(events, ReasoningPiece) == ([THOUGHT] if THOUGHT in text else [])


@all_dialects
def test_cut_anywhere_streamed_is_whole(name: str) -> None:
    """The message ends, as by max_tokens, behind any of its characters."""
    dialect, text = find_dialect(None, name), SAMPLES[name]
    for end in range(len(text)):
        whole = events_of(dialect, [text[:end]])
        assert whole == events_of(dialect, text[:end]), text[:end]
        assert calls_of(whole) == BOTH_CALLS[: len(calls_of(whole))]


@all_dialects
def test_arguments_stream(name: str) -> None:
    """A long string of an argument comes out while it is written; of a Python call when it ends."""
    dialect = find_dialect(None, name)
    is_python = any(form.__struct_config__.tag == "python" for form in dialect.calls[:1])
    begin, _, _ = SAMPLES[name].partition("</c>")
    parser = dialect.parser(USE, "")
    parser.push(begin + "</c")
    for _ in range(3):
        assert parser.push("word ") == ([] if is_python else [CallArguments(0, "word ")])


def fragments_of(dialect: Dialect) -> st.SearchStrategy[str]:
    """Parts of the dialect's messages, cut at odd places, and parts of JSON."""
    sample = SAMPLES[dialect.name]
    words = re.findall(r"<[^<>]*>|\[/?[A-Z_]+\]|\w+|[^\w\s]|\s+", sample)
    pieces = st.sampled_from(sorted({*words, *dialect.special_tokens, '{"name": "', "\\ud83d"}))
    slices = st.tuples(st.integers(0, len(sample)), st.integers(0, 60)).map(
        lambda at: sample[at[0] : at[0] + at[1]]
    )
    return st.one_of(
        pieces, slices, st.sampled_from([sample, "<", "{", '"', "\\", " \n", "é🙂", "\ufffd"])
    )


@all_dialects
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_streamed_is_whole_for_any_text_and_split(name: str, data: st.DataObject) -> None:
    dialect = find_dialect(None, name)
    text = "".join(data.draw(st.lists(fragments_of(dialect), max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for tool_use in (FORCED, STRICT):
        whole = events_of(dialect, [text], tool_use=tool_use)
        assert events_of(dialect, pieces, tool_use=tool_use) == whole
    whole = events_of(dialect, [text])
    assert events_of(dialect, pieces) == whole
    assert events_of(dialect, text) == whole
    calls_of(whole)  # arguments of whole calls are JSON
    starts = [event.index for event in whole if isinstance(event, CallStart)]
    assert starts == list(range(len(starts)))
    if not starts and not any(mark in text for mark in reasoning_marks(dialect)):
        found = "".join(parts_of(whole, str))
        assert text.startswith(found)
        cut_call = text.removeprefix(found).lstrip()
        markers = tuple(form.marker for form in dialect.calls if form.marker)
        assert not cut_call or cut_call.startswith(markers)


def reasoning_marks(dialect: Dialect) -> list[str]:
    if dialect.channels is not None:
        return [*dialect.special_tokens, "to="]
    reasoning = dialect.reasoning
    if reasoning is None:
        return []
    marks = [mark.strip() for mark in (*reasoning.begin, *reasoning.end)]
    return [*marks, *(token for token in dialect.special_tokens if marks[0].startswith(token))]


@all_dialects
def test_without_tools_calls_are_text(name: str) -> None:
    dialect, text = find_dialect(None, name), SAMPLES[name]
    for tool_use in (NO_TOOLS, ToolUse(USE.tools, ToolMode.NONE)):
        events = events_of(dialect, text, tool_use=tool_use)
        assert {type(event) for event in events} <= {str, ReasoningPiece}
        assert "find" in parts_of(events, str)[-1] or dialect.channels is not None


def test_plain_text_is_untouched() -> None:
    for name in DIALECTS:
        for text in ("\n Hello,\n\n world \n", " ", "{", "x" * 100):
            assert events_of(find_dialect(None, name), text) == [text], name
