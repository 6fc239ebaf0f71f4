"""The order against a dict of seconds."""

from hypothesis import given
from hypothesis import strategies as st

from quire.routing.standing_order import LEAST_S, STEPS_PER_OCTAVE, StandingOrder

CHANGES = st.lists(
    st.tuples(
        st.integers(0, 80), st.none() | st.floats(0, 1e4), st.integers(0, 2**80), st.floats(0, 2e4)
    ),
    max_size=40,
)


@given(CHANGES)
def test_the_least_of_any_set(changes: list[tuple[int, float | None, int, float]]) -> None:
    order = StandingOrder()
    seconds: dict[int, float] = {}
    for index, value, mask, below_s in changes:
        if value is None:
            order.discard(index)
            seconds.pop(index, None)
        else:
            order.set(index, value)
            seconds[index] = value
            rounded = order.seconds(index)
            assert rounded <= value or rounded == LEAST_S < value * (1 + 1e-9)
            assert value <= max(LEAST_S, rounded * 2 ** (1 / STEPS_PER_OCTAVE) * (1 + 1e-9))
        members = [order.seconds(each) for each in seconds if mask >> each & 1]
        found = order.least(mask, below_s)
        if not members or min(members) >= below_s:
            assert found is None
        else:
            assert found is not None and found.seconds == min(members)
            assert (
                mask >> found.replica_index & 1
                and order.seconds(found.replica_index) == found.seconds
            )


def test_equal_ones_have_their_turn() -> None:
    order = StandingOrder()
    for index in range(5):
        order.set(index, 0.0)
    found = [order.least(0b11101) for _ in range(8)]
    assert [each.replica_index for each in found if each] == [0, 2, 3, 4, 0, 2, 3, 4]
