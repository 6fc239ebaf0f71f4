"""Reads and writes Azure's trace format: CSV with times and lengths.

The format comes from Patel et al., Splitwise, ISCA 2024:

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

The format has no prefix ids, tenants, finish reasons, or links between turns.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from quire.errors import ConfigurationError
from quire.traces.trace import Trace, TraceRequest, in_order

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
#: Block size of the `Trace` that is read; it has no effect, since the format has no prefix ids.
BLOCK_TOKENS = 512

#: Date and time written for second 0 of a trace, since a `Trace` holds no date.
EPOCH = datetime(2000, 1, 1)

_TICKS = 10**7  # ticks per second; a tick is 100 ns
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|[+-]\d\d:\d\d)?")


def read_azure(path: Path) -> Trace:
    """Read a trace; its arrival times are seconds since the first request.

    Raises ConfigurationError with file and line if a line is not a request in this format.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
        rows = list(_rows(path, _split(path, lines)))
    begin = min((ticks for ticks, _, _ in rows), default=0)
    return Trace(
        BLOCK_TOKENS,
        in_order(
            TraceRequest((ticks - begin) / _TICKS, prompt, output) for ticks, prompt, output in rows
        ),
    )


def azure_lines(trace: Trace) -> Iterator[str]:
    """The trace's lines in this format, each with its newline.

    Leaves out refused requests and all fields that the format lacks. Rounds arrivals to 100 ns.
    """
    yield ",".join(HEADER) + "\n"
    for request in trace.requests:
        if request.end != "refused":
            seconds, ticks = divmod(round(request.at_s * _TICKS), _TICKS)
            time = EPOCH + timedelta(seconds=seconds)
            yield (
                f"{time:%Y-%m-%d %H:%M:%S}.{ticks:07d},{request.num_prompt_tokens},"
                f"{request.num_output_tokens}\n"
            )


def _split(path: Path, lines: Iterable[str]) -> Iterator[list[str]]:
    reader = csv.reader(lines)
    try:
        yield from reader
    except csv.Error as error:
        raise _wrong_line(path, reader.line_num, error) from error


def _rows(path: Path, rows: Iterable[list[str]]) -> Iterator[tuple[int, int, int]]:
    """Yields for each request: its time in units of 100 ns since EPOCH, and its numbers of prompt
    and output tokens."""
    columns = None
    for number, row in enumerate(rows, start=1):
        try:
            if columns is None:
                columns = [row.index(name) for name in HEADER]
            elif row:
                time, prompt, output = (row[column] for column in columns)
                TraceRequest(0.0, int(prompt), int(output)).check(BLOCK_TOKENS)
                yield _ticks(time), int(prompt), int(output)
        except (ValueError, IndexError) as error:
            raise _wrong_line(path, number, error) from error


def _wrong_line(path: Path, number: int, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"line {number} of {path} is not a line of an Azure trace: {error}; the first line must"
        f" name the columns {', '.join(HEADER)}, and each other line must have a time such as"
        " 2023-11-16 18:17:03.9799600 and two numbers of tokens"
    )


def _ticks(text: str) -> int:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time")
    whole = datetime.fromisoformat(found[1]) - EPOCH
    return (whole.days * 86400 + whole.seconds) * _TICKS + int((found[2] or "").ljust(7, "0")[:7])
