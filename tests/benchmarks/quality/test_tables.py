"""The tables of quality beside speed, from results that are written here."""

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

LoadScript = Callable[[str], ModuleType]
MODEL = "m"
EXACT = [2.0, 2.4, 2.2, 2.6]
CHANGES = [0.1, -0.1, 0.1, -0.1]


def found(shift: float, divergence: float, weight_bytes: int | None = 100) -> dict[str, Any]:
    """A result file: every loss higher by `shift`."""
    return {
        "losses": [loss + shift for loss in EXACT],
        "divergences": [divergence] * 4,
        "agreements": [1, 1, 1, 0],
        "weight_bytes": weight_bytes,
    }


@pytest.fixture
def tables(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.quality.tables")


def make_rows(tables: ModuleType, others: dict[str, tuple[float, float, float]]) -> list[Any]:
    """others: key -> rise of every loss, divergence, tokens per second of one stream."""
    results, sample = tables.Results(), sys.modules["benchmarks.cpu.tables"].Sample
    for key, (_, _, rate) in others.items():
        for round_index, tok_s in enumerate((rate - 1, rate, rate + 1)):
            results.samples.append(sample(key, MODEL, "decode1", round_index, tok_s, 0.0))
    engines = {key: found(shift, divergence) for key, (shift, divergence, _) in others.items()}
    exact = {**found(0.0, 0.0, 400), "divergences": [], "agreements": []}
    rows: list[Any] = tables.find_rows(
        {tables.REFERENCE: exact, **engines}, results, MODEL, num_parameters=100
    )
    return rows


def test_a_row_has_quality_and_speed(tables: ModuleType) -> None:
    reference, row = make_rows(tables, {"quire int8": (0.01, 0.002, 50.0)})
    assert reference.perplexity == pytest.approx(math.exp(2.3))
    assert (reference.increase, reference.divergence, reference.speeds) == (0.0, 0.0, {})
    assert row.bits_per_weight == 8.0
    assert row.increase == pytest.approx(math.exp(0.01) - 1)
    assert row.increase_error == pytest.approx(0.0, abs=1e-12)  # all losses rise alike
    assert (row.divergence, row.agreement) == (pytest.approx(0.002), 0.75)
    assert row.speeds["decode1"].tok_s == 50.0


def test_the_error_is_that_of_the_mean_change(tables: ModuleType) -> None:
    exact = {**found(0.0, 0.0), "divergences": [], "agreements": []}
    other = found(0.0, 0.1)
    other["losses"] = [loss + change for loss, change in zip(EXACT, CHANGES, strict=True)]
    engines = {tables.REFERENCE: exact, "quire int4": other}
    row = tables.find_rows(engines, tables.Results(), MODEL, 100)[1]
    assert row.increase == pytest.approx(0.0, abs=1e-12)
    assert row.increase_error == pytest.approx(math.sqrt(0.04 / 3) / 2)


def test_a_peer_is_compared_with_our_fastest_of_no_less_quality(tables: ModuleType) -> None:
    others = {
        "quire bf16": (0.0, 0.0001, 30.0),
        "quire int8": (0.0, 0.00104, 60.0),
        "quire int4": (0.0, 0.04, 90.0),
        "Peer int8": (0.0, 0.001, 40.0),
        "Peer int4": (0.0, 0.05, 100.0),
        "Peer bf16": (0.0, 0.00005, 20.0),
    }
    report = tables.make_report(make_rows(tables, others))
    pairs = {line.split(" | ")[0]: line.split(" | ")[1] for line in report.splitlines()[-3:]}
    # int8 diverges by 4% more than the peer's: as good. Of bf16 none of ours is.
    assert pairs == {
        "| Peer int8": "1.50x (int8)",
        "| Peer int4": "0.90x (int4)",
        "| Peer bf16": tables.NONE,
    }
    line = next(line for line in report.splitlines() if "**quire int8**" in line)
    assert line.endswith("| 60.0 | - | - |") and "+0.00% ± 0.00 | 0.00104 | 75.00% |" in line


def test_notes_name_texts_versions_and_failures(tables: ModuleType) -> None:
    facts = {
        "model": MODEL,
        "texts": ["a.md", "b.py"],
        "num_windows": 6,
        "window_tokens": 1024,
        "num_predicted": 3072,
        "engines": {"quire int8": {"peer": "quire", "version": "9"}},
        "failures": ["Peer int8: ended with 1; see x.log"],
    }
    notes = tables.make_notes(facts)
    assert "3,072 tokens" in notes and "a.md, b.py" in notes and "quire 9" in notes
    assert notes.endswith("FAILED: Peer int8: ended with 1; see x.log")
