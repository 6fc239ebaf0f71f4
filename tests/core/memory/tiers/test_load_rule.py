"""What the engine predicts of computing a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.memory.tiers.load_rule import MIN_STEP_TOKENS, ComputeTime, pairs_of


@given(st.integers(0, 50), st.integers(0, 50))
def test_pairs_count_each_new_tokens_context(num_computed: int, num_new: int) -> None:
    assert pairs_of(num_computed, num_new) == sum(num_computed + at + 1 for at in range(num_new))


def test_nothing_is_predicted_before_anything_is_known() -> None:
    time = ComputeTime()
    time.observe(MIN_STEP_TOKENS - 1, 10, 1.0)
    time.observe(1000, 10, 0.0)
    assert time.predict_s(0, 100) is None


@given(
    st.floats(1e-7, 1e-2),
    st.floats(0.0, 1e-5),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(32, 2000)), min_size=3, max_size=8),
)
def test_a_line_is_learned_from_steps_that_differ(
    per_token: float, per_pair: float, steps: list[tuple[int, int]]
) -> None:
    time = ComputeTime()
    for first, count in [*steps, (0, 64), (8000, 512)]:
        pairs = pairs_of(first, count)
        time.observe(count, pairs, per_token * count + per_pair * pairs)
    for first, end in ((0, 100), (0, 4000), (1000, 9000)):
        true_s = per_token * (end - first) + per_pair * pairs_of(first, end - first)
        assert time.predict_s(first, end) == pytest.approx(true_s, rel=0.02)


@given(
    st.lists(
        st.tuples(st.integers(32, 4096), st.integers(0, 10000), st.floats(1e-6, 100.0)),
        min_size=1,
        max_size=20,
    )
)
def test_predictions_are_never_negative_and_grow_with_the_tokens(
    steps: list[tuple[int, int, float]],
) -> None:
    time = ComputeTime()
    for count, first, seconds in steps:
        time.observe(count, pairs_of(first, count), seconds)
    found = [time.predict_s(64, end) for end in (64, 65, 100, 1000, 10000)]
    assert found[0] == 0.0
    assert all(each is not None and each >= 0.0 for each in found)
    assert found == sorted(found, key=lambda each: each or 0.0)


def test_new_observations_outweigh_old_ones() -> None:
    time = ComputeTime()
    for _ in range(100):
        time.observe(100, pairs_of(0, 100), 1.0)
    for _ in range(200):
        time.observe(100, pairs_of(0, 100), 0.1)
    assert time.predict_s(0, 100) == pytest.approx(0.1, rel=0.05)
