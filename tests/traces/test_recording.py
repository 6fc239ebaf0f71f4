"""Our own format: what is written is read; what is damaged is named."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from tests.traces.trace_cases import traces

from quire.errors import ConfigurationError
from quire.traces.read import read_trace
from quire.traces.recording import (
    RecordedChoice,
    RecordedRefusal,
    RecordedRequest,
    RecordingHeader,
    RecordingSummary,
    line_bytes,
)
from quire.traces.trace import PLAIN, Trace, TraceOptions, TraceRequest

HEADER = RecordingHeader(1, 64, 10, max_model_len=1024, block_size=16)
FIRST = RecordedRequest(
    number=0,
    at_ms=30,
    tenant=1,
    prompt_tokens=130,
    blocks=(0, 1),
    choices=(RecordedChoice(70, "stop", (2,)), RecordedChoice(60, "length")),
    max_tokens=90,
    took_ms=500,
    first_ms=100,
    greedy=True,
)
REFUSAL = RecordedRefusal(1, 40, 429, "overloaded")
TURN = RecordedRequest(
    number=2,
    at_ms=730,
    tenant=1,
    prompt_tokens=210,
    blocks=(0, 1, 2),
    choices=(RecordedChoice(0, "disconnect"),),
    max_tokens=8,
    took_ms=20,
    stream=True,
    grammar=True,
    adapter=2,
    parent=0,
    think_ms=200,
    contents=((3, 60), (70, 1)),
)
SUMMARY = RecordingSummary(2, 1, 0, 0.5, 17, 0.9)


def written(folder: Path, *lines: object, rest: bytes = b"") -> Path:
    path = folder / "load"
    path.write_bytes(b"".join(line_bytes(line) for line in lines) + rest)  # type: ignore[arg-type]
    return path


def test_a_recording_is_read(tmp_path: Path) -> None:
    """In the order of arrivals, though it was written in that of ends."""
    path = written(tmp_path, HEADER, REFUSAL, TURN, FIRST, SUMMARY)
    trace = read_trace(path)
    assert (trace.block_tokens, trace.hit_rate) == (64, 0.5)
    assert (trace.shared_tail_tokens, trace.continued_share) == (17, 0.9)
    first, refused, turn = trace.requests
    assert first == TraceRequest(
        *(0.03, 130, 65, (0, 1), (2,), 1, None, 0.0, "stop", 0.1, 0.5),
        TraceOptions(2, max_tokens=90, is_greedy=True, is_streamed=False),
    )
    assert refused == TraceRequest(0.04, 0, 0, end="refused")
    assert turn == TraceRequest(
        *(0.73, 210, 0, (0, 1, 2), (), 1, 0, 0.2, "disconnect", None, 0.02),
        TraceOptions(max_tokens=8, is_greedy=False, has_grammar=True, adapter=2),
        ((3, 60), (70, 1)),
    )
    first_line = path.read_bytes().splitlines()[0]
    assert msgspec.json.decode(first_line, type=RecordingHeader) == HEADER


@settings(max_examples=25)
@given(traces(block_tokens=8))
def test_any_trace_comes_back(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    """Whatever the order of the lines."""
    lines: list[object] = []
    for number, each in enumerate(trace.requests):
        at_ms = round(1000 * each.at_s)
        if each.end == "refused":
            lines.append(RecordedRefusal(number, at_ms, 429, "overloaded"))
            continue
        lines.append(
            RecordedRequest(
                number=number,
                at_ms=at_ms,
                tenant=each.tenant,
                prompt_tokens=each.num_prompt_tokens,
                blocks=each.prefix_ids,
                choices=(RecordedChoice(each.num_output_tokens, each.end, each.output_ids),),
                max_tokens=40,
                took_ms=7,
                parent=each.parent,
                think_ms=round(1000 * each.think_s),
            )
        )
    path = written(tmp_path_factory.getbasetemp(), RecordingHeader(1, 8, 1), *reversed(lines))
    for old, new in zip(trace.requests, read_trace(path).requests, strict=True):
        assert new.at_s == pytest.approx(old.at_s)
        if old.end != "refused":
            assert new.think_s == pytest.approx(old.think_s)
            same = {"at_s": 0.0, "think_s": 0.0, "took_s": None, "options": PLAIN}
            assert replace(new, **same) == replace(old, **same)


def test_a_parent_that_was_lost_is_none(tmp_path: Path) -> None:
    (turn,) = read_trace(written(tmp_path, HEADER, TURN)).requests
    assert (turn.parent, turn.think_s) == (None, 0.0)


def test_blank_lines_and_a_mark_of_the_encoding_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, FIRST, rest=b"\n" + line_bytes(TURN) + b"\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_trace(path).requests) == 2


def test_a_line_that_was_cut_off_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, FIRST, rest=line_bytes(TURN)[:50])
    assert len(read_trace(path).requests) == 1


@pytest.mark.parametrize(
    ("lines", "rest", "why"),
    [
        ((HEADER, FIRST), b"{}\n", "line 3 .*missing required field `line`"),
        ((HEADER,), b'{"line":"refusal","number":"x"}\n', "line 2 .*Expected `int`"),
        ((HEADER, HEADER), b"", "line 2 .*the first line must be the header"),
        ((HEADER,), b'{"line":"party"}\n', "line 2 .*Invalid value 'party'"),
        ((RecordingHeader(9, 64, 1),), b"", "line 1 .*its version is 9"),
        ((RecordingHeader(1, 0, 1),), b"", "line 1 .*block_tokens is 0"),
        ((RecordingHeader(1, 8, 1), FIRST), b"", "block"),
        ((RecordingHeader(1, 128, 1), FIRST, TURN), b"", "line 3 .*has 3 prefix ids, but"),
    ],
)
def test_a_wrong_line_is_named(
    lines: tuple[object, ...], rest: bytes, why: str, tmp_path: Path
) -> None:
    if why == "block":  # ids for a part of the prompt only are no mistake
        assert len(read_trace(written(tmp_path, *lines)).requests) == 1
        return
    with pytest.raises(ConfigurationError, match=why):
        read_trace(written(tmp_path, *lines, rest=rest))


def test_every_field_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "record-replay.md").read_text()
    for kind in (
        RecordingHeader,
        RecordedRequest,
        RecordedChoice,
        RecordedRefusal,
        RecordingSummary,
    ):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in page, name
