"""Log-probabilities that wait as bytes are those that came, whole and in order."""

import gc

import pytest

from quire.core.step import TokenLogprobs
from quire.engine_client.logprob_entries import CHUNK_TOKENS, LogprobEntries, pack


def entries(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(at, -0.1 * at, 1 + at, (at, 7), (-1e-300, -0.1)) for at in range(count)]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, CHUNK_TOKENS, 10 * CHUNK_TOKENS + 3])
def test_entries_survive_packing_and_appending(count: int) -> None:
    given, appended = entries(count), LogprobEntries()
    for entry in given:
        appended.append(entry)
    for made in (appended, LogprobEntries.of(given), LogprobEntries.of(pack(given))):
        assert len(made) == count and bool(made) == bool(count)
        assert list(made) == given
        assert all(type(entry) is TokenLogprobs for entry in made)
        chunks = list(made.chunks())
        assert [entry for chunk in chunks for entry in chunk] == given
        assert all(0 < len(chunk) <= CHUNK_TOKENS for chunk in chunks)


def test_waiting_entries_add_no_objects_for_the_garbage_collector() -> None:
    waiting = LogprobEntries()
    gc.collect()
    before = len(gc.get_objects())
    for entry in entries(10_000):
        waiting.append(entry)
    gc.collect()
    assert len(waiting) == 10_000
    assert len(gc.get_objects()) - before < 100
