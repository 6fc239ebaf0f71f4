"""quire's own trace format, written by `quire serve --record`: one JSON object per line.

    {"line":"recording","version":1,"block_tokens":64,"time_ms":1,"max_model_len":2048,...}
    {"line":"request","number":0,"at_ms":31,"tenant":0,"prompt_tokens":200,"blocks":[0,1,2],
     "choices":[{"tokens":70,"end":"stop","blocks":[3]}],"max_tokens":256,"greedy":true,...}
    {"line":"refusal","number":1,"at_ms":40,"status":429,"kind":"overloaded"}
    {"line":"summary","requests":1,"refusals":1,"lost":0}

A request's line is written when the request ends. The summary is the last line of a recording that
was closed properly; after a crash it is missing, and the last line may be cut off.
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
    """The first line of a recording. Its fields from max_model_len on describe the engine."""

    version: int
    block_tokens: int
    #: All times in the recording are rounded to multiples of this number of milliseconds.
    time_ms: int
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0
    num_blocks: int = 0


class RecordedChoice(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One answer to a prompt."""

    tokens: int
    end: str
    #: The ids of the blocks that the answer fills, after the prompt's blocks.
    blocks: tuple[int, ...] = ()


class RecordedRequest(
    msgspec.Struct,
    tag_field="line",
    tag="request",
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A request that the engine accepted. Fields without a comment are explained in
    `TraceRequest`."""

    number: int
    at_ms: int
    tenant: int
    prompt_tokens: int
    blocks: tuple[int, ...]
    choices: tuple[RecordedChoice, ...]
    max_tokens: int
    #: Milliseconds from arrival to end.
    took_ms: int
    #: Milliseconds from arrival to the first token; None if there was no token.
    first_ms: int | None = None
    greedy: bool = False
    stream: bool = False
    grammar: bool = False
    beam_width: int = 0
    adapter: int = 0
    #: The number of the request whose answer this request continues; None if unknown, or if the
    #: request continues no answer.
    parent: int | None = None
    #: Milliseconds from the parent's end to this request's arrival.
    think_ms: int = 0
    contents: tuple[tuple[int, int], ...] = ()


class RecordedRefusal(
    msgspec.Struct, tag_field="line", tag="refusal", frozen=True, forbid_unknown_fields=True
):
    """A call to the server that got an error because the engine did not accept its request."""

    number: int
    at_ms: int
    status: int
    #: The error code in the response body.
    kind: str


class RecordingSummary(
    msgspec.Struct,
    tag_field="line",
    tag="summary",
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The last line of a recording. Fields without a comment are explained in `Trace`."""

    requests: int
    refusals: int
    #: Number of requests that were not written, because too many waited to be written or the limit
    #: of different blocks was reached.
    lost: int
    #: The share of the prompt tokens of answered requests that came from the prefix cache.
    hit_rate: float | None = None
    shared_tail_tokens: int | None = None
    continued_share: float | None = None


Line = RecordingHeader | RecordedRequest | RecordedRefusal | RecordingSummary

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def line_bytes(line: Line) -> bytes:
    """The line as JSON bytes, with a newline at the end."""
    return _encoder.encode(line) + b"\n"


def is_recording(first_line: bytes) -> bool:
    """True if a file with this first line is a recording."""
    try:
        found: Any = msgspec.json.decode(first_line)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("line") == "recording"


def read_recording(path: Path) -> Trace:
    """Read a recording. Raises ConfigurationError with file and line if a line has another form."""
    parts = _parts(path)
    _, header = next(parts)
    assert isinstance(header, RecordingHeader), "_parts has seen to it"
    numbered: list[tuple[int, TraceRequest]] = []  # (number in the file, request)
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
    """All lines with their line numbers from 1. The first line, and no other, is a header."""
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
                        return  # the server crashed while it wrote this line
                    raise
                _check_place(part, number)
            yield number, part
            has_header = True
    if not has_header:
        raise ConfigurationError(f"{path} is empty, so it is not a recording")


def _check_place(part: Line, number: int) -> None:
    if isinstance(part, RecordingHeader) is not (number == 1):
        raise ValueError("the first line must be the header, and no other line may be a header")
    if isinstance(part, RecordingHeader):
        if part.version != VERSION:
            raise ValueError(
                f"its version is {part.version}, but this quire reads version {VERSION}"
            )
        if part.block_tokens < 1:
            raise ValueError(f"block_tokens is {part.block_tokens}; it must be at least 1")


@contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    """Turn errors in the `with` block into ConfigurationError with file and line."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"line {number} of {path} is not a line of a recording: {error}"
        ) from error


def _request(part: RecordedRequest) -> TraceRequest:
    """The request that a line describes. Its `parent` is still a request number, not an index in
    the trace."""
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
        part.contents,
    )


def _placed(request: TraceRequest, index: int, places: Mapping[int, int]) -> TraceRequest:
    """The request with its parent's index in the trace; None if the parent's line was lost."""
    parent = None if request.parent is None else places.get(request.parent)
    if parent is None or parent >= index:
        return replace(request, parent=None, think_s=0.0)
    return replace(request, parent=parent)
