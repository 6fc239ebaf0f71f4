"""Choosing widths, alternating rounds and ratios, on contenders with a clock of their own."""

from collections.abc import Sequence

import pytest

from quire.bench.compare import Round, alternate, choose_width, measure, median_figures, ratio
from quire.bench.contenders import RunRecord
from quire.bench.machine import Noise
from quire.bench.metrics import Timeline
from quire.bench.workload import BenchRequest
from quire.errors import ConfigurationError

REQUESTS = [BenchRequest(index, [1, 2], 3) for index in range(4)]


class Fixed:
    """Takes so many seconds for whatever it is given, and notes who ran when."""

    def __init__(self, name: str, duration_s: float, log: list[tuple[str, int]]) -> None:
        self.name, self.duration_s, self.log = name, duration_s, log

    def run(self, requests: Sequence[BenchRequest]) -> RunRecord:
        self.log.append((self.name, len(requests)))
        timelines = [
            Timeline(
                len(request.prompt_token_ids),
                0.0,
                [0.1] * request.output_len,
                [0] * request.output_len,
            )
            for request in requests
        ]
        return RunRecord(timelines, self.duration_s, {"peak_kv_use": 0.5})


def test_a_round_has_the_figures_the_memory_and_the_noise() -> None:
    found = measure(Fixed("a", 2.0, []), REQUESTS)
    assert found.figures["output_throughput"] == pytest.approx(12 / 2.0)
    assert found.figures["peak_kv_use"] == 0.5
    assert isinstance(found.noise, Noise)


def test_the_fastest_width_is_chosen_on_the_same_requests() -> None:
    log: list[tuple[str, int]] = []
    durations = {1: 9.0, 4: 3.0, 16: 5.0}
    choice = choose_width(
        "x", lambda width: Fixed(str(width), durations[width], log), (1, 4, 16), REQUESTS
    )
    assert choice.best == 4 and choice.num_prompts == 4
    assert choice.output_throughput == pytest.approx({1: 12 / 9, 4: 4.0, 16: 12 / 5})
    assert log == [("1", 4), ("4", 4), ("16", 4)]


def test_a_width_that_does_not_fit_is_passed_over_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choice = choose_width(
        "x", lambda width: Fixed("x", 1.0, []) if width < 16 else None, (4, 16), REQUESTS
    )
    assert choice.best == 4 and choice.output_throughput[16] is None
    assert "x, 16 wide: does not fit" in capsys.readouterr().err


def test_no_fitting_width_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="x fits at none of the widths 4, 16"):
        choose_width("x", lambda width: None, (4, 16), REQUESTS)


def test_contenders_take_turns() -> None:
    log: list[tuple[str, int]] = []
    contenders = {"a": Fixed("a", 1.0, log), "b": Fixed("b", 2.0, log)}
    found = alternate(contenders, [REQUESTS, REQUESTS[:2]])
    assert log == [("a", 4), ("b", 4), ("a", 2), ("b", 2)]
    assert [run.figures["completed"] for run in found["b"]] == [4, 2]


def test_ratio_of_medians_and_its_spread() -> None:
    ours = [_round(rate) for rate in (30.0, 20.0, 10.0)]
    theirs = [_round(rate) for rate in (10.0, 5.0, 8.0)]
    found = ratio(ours, theirs)
    assert found.of_medians == pytest.approx(20 / 8)
    assert found.lowest == pytest.approx(10 / 8) and found.highest == pytest.approx(20 / 5)
    assert median_figures(ours) == {"output_throughput": 20.0}


def _round(rate: float) -> Round:
    return Round({"output_throughput": rate}, Noise(0.0, 0.0))
