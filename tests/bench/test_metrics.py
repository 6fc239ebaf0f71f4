"""The field's definitions, on examples worked out by hand."""

import pytest

from quire.bench.metrics import LATENCIES, Timeline, figures, medians

# Arrives at 10 s; tokens after 0.5, 0.6, 0.8 and 1.1 s.
FOUR = Timeline(7, 10.0, [10.5, 10.6, 10.8, 11.1], [1, 2, 3, 4])
# Arrives at 10 s; tokens after 1.0 and 1.4 s.
TWO = Timeline(5, 10.0, [11.0, 11.4], [1, 2])
# Arrives at 10 s; its only token after 2 s.
ONE = Timeline(3, 10.0, [12.0], [1])


def test_latencies_of_one_request() -> None:
    assert FOUR.ttft_s == pytest.approx(0.5)
    assert FOUR.e2el_s == pytest.approx(1.1)
    assert FOUR.itl_s == pytest.approx([0.1, 0.2, 0.3])
    assert FOUR.tpot_s == pytest.approx((1.1 - 0.5) / 3)


def test_a_request_with_one_token_has_no_time_per_further_token() -> None:
    assert ONE.tpot_s is None
    assert ONE.itl_s == []
    assert ONE.ttft_s == ONE.e2el_s == pytest.approx(2.0)


def test_counts_and_rates() -> None:
    found = figures([FOUR, TWO, ONE], 2.0)
    assert found["duration"] == 2.0
    assert found["completed"] == 3
    assert found["total_input_tokens"] == 15
    assert found["total_output_tokens"] == 7
    assert found["request_throughput"] == pytest.approx(1.5)
    assert found["output_throughput"] == pytest.approx(3.5)
    assert found["total_token_throughput"] == pytest.approx(11.0)


def test_time_to_first_token_over_requests() -> None:
    found = figures([FOUR, TWO, ONE], 2.0)  # 500, 1000, 2000 ms
    assert found["mean_ttft_ms"] == pytest.approx(3500 / 3)
    assert found["median_ttft_ms"] == pytest.approx(1000)
    # Linear between the second and the third value: 2 * 0.9 = 1.8 steps into the list.
    assert found["p90_ttft_ms"] == pytest.approx(1800)
    assert found["p99_ttft_ms"] == pytest.approx(1980)
    variance = sum((value - 3500 / 3) ** 2 for value in (500, 1000, 2000)) / 3
    assert found["std_ttft_ms"] == pytest.approx(variance**0.5)


def test_time_per_output_token_weighs_requests_and_inter_token_latency_weighs_tokens() -> None:
    found = figures([FOUR, TWO, ONE], 2.0)
    assert found["mean_tpot_ms"] == pytest.approx((200 + 400) / 2)
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 300 + 400) / 4)
    assert found["median_itl_ms"] == pytest.approx(250)


def test_end_to_end_latency_over_requests() -> None:
    found = figures([FOUR, TWO, ONE], 2.0)  # 1100, 1400, 2000 ms
    assert found["mean_e2el_ms"] == pytest.approx(1500)
    assert found["median_e2el_ms"] == pytest.approx(1400)
    assert found["p90_e2el_ms"] == pytest.approx(1880)


def test_latency_without_samples_is_none() -> None:
    found = figures([ONE], 2.0)
    assert found["mean_tpot_ms"] is None and found["p99_itl_ms"] is None
    assert found["mean_ttft_ms"] == pytest.approx(2000)


def test_key_names() -> None:
    """As in the results of vLLM's benchmarks."""
    keys = {
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "p90", "p99")
        for name in LATENCIES
    }
    rates = {"request_throughput", "output_throughput", "total_token_throughput"}
    counts = {"duration", "completed", "total_input_tokens", "total_output_tokens"}
    assert set(figures([FOUR], 1.0)) == keys | rates | counts


def test_medians_are_taken_key_by_key() -> None:
    rounds = [{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 7.0}, {"a": 2.0, "b": None}]
    assert medians(rounds) == {"a": 2.0, "b": None}
