"""quire's own format of traces, which `quire serve --record` writes: a JSON object a line.

    {"line":"recording","version":1,"block_tokens":64,"time_ms":1,"max_model_len":2048,...}
    {"line":"request","number":0,"at_ms":31,"tenant":0,"prompt_tokens":200,"blocks":[0,1,2],
     "choices":[{"tokens":70,"end":"stop","blocks":[3]}],"max_tokens":256,"greedy":true,...}
    {"line":"refusal","number":1,"at_ms":40,"status":429,"kind":"overloaded"}
    {"line":"summary","requests":1,"refusals":1,"lost":0}

A request's line is written when it has ended. The summary stands at the end of a recording that was
ended in order; it is missing after a crash, and then the last line may be cut off.
docs/record-replay.md describes each field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigurationError
from quire.traces.trace import Trace, TraceOptions, TraceRequest

VERSION = 1


class RecordingHeader(
    msgspec.Struct, tag_field="line", tag="recording", frozen=True, forbid_unknown_fields=True
):
    """The first line. time_ms: all times are multiples of it. The others: of the engine."""

    version: int
    block_tokens: int
    time_ms: int
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0
    num_blocks: int = 0


class RecordedChoice(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One answer to a prompt. blocks: that it fills, behind those of the prompt."""

    tokens: int
    end: str
    blocks: tuple[int, ...] = ()


class RecordedRequest(
    msgspec.Struct,
    tag_field="line",
    tag="request",
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A request that the engine took in. parent: the number of the request whose answer it follows,
    think_ms after that ended. first_ms, took_ms: from its arrival on."""

    number: int
    at_ms: int
    tenant: int
    prompt_tokens: int
    blocks: tuple[int, ...]
    choices: tuple[RecordedChoice, ...]
    max_tokens: int
    took_ms: int
    first_ms: int | None = None
    greedy: bool = False
    stream: bool = False
    grammar: bool = False
    beam_width: int = 0
    adapter: int = 0
    parent: int | None = None
    think_ms: int = 0


class RecordedRefusal(
    msgspec.Struct, tag_field="line", tag="refusal", frozen=True, forbid_unknown_fields=True
):
    """A call that was answered with an error before the engine took it in. kind: the code of the
    error, as its answer had it."""

    number: int
    at_ms: int
    status: int
    kind: str


class RecordingSummary(
    msgspec.Struct,
    tag_field="line",
    tag="summary",
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """lost: requests that ended while too many waited to be written, or that waited when there were
    as many blocks as may be. hit_rate: share of the prompt tokens of answered requests that came
    from the prefix cache. The others: see `Trace`."""

    requests: int
    refusals: int
    lost: int
    hit_rate: float | None = None
    shared_tail_tokens: int | None = None
    continued_share: float | None = None


Line = RecordingHeader | RecordedRequest | RecordedRefusal | RecordingSummary

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def line_bytes(line: Line) -> bytes:
    """A line, with its newline."""
    return _encoder.encode(line) + b"\n"


def is_recording(first_line: bytes) -> bool:
    """Whether a file with this first line is a recording."""
    try:
        found: Any = msgspec.json.decode(first_line)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("line") == "recording"


def read_header(path: Path) -> RecordingHeader:
    """The first line of a recording. Raises ConfigurationError, OSError."""
    _, header = next(_parts(path))
    assert isinstance(header, RecordingHeader), "_parts has seen to it"
    return header


def read_recording(path: Path) -> Trace:
    """Raises ConfigurationError, naming file and line, where a line is none of a recording."""
    parts = _parts(path)
    _, header = next(parts)
    assert isinstance(header, RecordingHeader), "_parts has seen to it"
    numbered: list[tuple[int, TraceRequest]] = []  # the number in the file, which parents name
    summary = RecordingSummary(0, 0, 0)
    for place, part in parts:
        if isinstance(part, RecordedRequest):
            with _named(path, place):
                request = _request(part)
                request.check(header.block_tokens)
            numbered.append((part.number, request))
        elif isinstance(part, RecordedRefusal):
            numbered.append((part.number, TraceRequest(part.at_ms / 1000, 0, 0, end="refused")))
        elif isinstance(part, RecordingSummary):
            summary = part
    numbered.sort(key=lambda each: (each[1].at_s, each[0]))
    places = {number: index for index, (number, _) in enumerate(numbered)}
    requests = [_placed(each, index, places) for index, (_, each) in enumerate(numbered)]
    return Trace(
        header.block_tokens,
        tuple(requests),
        summary.shared_tail_tokens or 0,
        summary.continued_share or 0.0,
        summary.hit_rate,
    )


def _parts(path: Path) -> Iterator[tuple[int, Line]]:
    """All lines with their numbers, from 1; the first is the header, and the only one."""
    has_header = False
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            elif not line.strip():
                continue
            with _named(path, number):
                try:
                    part = _decoder.decode(line)
                except msgspec.DecodeError:
                    if number > 1 and not line.endswith(b"\n"):
                        return  # the server died while it wrote this
                    raise
                _check_place(part, number)
            yield number, part
            has_header = True
    if not has_header:
        raise ConfigurationError(f"{path} is empty, so it is no recording")


def _check_place(part: Line, number: int) -> None:
    if isinstance(part, RecordingHeader) is not (number == 1):
        raise ValueError("the header is the first line, and only that")
    if isinstance(part, RecordingHeader):
        if part.version != VERSION:
            raise ValueError(
                f"its version is {part.version}, but this quire reads version {VERSION}"
            )
        if part.block_tokens < 1:
            raise ValueError(f"block_tokens is {part.block_tokens}; it must be at least 1")


@contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    """Errors name the line."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"line {number} of {path} is not one of a recording: {error}"
        ) from error


def _request(part: RecordedRequest) -> TraceRequest:
    """Its parent is still a number of the file."""
    if not part.choices:
        raise ValueError("it has no choices")
    tokens = [choice.tokens for choice in part.choices]
    return TraceRequest(
        part.at_ms / 1000,
        part.prompt_tokens,
        round(sum(tokens) / len(tokens)),
        part.blocks,
        part.choices[0].blocks,
        part.tenant,
        part.parent,
        part.think_ms / 1000,
        part.choices[0].end,
        None if part.first_ms is None else part.first_ms / 1000,
        part.took_ms / 1000,
        TraceOptions(
            1 if part.beam_width else len(part.choices),
            part.beam_width,
            part.max_tokens,
            part.greedy,
            part.stream,
            part.grammar,
            part.adapter,
        ),
    )


def _placed(request: TraceRequest, index: int, places: Mapping[int, int]) -> TraceRequest:
    """With the parent's place in the trace; one whose line was lost is none."""
    parent = None if request.parent is None else places.get(request.parent)
    if parent is None or parent >= index:
        return replace(request, parent=None, think_s=0.0)
    return replace(request, parent=parent)
