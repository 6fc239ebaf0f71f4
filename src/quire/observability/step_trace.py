"""The step trace: one line per engine step.

Lines go to a file as JSON, or to the log at level debug. The engine makes a StepRecord in each
step, and `quire bench --trace` and tests read the file. Writing is buffered: lines reach the file
when the buffer is full, at `flush`, or at `close`.
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
"""The logger of `log_step`. Callers check its level before they make a record."""


@dataclass(slots=True)
class StepTiming:
    """The seconds that a runner spends in each phase of a step."""

    #: `build_s` to `sample_s` belong to the last launched step; on a GPU, they time the launches.
    build_s: float = 0.0
    #: The time of the attention backend's planning.
    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    #: The device's time for the step whose result was fetched last; 0 if it is not measured.
    device_s: float = 0.0
    #: An upper bound of the time within `device_s` in which the device waited for launches.
    launching_s: float = 0.0
    #: Whether `build_s` to `sample_s` also belong to the step whose result was fetched last.
    is_of_result: bool = False

    def copy(self) -> "StepTiming":
        """The times as they are now. Called at each step, where `dataclasses.replace` is slow."""
        return StepTiming(
            self.build_s,
            self.plan_s,
            self.forward_s,
            self.sample_s,
            self.device_s,
            self.launching_s,
            self.is_of_result,
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Counts and times of one step. The times of phases are wall-clock seconds on the host."""

    step_id: int
    #: Rows of the batch that hold a sequence.
    num_rows: int
    #: Computed tokens, including prefill tokens.
    num_tokens: int
    num_prefill_tokens: int
    #: Requests without a row after scheduling.
    num_waiting: int
    schedule_s: float
    #: The time to build the batch.
    build_s: float
    #: The time of the attention backend's planning.
    plan_s: float
    #: The time of the forward pass, without batch building and planning; on a GPU, of its launch.
    forward_s: float
    sample_s: float
    #: The time that the engine waited for the result.
    wait_s: float
    apply_s: float
    #: The sum of all phases. If steps overlap, the time since the end of the previous step.
    elapsed_s: float
    #: KV blocks held after the step.
    num_blocks_used: int
    num_preemptions: int
    #: Seconds with and without a running step. They are counted from the previous result, or from
    #: the time when the engine last got work after being idle (`engine.utilization`).
    busy_s: float = 0.0
    gap_s: float = 0.0
    #: The time in which a model made drafts; 0 without one.
    draft_s: float = 0.0


_FIELDS = tuple(field.name for field in fields(StepRecord))
_SPANS = ("elapsed_s", "busy_s", "gap_s")
_PARTS = tuple(name for name in _FIELDS if name.endswith("_s") and name not in _SPANS)


class StepTrace:
    """Writes StepRecords to the file at `path`, replacing its contents, until it is closed.

    Invariant: once flushed or closed, the file has whole lines in the order of `write`. Raises
    ConfigurationError if the file can't be opened.
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
        """Write all buffered lines to the file."""
        assert self._file is not None, "the step trace is closed"
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file. Later calls do nothing."""
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
    """Read the records of a file that StepTrace wrote."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield StepRecord(**json.loads(line))


def log_step(record: StepRecord) -> None:
    """Log a record as one line at level debug."""
    if not STEP_LOGGER.isEnabledFor(logging.DEBUG):
        return
    STEP_LOGGER.debug(
        "step %d: %d rows, %d tokens (%d of them prefill), %d waiting, %d blocks,"
        " %d preemptions, %.2f ms (schedule %.2f, build %.2f, plan %.2f, forward %.2f,"
        " sample %.2f, wait %.2f, apply %.2f, draft %.2f)",
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
