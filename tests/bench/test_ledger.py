"""Means over sampled reports."""

import pytest

from quire.bench.ledger import LEDGER_FIGURES, LedgerSamples, ledger_table
from quire.core.memory.memory_report import PARTS, MemoryReport


def report(*parts: int, saved: int = 0) -> MemoryReport:
    bytes_by_part = {f"{name}_bytes": size for name, size in zip(PARTS, parts, strict=True)}
    return MemoryReport(**bytes_by_part, lookahead_bytes=0, saved_bytes=saved, tenants={})


def test_means_and_the_useful_share_of_all_that_was_held() -> None:
    samples = LedgerSamples()
    samples.add(report(100, 20, 6, 30, 10, 16, 40, 300, saved=8))
    samples.add(report(20, 0, 4, 20, 0, 4, 60, 400))
    found = samples.figures()
    assert tuple(found) == LEDGER_FIGURES
    assert list(found.values()) == [60, 10, 5, 25, 5, 10, 50, 350, 4, pytest.approx(120 / 230)]


def test_where_nothing_was_held_there_is_no_useful_share() -> None:
    samples = LedgerSamples()
    samples.add(report(0, 0, 0, 0, 0, 0, 0, 64))
    assert samples.figures()["kv_useful_share"] is None


def test_the_table_shows_the_means_or_nothing() -> None:
    samples = LedgerSamples()
    samples.add(report(3 << 20, 1 << 20, 0, 0, 0, 0, 0, 4 << 20, saved=2 << 20))
    shown = ledger_table(samples.figures())
    assert shown is not None
    assert shown.splitlines()[0].split() == ["useful", "3.0", "MiB", "37.5%", "#" * 15]
    assert "75.0% of what is held is useful; sharing saves 2.0 MiB" in shown
    assert ledger_table(dict.fromkeys(LEDGER_FIGURES)) is None
