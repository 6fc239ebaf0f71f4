"""The step trace: one line per engine step.

Lines go to a file as JSON, or to the log at level debug. The engine fills a StepRecord a step and
hands it over; `quire bench --trace` and tests read the file. Knows nothing of plans or results.
Writing is buffered: a line reaches the file when the buffer is full, at `flush`, or at `close`.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

from quire.errors import ConfigurationError
from quire.observability.log import fields as log_fields
from quire.observability.log import get_logger

BUFFER_BYTES = 1 << 16

STEP_LOGGER = get_logger("quire.engine.step")
"""Its level says whether `log_step` has anything to do: check it before a record is made."""


@dataclass(slots=True)
class StepTiming:
    """Seconds of the parts of the step that a runner launched last; plan_s is the attention
    backend's planning. On a device these are the times of launching, not of running.

    device_s: how long the device ran the step whose result was fetched last; 0 where nothing
    measures it. launching_s: of that, at most so much in which it waited within a step for
    launches. is_of_result: the parts, too, are those of the step whose result was fetched last."""

    build_s: float = 0.0
    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    device_s: float = 0.0
    launching_s: float = 0.0
    is_of_result: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as counts and times.

    num_rows: live rows of the step; num_tokens: tokens computed, of which num_prefill_tokens were
        not decode tokens. num_waiting: requests without a row after scheduling.
    schedule_s .. apply_s: wall-clock time of each part on the host; build_s is batch building,
        plan_s the attention backend's planning, forward_s the forward pass without these (on a
        device: its launch), wait_s the waiting for the result. elapsed_s: all of them, or where
        steps overlap, from the end of the step before to the end of this one.
    num_blocks_used: KV blocks held after the step. num_preemptions: in this step.
    busy_s, gap_s: of the time since the result before this one, or since there was work again, with
        a step under way and without; see `engine.utilization`.
    """

    step_id: int
    num_rows: int
    num_tokens: int
    num_prefill_tokens: int
    num_waiting: int
    schedule_s: float
    build_s: float
    plan_s: float
    forward_s: float
    sample_s: float
    wait_s: float
    apply_s: float
    elapsed_s: float
    num_blocks_used: int
    num_preemptions: int
    busy_s: float = 0.0
    gap_s: float = 0.0


_FIELDS = tuple(field.name for field in fields(StepRecord))
_SPANS = ("elapsed_s", "busy_s", "gap_s")
_PARTS = tuple(name for name in _FIELDS if name.endswith("_s") and name not in _SPANS)


class StepTrace:
    """Writes StepRecords to `path`, replacing what was there. Use as a context manager or close it.

    Invariant: the file holds whole lines, in the order of `write`, once flushed or closed.
    Raises ConfigurationError where the file can't be opened.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file: TextIOWrapper | None = open(  # noqa: SIM115 - closed by `close`
                path, "w", buffering=BUFFER_BYTES, encoding="utf-8"
            )
        except OSError as error:
            raise ConfigurationError(
                f"the step trace can't be written to {str(path)!r} ({error.strerror}); "
                "name a file in a folder that exists and is writable"
            ) from error

    def write(self, record: StepRecord) -> None:
        """Add one line."""
        assert self._file is not None, "the step trace is closed"
        # Not `asdict`, which copies deeply and takes longer than the encoding.
        line = {name: getattr(record, name) for name in _FIELDS}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Bring all lines so far to the file."""
        assert self._file is not None, "the step trace is closed"
        self._file.flush()

    def close(self) -> None:
        """Flush and close; does nothing the second time."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "StepTrace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_step_trace(path: str | Path) -> Iterator[StepRecord]:
    """The records of a file that StepTrace wrote."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield StepRecord(**json.loads(line))


def log_step(record: StepRecord) -> None:
    """One line at level debug."""
    if not STEP_LOGGER.isEnabledFor(logging.DEBUG):
        return
    STEP_LOGGER.debug(
        "step %d: %d rows, %d tokens (%d of them prefill), %d waiting, %d blocks,"
        " %d preemptions, %.2f ms (schedule %.2f, build %.2f, plan %.2f, forward %.2f,"
        " sample %.2f, wait %.2f, apply %.2f)",
        record.step_id,
        record.num_rows,
        record.num_tokens,
        record.num_prefill_tokens,
        record.num_waiting,
        record.num_blocks_used,
        record.num_preemptions,
        1e3 * record.elapsed_s,
        *(1e3 * getattr(record, name) for name in _PARTS),
        extra=log_fields(**{name: round(getattr(record, name), 7) for name in _FIELDS}),
    )
