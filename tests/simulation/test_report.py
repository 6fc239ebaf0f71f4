"""What is counted from a plan, and how reports add up."""

from typing import Any

import pytest

from quire.core.sampling_params import DecodingParams
from quire.core.step import BlockCopy, EditKind, RowAdmission, RowFork, StepPlan, TableEdit
from quire.simulation.report import SimulationReport, add_up, percentile, printed_lines

PARAMS = DecodingParams(5)


def plan(**parts: Any) -> StepPlan:
    return StepPlan(0, 3, 3, **parts)


def test_forks_and_copies_are_counted_by_what_they_are_for() -> None:
    report = SimulationReport(1)
    partly = RowAdmission(0, (1, 2, 3), 3, 2, ((7,), (8,)), PARAMS)
    whole = RowAdmission(1, (1, 2, 3), 3, 0, ((4,), (5,)), PARAMS)
    edits = tuple(TableEdit(2, group, EditKind.REPLACE, 0, (20 + group,)) for group in (0, 1))
    copies = tuple(BlockCopy(target + 30, target) for target in (7, 8, 20, 21))
    report.count_plan(
        plan(
            admit=(partly, whole),
            forks=(RowFork(3, 1, PARAMS, 1, True), RowFork(4, 2, PARAMS, 2)),
            table_edits=edits,
            copies=copies,
        ),
        num_waiting=6,
    )
    report.count_plan(plan(), num_waiting=2)
    assert (report.num_steps, report.max_num_running, report.max_num_waiting) == (2, 3, 6)
    assert (report.num_joined_forks, report.num_partial_hits) == (1, 1)
    assert (report.num_copied_blocks, report.num_cow_blocks) == (4, 2)


def test_reports_add_up() -> None:
    one = SimulationReport(1, num_steps=3, finished={"stop": 2, "abort": 1}, max_num_waiting=4)
    other = SimulationReport(2, num_steps=5, finished={"stop": 1, "error": 7}, max_num_waiting=3)
    one.latencies_s, other.latencies_s = [3.0], [1.0, 2.0]
    one.virtual_s, other.virtual_s, other.digest = 0.5, 1.25, "of the other"
    assert add_up([one, other], seed=9) == SimulationReport(
        9,
        num_steps=8,
        finished={"abort": 1, "error": 7, "stop": 3},
        max_num_waiting=4,
        virtual_s=1.75,
        latencies_s=[3.0, 1.0, 2.0],
    )
    assert add_up([], seed=9) == SimulationReport(9)


@pytest.mark.parametrize(("share", "expected"), [(50, 5), (90, 9), (99, 10), (100, 10), (0, 1)])
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], share) == expected


def test_percentiles_are_printed_instead_of_lists() -> None:
    report = SimulationReport(1, latencies_s=[0.25, 0.5], steps_per_s=1234.6)
    lines = [line.split(maxsplit=1) for line in printed_lines(report)]
    printed = {words[0]: words[1] for words in lines if len(words) == 2}
    assert printed["latencies_s"] == "p50 0.250  p90 0.500  p99 0.500"
    assert printed["first_token_waits_s"] == "p50 nan  p90 nan  p99 nan"
    assert (printed["seed"], printed["steps_per_s"]) == ("1", "1235")
