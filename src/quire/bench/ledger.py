"""Averages an engine's memory reports, taken every few steps of a run.

Used by `contenders`, which steps the engine, and by `report`, which shows the table.
"""

from collections.abc import Mapping

from quire.bench.metrics import Figures
from quire.core.memory.memory_report import PARTS, MemoryReport, memory_table, useful_share

STEPS_PER_SAMPLE = 16

LEDGER_FIGURES = (
    *(f"mean_kv_{part}_bytes" for part in PARTS),
    "mean_kv_saved_bytes",
    "kv_useful_share",
)


class LedgerSamples:
    """Sums up memory reports, and computes means."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._parts = dict.fromkeys(PARTS, 0)
        self._saved_bytes = 0

    def add(self, report: MemoryReport) -> None:
        """Add one memory report to the sums."""
        self._num_samples += 1
        for part, num_bytes in report.parts.items():
            self._parts[part] += num_bytes
        self._saved_bytes += report.saved_bytes

    def figures(self) -> Figures:
        """The values of LEDGER_FIGURES: means over the samples, and the useful share of all held
        bytes."""
        assert self._num_samples, "nothing was sampled"
        sums = (*self._parts.values(), self._saved_bytes)
        values = (*(num_bytes / self._num_samples for num_bytes in sums), useful_share(self._parts))
        return dict(zip(LEDGER_FIGURES, values, strict=True))


def ledger_table(figures: Mapping[str, float | None]) -> str | None:
    """A table of LEDGER_FIGURES with bars; None if any figure is unknown."""
    values = [figures[name] for name in LEDGER_FIGURES[:-1]]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    *parts, saved_bytes = known
    return memory_table(dict(zip(PARTS, parts, strict=True)), saved_bytes)
