"""What is taken to be cached where: prefixes without gaps, least recently used out first."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.routing.prefix_view import LEAST_PLACEMENTS, PER_OCTAVE, KeptPositions, PrefixView


def digests(family: str, count: int) -> list[bytes]:
    return [f"{family}{index}".encode() for index in range(count)]


def place(view: PrefixView, index: int, family: str, count: int) -> None:
    kept = view.positions.of_chain(digests(family, count))
    known = [mask for mask in view.masks(kept) if mask >> index & 1]
    view.place(index, kept, len(known), count)


def held(view: PrefixView, index: int, family: str, count: int) -> int:
    """Blocks of the longest prefix that the view finds there."""
    kept = view.positions.of_chain(digests(family, count))
    known = [mask for mask in view.masks(kept) if mask >> index & 1]
    return view.positions.ends[len(known) - 1] if known else 0


@given(st.integers(0, 3000))
def test_few_digests_are_kept_of_a_long_chain(length: int) -> None:
    positions = KeptPositions()
    kept = positions.of_chain(digests("a", length))
    ends = positions.ends[: len(kept)]
    assert kept == [f"a{end - 1}".encode() for end in ends]
    assert ends == sorted(set(ends)) and ends[: min(length, 2 * PER_OCTAVE)] == list(
        range(1, min(length, 2 * PER_OCTAVE) + 1)
    )
    assert len(kept) <= PER_OCTAVE * (length.bit_length() + 1)
    if length:
        assert length - ends[-1] <= length / PER_OCTAVE


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    view = PrefixView()
    view.add_replica(0, 20)
    place(view, 0, "a", 8)
    place(view, 0, "b", 8)
    place(view, 0, "a", 8)
    place(view, 0, "c", 8)
    view.check()
    assert [held(view, 0, family, 8) for family in "abc"] == [8, 4, 8]


def test_a_longer_prompt_than_the_pool_leaves_its_beginning() -> None:
    view = PrefixView()
    view.add_replica(0, 5)
    place(view, 0, "a", 9)
    view.check()
    assert held(view, 0, "a", 9) == 5


def test_a_prompt_that_comes_again_and_again_takes_no_more_memory() -> None:
    view = PrefixView()
    view.add_replica(0, 1000)
    place(view, 0, "other", 20)
    for _ in range(1000):
        place(view, 0, "a", 16)
        place(view, 0, "b", 8)
    view.check()
    assert len(view._held[0].placements) <= LEAST_PLACEMENTS
    assert [held(view, 0, family, 16) for family in ("a", "b", "other")] == [16, 8, 16]
    for number in range(200):
        place(view, 0, f"c{number}", 8)
    view.check()
    assert [held(view, 0, family, 16) for family in ("a", "b", "other")] == [0, 0, 0]


def test_replicas_are_known_apart_and_forgotten_alone() -> None:
    view = PrefixView()
    for index in (0, 1, 70):
        view.add_replica(index, 50)
        place(view, index, "a", 4 + index % 7)
    kept = view.positions.of_chain(digests("a", 9))
    everyone = 1 | 2 | 1 << 70
    assert view.masks(kept) == [everyone] * 4 + [2]
    view.forget(1)
    view.check()
    assert view.masks(kept) == [1 | 1 << 70] * 4
    view.remove_replica(70)
    view.check()
    assert view.masks(kept) == [1] * 4
    view.forget(0)
    assert view.masks(kept) == [] and not view.holders


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abcd"), st.integers(0, 70)), max_size=30
    ),
    st.integers(1, 100),
)
def test_masks_and_counts_stay_true(placements: list[tuple[int, str, int]], capacity: int) -> None:
    view = PrefixView()
    for index in range(3):
        view.add_replica(index, capacity)
    for index, family, count in placements:
        place(view, index, family, count)
        view.check()
        masks = view.masks(view.positions.of_chain(digests(family, count)))
        assert all(later & ~earlier == 0 for earlier, later in pairwise(masks))
