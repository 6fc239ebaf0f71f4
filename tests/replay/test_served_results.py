"""The figures of `quire bench serve`, on replies worked out by hand."""

import json
from pathlib import Path

import pytest

from quire.errors import ConfigurationError
from quire.replay.figures import ReplayFigures, Reply
from quire.replay.served_results import ServedResults, parse_goodput, timeline_of, write_results
from quire.traces.trace import Trace

# Sent at 1 s; tokens after 0.2, 0.3 and 0.4 s.
QUICK = Reply(0, 1.0, 1.5, 1.2, 10, 0, 3, [0.1, 0.1])
# Sent at 1.1 s; tokens after 0.9 and 1.9 s.
SLOW = Reply(1, 1.1, 3.0, 2.0, 20, 0, 2, [1.0])
# Sent at 2 s, and refused.
REFUSED = Reply(2, 2.0, 2.1, refused="429 overloaded")


def results(goodput: dict[str, float], *replies: Reply) -> ServedResults:
    figures = ReplayFigures(Trace(16, ()), replies or (QUICK, SLOW, REFUSED), {})
    return ServedResults({"model_id": "m", "request_rate": 4.0}, figures, goodput, (50, 99.9))


def test_the_data_have_vllms_names() -> None:
    found = results({}).data()
    assert found["model_id"] == "m"
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["duration"] == pytest.approx(2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 5)
    assert found["request_throughput"] == pytest.approx(1.0)
    assert found["output_throughput"] == pytest.approx(2.5)
    assert found["total_token_throughput"] == pytest.approx(17.5)
    assert found["mean_ttft_ms"] == pytest.approx(550)
    assert found["p50_tpot_ms"] == pytest.approx(550)
    assert found["median_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx(1150)
    assert "p99.9_e2el_ms" in found and "p99_ttft_ms" not in found
    assert found["max_concurrent_requests"] == 2
    assert found["request_goodput"] is None
    assert "ttfts" not in found
    detailed = results({}).data(is_detailed=True)
    assert detailed["input_lens"] == [10, 20] and detailed["output_lens"] == [3, 2]
    assert detailed["ttfts"] == pytest.approx([0.2, 0.9])
    assert detailed["errors"] == ["", "", "429 overloaded"]


@pytest.mark.parametrize(
    ("bounds", "num_good"),
    [({"ttft": 500}, 1), ({"ttft": 1000}, 2), ({"ttft": 1000, "tpot": 99}, 0), ({"e2el": 401}, 1)],
)
def test_a_good_request_keeps_all_bounds(bounds: dict[str, float], num_good: int) -> None:
    assert results(bounds).data()["request_goodput"] == pytest.approx(num_good / 2.0)


def test_tokens_that_came_together_count_by_the_servers_number() -> None:
    timeline = timeline_of(Reply(0, 1.0, 3.0, 2.0, 5, 0, 11, [0.5, 0.5]))
    assert timeline.tpot_s == pytest.approx(0.1)
    assert timeline.itl_s == pytest.approx([0.5, 0.5])
    assert timeline.num_tokens == 11


def test_the_figures_are_told_in_lines() -> None:
    lines = results({"ttft": 500.0}).lines()
    assert lines[:2] == [
        "successful requests     2",
        "failed requests         1 (1 429 overloaded)",
    ]
    assert "goodput                 0.50 requests/s within ttft 500 ms" in lines
    assert lines[-5].split() == ["milliseconds", "mean", "median", "p50", "p99.9"]
    assert lines[-4].split() == ["TTFT", "550.00", "550.00", "550.00", "899.30"]
    assert results({}, REFUSED).lines()[-1].split() == ["E2EL", "-", "-", "-", "-"]


def test_goodput_is_parsed_as_vllm_does() -> None:
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 500, "tpot": 50.5}
    for wrong in (["itl:5"], ["ttft"], ["ttft:x"], ["ttft:-1"], ["ttft:1", "ttft:2"]):
        with pytest.raises(ConfigurationError, match="goodput has"):
            parse_goodput(wrong)


def test_results_are_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_results(results({}), path, is_detailed=True)
    assert json.loads(path.read_text())["itls"][0] == pytest.approx([0.1, 0.1])
    with pytest.raises(ConfigurationError, match="can't be written to"):
        write_results(results({}), tmp_path, is_detailed=False)
