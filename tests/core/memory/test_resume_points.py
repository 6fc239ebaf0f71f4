"""What only a lost end needed is taken next, and the ends of others stay."""

import pytest
from tests.core.hybrid_serving import FULL, Serving, state, tokens, window

from quire.core.kv_groups import KVGroup
from quire.core.memory.eviction import ContentKey
from quire.core.scheduling import invariants
from quire.core.sequence import Sequence

SHARED = tokens(32)
KINDS = {
    "window": (FULL, window(10)),
    "windows": (FULL, window(10), window(20)),
    "state": (FULL, state(3)),
    "window, state": (FULL, window(10), state(3)),
    "window alone": (window(10),),
    "state alone": (state(3),),
}


def end_of(serving: Serving, sequence: Sequence) -> bytes:
    """The name of the end that the sequence left."""
    ends = serving.memory.resume_points._points
    written = len(sequence.token_ids) - 1
    return next(
        name
        for name, end in ends.items()
        if end.num_tokens == written and end.digests[10] == sequence.chain[10]
    )


def lose(serving: Serving, key: ContentKey) -> None:
    """As if the block had been needed."""
    memory = serving.memory
    block = memory.cache.find(*key)
    assert block is not None
    memory.cache.remove_run([key])
    memory.pool.forget(block)
    memory.resume_points.on_evicted([key])
    memory.snapshots.forget_rest([key])
    invariants.check_memory(memory, [])


def lost_keys(serving: Serving, name: bytes) -> list[ContentKey]:
    """One content in each group that the end needs."""
    memory = serving.memory
    keys = [(rule.group, name) for rule in memory.growth.growing]
    return keys + [(rule.group, name + b"\0\0") for rule in memory.growth.states]


def demoted_names(serving: Serving, group: int) -> set[bytes]:
    pool = serving.memory.pool
    keys = [pool.content[block] for block in pool.demoted]
    return {key[1] for key in keys if key is not None and key[0] == group}


def findable(serving: Serving, sequence: Sequence) -> int:
    """Of all that it wrote; without tokens in the cache, to the end of its prompt's last block."""
    if serving.memory.growth.main is None:
        return (sequence.num_prompt_tokens - 1) // 4 * 4
    return len(sequence.token_ids) - 1


@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("which", [0, -1])
def test_the_rest_of_a_lost_end_goes_next_up_to_where_another_parts(
    groups: tuple[KVGroup, ...], which: int
) -> None:
    serving = Serving(*groups)
    lost = serving.serve([*SHARED, *tokens(30, seed=2)])
    other = serving.serve([*SHARED, *tokens(30, seed=3)])
    name = end_of(serving, lost)
    digests = list(serving.memory.resume_points._points[name].digests)
    lose(serving, lost_keys(serving, name)[which])
    assert name not in serving.memory.resume_points._points
    for rule in serving.memory.growth.unbounded:
        assert demoted_names(serving, rule.group) >= set(digests[8:]) - {name}
        assert not demoted_names(serving, rule.group) & set(other.chain[:15])
    for rule in serving.memory.growth.windows:
        first = rule.first_needed(len(lost.token_ids) - 1)
        assert demoted_names(serving, rule.group) >= set(digests[first:]) - {name}
    again = serving.serve([*other.token_ids, 5, 6, 7])
    assert again.num_cached_tokens >= findable(serving, other)


@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS)
def test_recomputed_blocks_replace_the_released_ones(
    groups: tuple[KVGroup, ...],
) -> None:
    serving = Serving(*groups)
    lost = serving.serve(tokens(60))
    name = end_of(serving, lost)
    lose(serving, lost_keys(serving, name)[-1])
    again = serving.serve([*lost.token_ids, 5, 6, 7])
    assert again.num_cached_tokens < len(lost.token_ids) - 1
    for rule in serving.memory.growth.unbounded:
        assert not demoted_names(serving, rule.group) & set(again.chain)
    third = serving.serve([*again.token_ids, 5, 6, 7])
    assert third.num_cached_tokens >= findable(serving, again)


@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS)
def test_nothing_is_left_of_ends_whose_contents_are_forgotten(
    groups: tuple[KVGroup, ...],
) -> None:
    serving = Serving(*groups, num_blocks=100)
    for seed in range(40):
        serving.serve(tokens(60, seed))
    ends = serving.memory.resume_points
    assert 0 < len(ends._points) < 40
    serving.memory.prefixes.clear()
    assert not ends._points and not ends._named
    invariants.check_memory(serving.memory, [])


def test_the_rest_of_lost_states_is_freed_in_the_order_of_eviction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = Serving(FULL, state(3))
    for seed in range(6):
        serving.serve(tokens(30, seed=seed))
    memory = serving.memory
    firsts = [
        key
        for key in memory.pool.content
        if key is not None and key[0] == 1 and key[1][-2:] == b"\0\0"
    ]
    assert len(firsts) >= 6
    states = [memory.snapshots.find(key[1][:-2]) or () for key in firsts]
    forgotten: list[int] = []
    monkeypatch.setattr(memory.pool, "forget", forgotten.append)
    memory.snapshots.forget_rest(firsts)
    assert forgotten == [page for pages, *_ in states for page in pages]
