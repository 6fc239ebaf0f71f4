"""Messages that max_tokens cut: half a call is dropped where no text may stand, for any cut."""

from collections.abc import Iterator

import pytest
from tests.text.parsers.dialect_samples import (
    FORCED,
    SAMPLES,
    STRICT,
    TEXT,
    TOOLS,
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
)
from quire.text.parsers.tool_use import NO_TOOLS, ToolMode, ToolUse

NAMED = ToolUse(TOOLS, ToolMode.REQUIRED, frozenset({"find"}))
PREAMBLE = f"<|channel|>commentary<|message|>{TEXT}<|end|><|start|>assistant"
all_dialects = pytest.mark.parametrize("name", sorted(DIALECTS))


def calls_alone(name: str) -> str:
    """The dialect's sample without the text before its calls."""
    return SAMPLES[name].replace(PREAMBLE, "").replace(TEXT, "")


def cut_anywhere(text: str) -> Iterator[str]:
    """Every beginning of a text, also those that end inside a character, as a token may."""
    data = text.encode()
    for end in range(len(data)):
        yield data[:end].decode(errors="replace")


def read(
    dialect: Dialect, text: str, tool_use: ToolUse, *, has_answer_format: bool = False
) -> list[MessageEvent]:
    """Read in one piece and by characters, which is the same."""
    whole, streamed = (
        events_of(dialect, pieces, tool_use=tool_use, has_answer_format=has_answer_format)
        for pieces in ([text], text)
    )
    assert whole == streamed, text
    return whole


def text_of(events: list[MessageEvent]) -> str:
    return "".join(parts_of(events, str))


def check_calls(events: list[MessageEvent]) -> None:
    """Calls come in order, each but the last one whole."""
    calls = [event for event in events if isinstance(event, CallStart)]
    assert [call.name for call in calls] == ["find", "stop"][: len(calls)]
    num_whole = sum(isinstance(event, CallEnd) for event in events)
    assert len(calls) - num_whole in (0, 1)


@all_dialects
def test_a_forced_call_is_never_text(name: str) -> None:
    dialect = find_dialect(None, name)
    for cut in cut_anywhere(calls_alone(name)):
        events = read(dialect, cut, FORCED)
        assert not text_of(events), cut
        check_calls(events)
        assert not text_of(events_of(dialect, [cut], tool_use=NAMED))


@all_dialects
def test_a_call_is_no_text_once_its_mark_is_there(name: str) -> None:
    """Before that, half a mark is text: a model that is free may have meant it."""
    dialect, sample = find_dialect(None, name), SAMPLES[name]
    markers = [form.marker for form in dialect.calls if form.marker and form.marker in sample]
    if not markers:
        return
    before, mark, _ = sample.partition(markers[0])
    text = TEXT if TEXT in before else ""
    for cut in cut_anywhere(sample):
        if len(cut.encode()) >= len((before + mark).encode()):
            events = read(dialect, cut, USE)
            assert text_of(events) == text, cut
            check_calls(events)
    for end in range(1, len(mark)):
        found = text_of(read(dialect, before + mark[:end], USE))
        assert found.startswith(text) and found.endswith(mark[:end])


@pytest.mark.parametrize("name", ["json", "llama3", "pythonic"])
def test_without_a_mark_a_cut_call_is_text_only_where_text_may_begin_so(name: str) -> None:
    dialect, sample = find_dialect(None, name), calls_alone(name)
    begin = min(at for at in map(sample.find, "{[") if at >= 0)
    for cut in cut_anywhere(sample):
        if len(cut) > begin:
            assert not text_of(read(dialect, cut, STRICT)), cut
    cut = sample[: begin + 3]
    assert text_of(read(dialect, cut, USE)) == cut[begin:]
    assert text_of(read(dialect, cut, STRICT, has_answer_format=True)) == cut[begin:]
    assert text_of(read(dialect, "Hel", STRICT)) == "Hel"


def test_a_block_of_json_that_may_be_no_call_is_text() -> None:
    """To Gemma 3 it is a call if it has the name of a tool; so long it may be an example."""
    dialect = find_dialect(None, "gemma3")
    text = 'Like this:\n```json\n{"a": [1, 2'
    for cut in cut_anywhere(text):
        assert text_of(read(dialect, cut, USE)) == cut
        assert not text_of(read(dialect, cut, FORCED))
    assert text_of(read(dialect, text, STRICT)) == "Like this:"
    call = '```json\n{"name": "find", "parameters": {"te'
    assert read(dialect, call, USE) == [CallStart(0, "find"), CallArguments(0, '{"te')]


def test_behind_a_special_token_half_a_mark_of_reasoning_is_no_text() -> None:
    dialect = find_dialect(None, "gemma4")
    mark = "<|channel>thought\n"
    token = "<|channel>"
    for tool_use in (USE, FORCED, NO_TOOLS):
        for end in range(len(token), len(mark) + 1):
            assert not read(dialect, mark[:end], tool_use)
        text = f"{token}though not"
        assert text_of(read(dialect, text, tool_use)) == ("" if tool_use is FORCED else text)
    assert text_of(read(dialect, token[:-1], USE)) == token[:-1]


@pytest.mark.parametrize(
    "text", ["\ufffd", "a\ufffd", "a\ufffd\ufffd", "\ufffdb", "a\ufffdb\ufffd"]
)
def test_replacement_characters_are_text_where_text_is_allowed(text: str) -> None:
    for name in DIALECTS:
        assert read(find_dialect(None, name), text, USE) == [text]
        assert not read(find_dialect(None, name), text, FORCED)


def test_harmony_goes_on_with_an_answer_that_the_prompt_began() -> None:
    dialect = find_dialect(None, "harmony")
    prompt_end = "<|start|>assistant<|channel|>final<|message|>It"
    events = events_of(dialect, [" is."], tool_use=FORCED, prompt_end=prompt_end)
    assert text_of(events).endswith(" is.")
