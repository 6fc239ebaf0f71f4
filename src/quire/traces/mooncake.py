"""Reads and writes Mooncake's trace format: one JSON object per line (Qin et al., FAST 2025).

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

timestamp is in ms. hash_ids has one number for each block of 512 prompt tokens; the last block may
be partly filled. Some writers use 64-bit hashes as ids; the reader replaces the hashes by smaller
numbers. The format has no tenants, finish reasons, links between turns, or blocks of answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path

from quire.errors import ConfigurationError
from quire.traces.trace import Trace, TraceRequest, in_order

BLOCK_TOKENS = 512
#: Ids at or above this number are treated as hashes. Smaller ids are kept unchanged.
_FIRST_HASH = 1 << 32


def read_mooncake(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read a trace whose blocks have `block_tokens` tokens; the file does not contain this number.

    Raises ConfigurationError with file and line if a line is not a request in this format.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return Trace(block_tokens, in_order(_requests(path, lines, block_tokens)))


def mooncake_lines(trace: Trace, block_tokens: int = BLOCK_TOKENS) -> Iterator[str]:
    """The trace's lines in this format, each with its newline, in blocks of `block_tokens` tokens.

    Leaves out refused requests and all fields that the format lacks. Rounds arrivals to ms. An id
    identifies the whole prefix up to the end of its block, so every eighth id of 64-token blocks
    serves as the id of a 512-token block. A block without an id gets a unique one. Raises
    ConfigurationError if block_tokens is not a multiple of the trace's block size.
    """
    if block_tokens % trace.block_tokens:
        raise ConfigurationError(
            f"the trace's blocks have {trace.block_tokens} tokens, but the blocks to write have"
            f" {block_tokens}, which is not a multiple of {trace.block_tokens}; record"
            f" with a --record-block-tokens that divides {block_tokens}"
        )
    return _lines(trace, block_tokens)


def _lines(trace: Trace, block_tokens: int) -> Iterator[str]:
    each = block_tokens // trace.block_tokens
    known = (max(request.prefix_ids, default=-1) for request in trace.requests)
    unlike = count(1 + max(known, default=-1))
    for request in trace.requests:
        if request.end == "refused":
            continue
        num_blocks = -(-request.num_prompt_tokens // block_tokens)
        ids = request.prefix_ids[each - 1 :: each]
        row = {
            "timestamp": round(1000 * request.at_s),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": [*ids, *islice(unlike, num_blocks - len(ids))],
        }
        yield json.dumps(row) + "\n"


def _requests(path: Path, lines: Iterable[str], block_tokens: int) -> Iterator[TraceRequest]:
    numbers: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            request = TraceRequest(
                float(row["timestamp"]) / 1000,
                _count(row["input_length"]),
                _count(row["output_length"]),
                tuple(_prefix_id(each, numbers) for each in row["hash_ids"]),
            )
            request.check(block_tokens)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigurationError(
                f"line {number} of {path} is not a request of a Mooncake trace: {why}; it must be a"
                " JSON object with timestamp, input_length, output_length and hash_ids"
            ) from error
        yield request


def _prefix_id(value: object, numbers: dict[int, int]) -> int:
    """The id of a block. `numbers` maps each hash read so far to its id; a new hash is added to
    it."""
    number = _count(value)
    if number < _FIRST_HASH:
        return number
    return numbers.setdefault(number, _FIRST_HASH + len(numbers))


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value
