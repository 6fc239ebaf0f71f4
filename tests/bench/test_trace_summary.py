"""Costs of steps from a trace, on records worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quire.bench.trace_summary import PARTS, summarize_trace
from quire.observability.step_trace import StepRecord, StepTrace

DECODE = StepRecord(
    step_id=0,
    num_rows=4,
    num_tokens=4,
    num_prefill_tokens=0,
    num_waiting=0,
    schedule_s=10e-6,
    build_s=20e-6,
    plan_s=100e-6,
    forward_s=800e-6,
    sample_s=40e-6,
    wait_s=20e-6,
    apply_s=10e-6,
    elapsed_s=1e-3,
    num_blocks_used=7,
    num_preemptions=0,
)


def _write(path: Path, records: Sequence[StepRecord]) -> Path:
    with StepTrace(path) as trace:
        for record in records:
            trace.write(record)
    return path


def test_cost_and_shares_of_a_step(tmp_path: Path) -> None:
    (cost, *_) = summarize_trace(_write(tmp_path / "t", [DECODE])).values()
    assert cost.num_steps == 1 and cost.num_rows == 4
    assert cost.step_us == pytest.approx(1000)
    assert cost.overhead_us == pytest.approx(40)
    assert cost.per_sequence_us == pytest.approx(10)
    assert cost.mean_per_sequence_us == cost.p99_per_sequence_us == pytest.approx(10)
    host = {"schedule": 0.01, "build": 0.02, "apply": 0.01}
    expected = host | {"plan": 0.1, "forward": 0.8, "sample": 0.04, "wait": 0.02}
    assert cost.shares == pytest.approx(expected)
    assert list(cost.shares) == list(PARTS)


def test_the_median_and_the_mean_over_steps(tmp_path: Path) -> None:
    slow = replace(DECODE, apply_s=410e-6)
    cost = summarize_trace(_write(tmp_path / "t", [DECODE, slow, DECODE]))["all steps"]
    assert cost.per_sequence_us == pytest.approx(10)
    assert cost.mean_per_sequence_us == pytest.approx((10 + 110 + 10) / 3)


def test_the_busy_share_is_of_all_time_between_results(tmp_path: Path) -> None:
    records = [replace(DECODE, busy_s=3e-3, gap_s=1e-3), replace(DECODE, busy_s=1e-3, gap_s=0.0)]
    found = summarize_trace(_write(tmp_path / "t", records))["all steps"]
    assert found.busy_share == pytest.approx(0.8)
    assert summarize_trace(_write(tmp_path / "u", [DECODE]))["all steps"].busy_share is None


def test_steps_are_told_apart_by_width_and_by_prefill(tmp_path: Path) -> None:
    narrow = replace(DECODE, num_rows=1, num_tokens=1)
    mixed = replace(DECODE, num_tokens=20, num_prefill_tokens=16)
    found = summarize_trace(_write(tmp_path / "t", [mixed, DECODE, DECODE, narrow]))
    assert {kind: cost.num_steps for kind, cost in found.items()} == {
        "all steps": 4,
        "steps of 4 rows": 3,
        "decode steps of 4 rows": 2,
    }


def test_a_kind_without_steps_is_left_out(tmp_path: Path) -> None:
    mixed = replace(DECODE, num_tokens=20, num_prefill_tokens=16)
    assert list(summarize_trace(_write(tmp_path / "t", [mixed]))) == [
        "all steps",
        "steps of 4 rows",
    ]
    assert summarize_trace(_write(tmp_path / "t", [])) == {}
