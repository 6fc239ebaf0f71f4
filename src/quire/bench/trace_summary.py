"""Summarizes a step trace: computes the time of each part of a step.

The overhead of a step is its time outside the model: scheduling, batch building and applying
results. Planning by the attention backend, sampling, and waiting for results count as the model's
time.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.observability.step_trace import StepRecord, read_step_trace

PARTS = ("schedule", "build", "plan", "forward", "sample", "wait", "apply")
OVERHEAD_PARTS = ("schedule", "build", "apply")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Figures of the steps of one kind: medians over steps unless a field says otherwise."""

    num_steps: int
    num_rows: float
    #: The time of whole steps.
    step_us: float
    #: The summed time of OVERHEAD_PARTS.
    overhead_us: float
    #: The overhead divided by the number of rows: median, mean and 99th percentile over steps.
    per_sequence_us: float
    mean_per_sequence_us: float
    p99_per_sequence_us: float
    #: Maps each part to its share of the summed time of all parts. Parts of overlapping steps run
    #: at the same time, so the sum may exceed the elapsed time.
    shares: dict[str, float]
    #: The share of time in which a step ran; None if the trace does not have busy and gap times.
    busy_share: float | None = None


def summarize_trace(path: str | Path) -> dict[str, StepTimes]:
    """Times of three kinds: all steps, the steps with the most rows, and the decode steps among
    these.

    Kinds without any step in the file are left out.
    """
    records = list(read_step_trace(path))
    widest = max((record.num_rows for record in records), default=0)
    kinds: dict[str, Callable[[StepRecord], bool]] = {
        "all steps": lambda record: True,
        f"steps of {widest} rows": lambda record: record.num_rows == widest,
        f"decode steps of {widest} rows": lambda record: (
            record.num_rows == widest and record.num_prefill_tokens == 0
        ),
    }
    found = {}
    for name, belongs in kinds.items():
        chosen = [record for record in records if belongs(record)]
        if chosen:
            found[name] = _cost(chosen)
    return found


def _cost(records: list[StepRecord]) -> StepTimes:
    overheads = [_seconds(record, OVERHEAD_PARTS) for record in records]
    steps = [record.elapsed_s for record in records]
    total = sum(_seconds(record, PARTS) for record in records)
    pairs = zip(overheads, records, strict=True)
    per_sequence = sorted(overhead / record.num_rows for overhead, record in pairs)
    return StepTimes(
        num_steps=len(records),
        num_rows=statistics.median(record.num_rows for record in records),
        step_us=statistics.median(steps) * 1e6,
        overhead_us=statistics.median(overheads) * 1e6,
        per_sequence_us=statistics.median(per_sequence) * 1e6,
        mean_per_sequence_us=statistics.fmean(per_sequence) * 1e6,
        p99_per_sequence_us=per_sequence[int(0.99 * (len(per_sequence) - 1))] * 1e6,
        shares={
            part: sum(_seconds(record, [part]) for record in records) / total for part in PARTS
        },
        busy_share=_busy_share(records),
    )


def _busy_share(records: list[StepRecord]) -> float | None:
    busy_s = sum(record.busy_s for record in records)
    total_s = busy_s + sum(record.gap_s for record in records)
    return busy_s / total_s if total_s else None


def _seconds(record: StepRecord, parts: Iterable[str]) -> float:
    return float(sum(getattr(record, f"{part}_s") for part in parts))
