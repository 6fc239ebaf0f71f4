"""Mooncake's and Azure's formats: in and out, found by their first line, refused by line."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.trace_cases import traces

from quire.errors import ConfigurationError
from quire.traces.azure import azure_lines
from quire.traces.mooncake import mooncake_lines, read_mooncake
from quire.traces.read import read_trace
from quire.traces.tokens import PromptTokens
from quire.traces.trace import Trace, TraceRequest

MOONCAKE = """\
{"timestamp": 0, "input_length": 758, "output_length": 500, "hash_ids": [0, 1]}

{"timestamp": 27482, "input_length": 512, "output_length": 52, "hash_ids": [0], "more": 1}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05,1,1
"""


def written(folder: Path, lines: str | Iterable[str]) -> Path:
    path = folder / "trace"
    path.write_text("".join(lines))
    return path


def test_mooncake_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE))
    first, second = trace.requests
    assert trace.block_tokens == 512
    assert first == TraceRequest(0.0, 758, 500, (0, 1))
    assert second == TraceRequest(27.482, 512, 52, (0,))


def test_hashes_of_64_bits_get_other_numbers(tmp_path: Path) -> None:
    big = 2**64 - 1
    lines = MOONCAKE.replace("[0, 1]", f"[{big}, 1]").replace("[0]", f"[{big}]")
    trace = read_trace(written(tmp_path, lines))
    (first, one), (again,) = (each.prefix_ids for each in trace.requests)
    assert first == again != one == 1
    tokens = PromptTokens(trace, 1000)
    assert tokens.prompt(0)[:512] == tokens.prompt(1)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_azure_is_read_and_put_in_order(newline: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.replace("\n", newline).encode())
    assert read_trace(path).requests == (
        TraceRequest(0.0, 4808, 10),
        TraceRequest(0.052, 3180, 8),
        TraceRequest(1.02004, 1, 1),
    )


@settings(max_examples=20)
@given(traces(only_prompts=True))
def test_mooncake_comes_back(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    lines = mooncake_lines(trace, trace.block_tokens)
    found = read_mooncake(written(tmp_path_factory.getbasetemp(), lines), trace.block_tokens)
    known = {each for request in trace.requests for each in request.prefix_ids}
    for old, new in zip(trace.requests, found.requests, strict=True):
        assert new.at_s == pytest.approx(old.at_s, abs=6e-4)
        count = len(old.prefix_ids)
        assert replace(new, at_s=0.0, prefix_ids=new.prefix_ids[:count]) == replace(old, at_s=0.0)
        assert len(new.prefix_ids) == -(-old.num_prompt_tokens // trace.block_tokens)
        assert known.isdisjoint(new.prefix_ids[count:]), "what had no number is like no other"


def test_blocks_of_a_recording_become_mooncakes(tmp_path: Path) -> None:
    first = TraceRequest(0.0, 1100, 2, tuple(range(17)))
    other = TraceRequest(1.0, 1100, 2, (*range(10), *range(20, 27)))
    short = TraceRequest(2.0, 200, 2, (0, 1, 2))
    trace = read_mooncake(written(tmp_path, mooncake_lines(Trace(64, (first, other, short)))))
    one, two, three = (each.prefix_ids for each in trace.requests)
    assert [len(one), len(two), len(three)] == [3, 3, 1]
    assert one[0] == two[0], "640 tokens are common, which is one block of 512"
    assert len({*one[1:], *two[1:], *three}) == 5
    with pytest.raises(ConfigurationError, match="--record-block-tokens"):
        mooncake_lines(Trace(48, (first,)))


@settings(max_examples=20)
@given(traces(), st.floats(0, 1e6))
def test_lengths_and_times_come_back_from_azure(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, later_s: float
) -> None:
    moved = [replace(each, at_s=each.at_s + later_s) for each in trace.requests]
    trace = Trace(trace.block_tokens, tuple(moved))
    path = written(tmp_path_factory.getbasetemp(), azure_lines(trace))
    kept = [each for each in trace.requests if each.end != "refused"]
    found = read_trace(path).requests
    assert len(found) == len(kept)
    for old, new in zip(kept, found, strict=True):
        assert new.at_s == pytest.approx(old.at_s - kept[0].at_s, abs=2e-7)
        assert new.num_prompt_tokens == old.num_prompt_tokens
        assert new.num_output_tokens == old.num_output_tokens


@pytest.mark.parametrize(
    ("text", "number", "why"),
    [
        (MOONCAKE + "{}\n", 4, "there is no 'timestamp'"),
        (MOONCAKE + "[\n", 4, "Expecting value"),
        (MOONCAKE + "7\n", 4, "not subscriptable"),
        (MOONCAKE.replace("758", "-1"), 1, "num_prompt_tokens is -1"),
        (MOONCAKE.replace("758", "1.5"), 1, "1.5 is not a whole number"),
        (MOONCAKE.replace("27482", '"x"'), 3, "could not convert"),
        (MOONCAKE.replace("27482", "1" + 400 * "0"), 3, "too large"),
        (MOONCAKE.replace("[0, 1]", "[0, 1, 2]"), 1, "it has 3 prefix ids, but"),
        (MOONCAKE.replace("[0, 1]", "[1, 1]"), 1, "occurs twice"),
        (AZURE + "2023-11-16,1,1\n", 5, "'2023-11-16' is not a time"),
        (AZURE + "2023-13-16 18:17:05,1,1\n", 5, "month must be in"),
        (AZURE + "2023-11-16 18:17:05,1\n", 5, "index out of range"),
        (AZURE + "2023-11-16 18:17:05,1,x\n", 5, "invalid literal"),
        (AZURE.replace("ContextTokens", "Tokens"), 1, "'ContextTokens' is not in list"),
    ],
)
def test_a_wrong_line_is_named(text: str, number: int, why: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError, match=f"line {number} of {path} is not .*{why}"):
        read_trace(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: written(folder, "a,b\n1,2\n"),
        lambda folder: written(folder, ""),
        lambda folder: folder,
        lambda folder: folder / "missing",
    ],
)
def test_files_that_are_no_traces_are_named(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigurationError, match=str(path)):
        read_trace(path)


@pytest.mark.parametrize("first", ["", "\n", "\r\n\n", "\ufeff"])
def test_text_before_the_first_line_is_skipped(first: str, tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, first + MOONCAKE)).requests) == 2


def test_a_quote_that_is_not_closed_is_named(tmp_path: Path) -> None:
    lines = AZURE + '"' + "1" * 200_000
    with pytest.raises(ConfigurationError, match=r"line 5 of .*field larger than field limit"):
        read_trace(written(tmp_path, lines))
