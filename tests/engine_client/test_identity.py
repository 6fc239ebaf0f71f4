"""Engines whose answers could differ are told apart, in words for the operator."""

from dataclasses import replace

from tests.engine_client.fleet_world import LIMITS

from quire.engine_client.identity import check_same

FACTS = {"kernels": "native", "dtype": "bfloat16", "pid": 7}


def test_equal_engines_may_continue_each_other_s_requests() -> None:
    assert check_same("1", (LIMITS, FACTS), (LIMITS, FACTS | {"pid": 8})) is None


def test_the_differing_fact_and_the_engine_are_named() -> None:
    other = LIMITS, FACTS | {"kernels": "torch"}
    assert "replica '1' differs from the first one in kernels: 'torch' instead of 'native'" in str(
        check_same("1", (LIMITS, FACTS), other)
    )
    assert "the restarted engine differs" in str(check_same("", (LIMITS, FACTS), other))


def test_other_limits_are_a_difference() -> None:
    other = replace(LIMITS, max_model_len=LIMITS.max_model_len + 1), FACTS
    assert "replica '1' has other limits" in str(check_same("1", (LIMITS, FACTS), other))
