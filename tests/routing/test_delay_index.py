"""The index of delays, compared with a dict of seconds."""

from hypothesis import given
from hypothesis import strategies as st

from quire.routing.delay_index import LEAST_S, STEPS_PER_OCTAVE, DelayIndex

CHANGES = st.lists(
    st.tuples(
        st.integers(0, 80), st.none() | st.floats(0, 1e4), st.integers(0, 2**80), st.floats(0, 2e4)
    ),
    max_size=40,
)


@given(CHANGES)
def test_least_finds_the_smallest_delay_of_any_set(
    changes: list[tuple[int, float | None, int, float]],
) -> None:
    delays = DelayIndex()
    seconds: dict[int, float] = {}
    for index, value, mask, below_s in changes:
        if value is None:
            delays.discard(index)
            seconds.pop(index, None)
        else:
            delays.set(index, value)
            seconds[index] = value
            rounded = delays.seconds(index)
            assert rounded <= value or rounded == LEAST_S < value * (1 + 1e-9)
            assert value <= max(LEAST_S, rounded * 2 ** (1 / STEPS_PER_OCTAVE) * (1 + 1e-9))
        members = [delays.seconds(each) for each in seconds if mask >> each & 1]
        found = delays.least(mask, below_s)
        if not members or min(members) >= below_s:
            assert found is None
        else:
            assert found is not None and found.seconds == min(members)
            assert (
                mask >> found.replica_index & 1
                and delays.seconds(found.replica_index) == found.seconds
            )


def test_equal_replicas_take_turns() -> None:
    delays = DelayIndex()
    for index in range(5):
        delays.set(index, 0.0)
    found = [delays.least(0b11101) for _ in range(8)]
    assert [each.replica_index for each in found if each] == [0, 2, 3, 4, 0, 2, 3, 4]
