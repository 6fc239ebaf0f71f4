"""Whether a sequence will fit, with predicted output lengths."""

import pytest
from tests.core.harness import Harness, make_memory

from quire.core.sequence import SequenceState

WAITING = SequenceState.WAITING


def test_growth_is_predicted_from_what_has_ended() -> None:
    """Two sequences of 8 tokens fit now; whether they will depends on how long outputs are."""
    admitted = {}
    for num_outputs in (4, 40):
        harness = Harness(make_memory(num_blocks=12))
        for _ in range(50):
            harness.scheduler.admission.capacity.forecast.lengths.observe(num_outputs)
        harness.add("a", 8, 39)
        harness.step()
        second = harness.add("b", 8, 39)
        harness.step()
        admitted[num_outputs] = second.state is not WAITING
    assert admitted == {4: True, 40: False}


def test_shared_blocks_count_once_in_the_forecast() -> None:
    """Each branch holds ten blocks, but all together hold hardly more."""
    harness = Harness(make_memory(num_blocks=30), max_num_seqs=4)
    branches = harness.add_branches("a", 40, 4, n=4)
    harness.step()
    assert all(branch.state is not WAITING for branch in branches)
    harness.run()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_no_forecast_is_made_if_all_sequences_fit_at_their_limits(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pools of any size: what is said is the same with and without the shortcut."""
    answers: set[tuple[bool, bool]] = set()
    for num_blocks in range(6, 30):
        harness = Harness(make_memory(num_blocks * num_groups, num_groups=num_groups))
        capacity = harness.scheduler.admission.capacity
        for length in (3, 8, 30):
            capacity.forecast.lengths.observe(length)
        harness.add("a", 7, 16)
        harness.add_branches("b", 9, 9, n=2)
        for _ in range(5):
            harness.step()
        newcomer = harness.add("c", 5, 11)
        needed = harness.memory.blocks_for(5)
        is_sure = capacity.forecast._fit_all(newcomer)
        with monkeypatch.context() as patch:
            patch.setattr(capacity.forecast, "_fit_all", lambda _: False)
            fits = capacity.forecast.fits_later(newcomer, needed)
        assert capacity.forecast.fits_later(newcomer, needed) is fits
        assert fits or not is_sure
        answers.add((is_sure, fits))
    assert answers == {(True, True), (False, True), (False, False)}
