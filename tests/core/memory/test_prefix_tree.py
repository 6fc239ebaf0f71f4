"""The tree of cached prefixes: its runs, and the prompt tokens that they have saved."""

from collections.abc import Iterable

from tests.core.harness import make_memory, make_sequence

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_tree import PrefixNode, prefix_tree


def cache(memory: KVCacheManager, token_ids: Iterable[int]) -> None:
    """Compute a prompt and end it, so that its blocks are cached."""
    sequence = make_sequence(memory, list(token_ids))
    match = memory.match(sequence)
    memory.admit(sequence, match, step_id=0)
    num_tokens = len(sequence.token_ids)
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = num_tokens
    memory.publish(sequence, num_tokens)
    memory.free(sequence)


def shape(nodes: list[PrefixNode]) -> list[tuple[int, int, int, int]]:
    """(parent, tokens, saved by the run, saved by it and what follows) of each run."""
    return [(n.parent, n.num_tokens, n.num_saved_tokens, n.num_saved_below) for n in nodes]


def test_empty_cache_has_no_runs() -> None:
    assert prefix_tree(make_memory(8), 10) == []


def test_prompts_with_a_common_beginning_are_one_run_and_its_branches() -> None:
    memory = make_memory(32)  # blocks of 4 tokens
    cache(memory, range(1, 13))
    cache(memory, [*range(1, 9), 50, 51, 52, 53])
    nodes = prefix_tree(memory, 10)
    common, *branches = shape(nodes)
    assert common == (-1, 8, 8, 8)
    assert branches == [(0, 4, 0, 0), (0, 4, 0, 0)]
    assert nodes[0].num_blocks == 2 and len(nodes[0].name) == 8


def test_runs_that_saved_most_are_kept_when_there_are_too_many() -> None:
    memory = make_memory(64)
    for first in (100, 200, 300):
        cache(memory, range(first, first + 9))
    for _ in range(3):
        cache(memory, range(200, 209))
    first, second = prefix_tree(memory, 2)
    assert first.num_saved_below >= 3 * 8 > second.num_saved_below
