"""Which blocks of a prompt are found, whole and in part; and which are published."""

import random

import pytest
from tests.core.harness import make_memory, make_sequence
from tests.core.memory.test_kv_cache_manager import STEP, admit, compute, fork, num_hits, write

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.memory.prefix_index import TOKENS_AROUND
from quire.core.scheduling import invariants
from quire.core.sequence import Eviction, MissReason, PrefixMiss, Sequence
from quire.core.step import TokenLogprobs

# ---- matches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(
    ("cached", "asked", "expected"),
    [
        (8, 8, 7),  # the last token is always computed
        (8, 9, 8),
        (8, 12, 8),
        (7, 12, 4),  # a running sequence publishes full blocks only
        (3, 12, 0),
        (8, 4, 3),
        (8, 5, 4),
        (8, 2, 1),
        (8, 1, 0),
    ],
)
def test_a_match_is_to_the_token_and_leaves_one_to_compute(
    cached: int, asked: int, expected: int, num_groups: int
) -> None:
    memory = make_memory(num_groups=num_groups)
    write(memory, list(range(cached)))
    match = memory.match(make_sequence(memory, list(range(asked))))
    assert match.num_tokens == expected
    assert match.num_confirmed_tokens == expected // 4 * 4
    assert [len(ids) for ids in match.blocks] == [expected // 4] * num_groups
    assert len(match.partial) == (expected % 4 > 0) * num_groups


@pytest.mark.parametrize("differs_at", range(12))
@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_a_match_ends_at_the_first_different_token(differs_at: int, block_size: int) -> None:
    memory = make_memory(block_size=block_size)
    memory.free(write(memory, list(range(12))))
    prompt = [*range(differs_at), 99, *range(differs_at + 1, 15)]
    assert num_hits(memory, prompt) == differs_at


def test_the_longest_of_several_continuations_is_taken() -> None:
    memory = make_memory(num_blocks=40, block_size=8)
    head = list(range(8))
    for tail in ([1, 2, 3, 4], [1, 2, 3, 9, 9], [1, 9], [2, 2, 3, 4, 5, 6, 7, 8]):
        memory.free(write(memory, head + tail))
    found = [num_hits(memory, head + tail) for tail in ([1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [2], [3])]
    assert found == [12, 12, 8, 8]
    assert num_hits(memory, [*head, 2, 2, 3, 4, 0]) == 12


@pytest.mark.parametrize("num_output_tokens", range(6))
def test_a_partly_filled_tail_is_findable_after_the_end(num_output_tokens: int) -> None:
    memory = make_memory()
    sequence = write(memory, list(range(5)))
    for token_id in range(50, 50 + num_output_tokens):
        sequence.append(token_id)
    memory.grow(sequence, len(sequence.token_ids))
    compute(memory, sequence)
    token_ids = [*sequence.token_ids, 7]
    assert num_hits(memory, token_ids) == (5 + num_output_tokens) // 4 * 4
    memory.free(sequence)
    assert num_hits(memory, token_ids) == 5 + num_output_tokens
    invariants.check_memory(memory, [])


def test_tokens_that_a_fork_adds_to_a_published_tail_are_found() -> None:
    memory = make_memory()
    parent = write(memory, list(range(6)))
    child = fork(memory, parent)
    memory.free(parent)
    assert num_hits(memory, list(range(7))) == 6
    child.append(6)
    compute(memory, child)
    assert child.block_tables[0][1] in memory.cache.entries(0).values()
    memory.free(child)
    assert num_hits(memory, list(range(9))) == 7
    assert len(memory.cache) == 2, "the longer tail took the place of the shorter one"
    invariants.check_memory(memory, [])


def test_a_match_changes_no_memory() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(12)))
    memory.free(sequence)
    before = (memory.pool.free_ids(), list(memory.pool.ref_count), len(memory.cache))
    match = memory.match(make_sequence(memory, list(range(12))))
    assert match.num_revived == 3
    assert (memory.pool.free_ids(), memory.pool.ref_count, len(memory.cache)) == before


def test_only_unheld_blocks_are_revived() -> None:
    memory = make_memory()
    memory.free(write(memory, list(range(11))))
    write(memory, [*range(5), 90])
    match = memory.match(make_sequence(memory, list(range(12))))
    assert (match.num_tokens, match.num_revived) == (11, 2), "of three: one is held"


def test_nothing_is_found_before_it_was_written() -> None:
    memory = make_memory()
    sequence = make_sequence(memory, list(range(12)))
    admit(memory, sequence)
    assert num_hits(memory, list(range(12))) == 0
    memory.publish(sequence, 7)
    assert num_hits(memory, list(range(12))) == 4


def test_a_disabled_cache_finds_nothing_and_counts_nothing() -> None:
    memory = make_memory(caching=False)
    memory.free(write(memory, list(range(12))))
    assert num_hits(memory, list(range(12))) == 0
    assert (len(memory.cache), memory.prefixes.num_query_tokens) == (0, 0)


def test_prompt_logprobs_are_computed_not_read_from_the_cache_but_written_to_it() -> None:
    memory = make_memory()
    sequence = make_sequence(memory, range(12), prompt_logprobs=1)
    admit(memory, sequence)
    compute(memory, sequence)
    assert num_hits(memory, list(range(12))) == 11
    assert memory.match(make_sequence(memory, range(12), prompt_logprobs=1)).num_tokens == 0


def test_a_second_writer_of_the_same_content_stays_private() -> None:
    memory = make_memory()
    first, second = (make_sequence(memory, list(range(8))) for _ in range(2))
    for sequence in (first, second):
        admit(memory, sequence)
    memory.publish(first, 8)
    memory.publish(second, 8)
    assert not set(first.block_tables[0]) & set(second.block_tables[0])
    assert list(memory.cache.entries(0).values()) == first.block_tables[0]
    memory.free(first)
    memory.free(second)
    # The private blocks have no content and are taken first; the known ones outlive them.
    assert set(memory.pool.free_ids()[-2:]) == {0, 1}
    invariants.check_memory(memory, [])


@pytest.mark.parametrize("num_groups", [2, 3])
def test_a_block_that_one_group_lost_is_no_hit_in_any(num_groups: int) -> None:
    memory = make_memory(num_blocks=2 * num_groups, num_groups=num_groups)
    memory.free(write(memory, list(range(8))))
    _, evicted = memory.pool.take(1)
    for key in evicted:
        memory.cache.remove_run([key])
    assert [len(memory.cache.entries(group)) for group in range(num_groups)].count(1) == 1
    assert num_hits(memory, list(range(9))) == 4


def test_a_cleared_cache_is_empty_and_its_blocks_stay_with_their_holders() -> None:
    memory = make_memory(num_blocks=6)
    held = write(memory, list(range(8)))
    memory.free(write(memory, [9] * 8))
    memory.prefixes.clear()
    assert len(memory.cache) == 0
    assert num_hits(memory, list(range(9))) == num_hits(memory, [9] * 9) == 0
    invariants.check_memory(memory, [held])
    memory.publish(held, 8)
    memory.free(held)
    invariants.check_memory(memory, [])


def test_only_the_first_admission_counts_as_query() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(12)))
    memory.truncate(sequence, 0)
    admit(memory, sequence)
    assert (sequence.num_cached_tokens, sequence.num_computed_tokens) == (0, 11)
    assert (memory.prefixes.num_query_tokens, memory.prefixes.num_hit_tokens) == (12, 0)
    assert sequence.num_admissions == 2


def test_many_random_prompts_hit_exactly_what_their_past_says() -> None:
    rng = random.Random(1)
    memory = make_memory(num_blocks=800, block_size=4)
    past: set[tuple[int, ...]] = {()}
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        expected = max(end for end in range(len(tokens)) if tuple(tokens[:end]) in past)
        assert num_hits(memory, tokens) == expected
        memory.free(write(memory, tokens))
        past |= {tuple(tokens[:end]) for end in range(1, len(tokens) + 1)}
    invariants.check_memory(memory, [])


# ---- domains ------------------------------------------------------------------------------------


def test_domains_never_hit_one_another() -> None:
    memory = make_memory()
    memory.free(write(memory, list(range(12)), "tenant-a"))
    assert num_hits(memory, list(range(12)), "tenant-b") == 0
    assert num_hits(memory, list(range(12)), "") == 0
    assert num_hits(memory, list(range(12)), "tenant-a") == 11


@pytest.mark.parametrize("num_groups", [1, 2])
def test_all_domains_find_what_is_published_for_all(num_groups: int) -> None:
    memory = make_memory(num_blocks=40, num_groups=num_groups)
    memory.free(write(memory, list(range(10)), PUBLIC_DOMAIN))
    for domain in ("a", "b"):
        assert num_hits(memory, [*range(10), 1, 2], domain) == 10
    assert num_hits(memory, [*range(6), 99, 98], "a") == 6


def test_public_blocks_go_on_with_own_ones_and_parts_of_either() -> None:
    memory = make_memory(num_blocks=60)
    memory.free(write(memory, list(range(10)), PUBLIC_DOMAIN))
    mine = [*range(10), 20, 21, 22, 23, 24, 25]
    memory.free(write(memory, mine, "a"))
    assert num_hits(memory, [*mine, 1], "a") == 16
    assert num_hits(memory, [*mine, 1], "b") == 10, "what it generated is its own"
    assert num_hits(memory, [*range(7), 90], "a") == 7


def test_a_public_part_is_found_after_blocks_of_the_own_domain() -> None:
    memory = make_memory(num_blocks=60)
    memory.free(write(memory, list(range(4)), "a"))
    memory.free(write(memory, list(range(7)), PUBLIC_DOMAIN))
    assert num_hits(memory, list(range(8)), "a") == 7


def test_a_public_block_stays_public_in_the_table_of_a_reader() -> None:
    """Even where the reader publishes, itself, what comes before it."""
    memory = make_memory(num_blocks=60)
    public = write(memory, list(range(12)), PUBLIC_DOMAIN)
    reader = make_sequence(memory, [*range(12), 1], domain="a")
    admit(memory, reader)
    reader.num_published_blocks = 0
    compute(memory, reader)
    assert reader.block_tables[0][:3] == public.block_tables[0]
    assert num_hits(memory, [*range(12), 5], "b") == 12
    invariants.check_memory(memory, [public, reader])


def test_a_published_prefix_ends_when_its_blocks_are_evicted() -> None:
    memory = make_memory(num_blocks=4)
    memory.free(write(memory, list(range(8)), PUBLIC_DOMAIN))
    write(memory, list(range(50, 66)), "a")
    assert not memory.cache.has_public(memory.cache.public_root)
    assert num_hits(memory, list(range(9)), "b") == 0


# ---- forks that wait ----------------------------------------------------------------------------


def waiting_fork(parent: Sequence) -> Sequence:
    child = parent.branch(1, parent.params)
    child.fork_from(parent)
    return child


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_tokens", [5, 8, 9])
def test_a_fork_finds_the_blocks_of_its_parent(num_tokens: int, caching: bool) -> None:
    memory = make_memory(caching=caching)
    parent = write(memory, list(range(num_tokens)))
    match = memory.match(waiting_fork(parent))
    full = (num_tokens - 1) // 4
    assert match.num_tokens == num_tokens - 1, "one is left to compute"
    assert match.blocks == (tuple(parent.block_tables[0][:full]),)
    assert match.partial == tuple(parent.block_tables[0][full : full + (num_tokens % 4 != 1)])


def test_fork_shares_only_its_parents_common_tokens() -> None:
    memory = make_memory(caching=False)
    parent = write(memory, list(range(9)))
    child = waiting_fork(parent)
    for token_id in range(9, 15):
        parent.append(token_id)
    memory.grow(parent, 15)
    compute(memory, parent)
    child.append(77)  # taken over from an ended heir, say
    assert memory.match(child).num_tokens == 9


def test_log_probabilities_of_the_prompt_come_with_the_blocks_of_the_parent_or_not_at_all() -> None:
    memory = make_memory()
    parent = make_sequence(memory, range(9), prompt_logprobs=1)
    admit(memory, parent)
    compute(memory, parent)
    child = waiting_fork(parent)
    assert memory.match(child).num_tokens == 0
    parent.prompt_logprobs += [TokenLogprobs(1, -1.0, 1, (), ())] * 8
    assert memory.match(child).num_tokens == 8


# ---- followers ----------------------------------------------------------------------------------


def leader_of(memory: KVCacheManager, token_ids: list[int], domain: str = "") -> Sequence | None:
    return memory.match(make_sequence(memory, token_ids, domain=domain)).leader


def test_the_sequence_that_computes_the_next_block_is_the_leader() -> None:
    memory = make_memory()
    leader = make_sequence(memory, range(14))
    admit(memory, leader)
    prompt = [*range(12), 77]
    assert leader_of(memory, prompt) is leader
    assert leader_of(memory, prompt, "other") is None
    assert leader_of(memory, [99, *prompt]) is None
    assert leader_of(memory, list(range(4))) is None, "less than a block that leaves one token"
    memory.publish(leader, 5)
    assert (num_hits(memory, prompt), leader_of(memory, prompt)) == (4, leader)
    memory.publish(leader, 12)
    assert (num_hits(memory, prompt), leader_of(memory, prompt)) == (12, None)


@pytest.mark.parametrize("how", ["free", "cut"])
def test_a_sequence_that_gives_its_blocks_back_is_no_leader(how: str) -> None:
    memory = make_memory()
    leader = make_sequence(memory, range(14))
    admit(memory, leader)
    memory.publish(leader, 4)
    if how == "free":
        memory.free(leader)
    else:
        memory.truncate(leader, 1)
    assert (num_hits(memory, list(range(13))), leader_of(memory, list(range(13)))) == (4, None)
    follower = make_sequence(memory, range(14))
    admit(memory, follower)
    assert leader_of(memory, list(range(13))) is follower, "it has taken over"


def test_the_first_of_two_sequences_is_the_leader() -> None:
    memory = make_memory()
    first, second = make_sequence(memory, range(9)), make_sequence(memory, range(14))
    admit(memory, first)
    admit(memory, second)
    assert leader_of(memory, list(range(9))) is first
    memory.publish(first, 8)
    assert leader_of(memory, list(range(14))) is second
    memory.free(first)
    assert leader_of(memory, list(range(14))) is second
    memory.free(second)
    assert memory.prefixes._computing == {}


def test_the_prompt_of_several_branches_is_hashed_once() -> None:
    memory = make_memory()
    branches = [make_sequence(memory, range(9)) for _ in range(3)]
    memory.prefixes.hash_prompt(branches)
    assert [len(branch.chain) for branch in branches] == [2, 2, 2]
    branches[1].chain.append(b"x")
    assert [len(branch.chain) for branch in branches] == [2, 3, 2]


def test_a_copy_of_part_of_a_block_is_published_when_it_is_full() -> None:
    memory = make_memory()
    memory.free(write(memory, list(range(8))))
    sequence = make_sequence(memory, [*range(6), 90, 91, 92])
    admit(memory, sequence)
    compute(memory, sequence)
    memory.end_step(STEP)
    assert num_hits(memory, [*range(6), 90, 91, 1]) == 8
    assert num_hits(memory, [*range(8), 1]) == 8
    invariants.check_memory(memory, [sequence])


# ---- reasons for a miss -------------------------------------------------------------------------


def miss(memory: KVCacheManager, token_ids: list[int], domain: str = "") -> PrefixMiss:
    """What a first admission keeps."""
    sequence = make_sequence(memory, token_ids, domain=domain)
    admit(memory, sequence)
    found = sequence.miss
    assert found is not None and found.num_found_tokens == sequence.num_cached_tokens
    memory.free(sequence)
    return found


def test_none_if_all_but_the_last_token_was_there() -> None:
    memory = make_memory()
    memory.free(write(memory, list(range(10))))
    assert miss(memory, list(range(10))) == PrefixMiss(MissReason.NONE, 9)
    assert miss(memory, [3]) == PrefixMiss(MissReason.NONE, 0)


def test_never_seen() -> None:
    memory = make_memory()
    assert miss(memory, list(range(10))) == PrefixMiss(MissReason.NEVER_SEEN, 0)
    memory.free(write(memory, list(range(8))))
    assert miss(memory, list(range(20))) == PrefixMiss(MissReason.NEVER_SEEN, 8)


def test_below_a_block() -> None:
    memory = make_memory(block_size=8)
    memory.free(write(memory, list(range(8))))
    assert miss(memory, list(range(14))) == PrefixMiss(MissReason.BELOW_BLOCK, 8)
    assert miss(memory, [50, 51, 52]) == PrefixMiss(
        MissReason.DIFFERS, 0, (50, 51, 52), (0, 1, 2, 3, 4, 5, 6, 7)
    )
    assert miss(make_memory(), [50, 51, 52]) == PrefixMiss(MissReason.BELOW_BLOCK, 0)


def test_differs_tells_the_texts_around_the_first_differing_token() -> None:
    memory = make_memory(num_blocks=40, block_size=16)
    memory.free(write(memory, list(range(40))))
    prompt = [*range(20), 99, *range(121, 140)]
    found = miss(memory, prompt)
    assert (found.reason, found.num_found_tokens) == (MissReason.DIFFERS, 20)
    assert found.prompt_around == tuple(prompt[12:29])
    assert found.cached_around == tuple(range(12, 29))
    assert found.prompt_around[TOKENS_AROUND] == 99 and found.cached_around[TOKENS_AROUND] == 20


def test_differs_at_the_first_token_of_a_block_and_of_a_prompt() -> None:
    memory = make_memory(num_blocks=40, block_size=4)
    memory.free(write(memory, list(range(8))))
    assert miss(memory, [0, 1, 2, 3, 90, 91, 92, 93, 94]) == PrefixMiss(
        MissReason.DIFFERS, 4, (0, 1, 2, 3, 90, 91, 92, 93, 94), tuple(range(8))
    )
    memory = make_memory(num_blocks=40, block_size=4)
    memory.free(write(memory, list(range(8))))
    found = miss(memory, [90, 1, 2, 3, 4])
    assert (found.num_found_tokens, found.cached_around) == (0, (0, 1, 2, 3))


def test_evicted_tells_when_and_for_whom() -> None:
    memory = make_memory(num_blocks=4)
    memory.free(write(memory, list(range(16))))
    memory.now_s = 12.5
    other = make_sequence(memory, [90, 91, 92, 93, 94], name="other")
    admit(memory, other)
    memory.free(other)
    assert miss(memory, list(range(17))[:16]) == PrefixMiss(
        MissReason.EVICTED, 8, eviction=Eviction(12.5, "other")
    )


def test_evicted_is_over_when_the_content_is_back() -> None:
    memory = make_memory(num_blocks=4)
    memory.free(write(memory, list(range(13))))
    memory.free(write(memory, [90] * 8))
    assert miss(memory, list(range(13))).reason is MissReason.EVICTED
    memory.free(write(memory, list(range(13))))
    assert miss(memory, list(range(13))).reason is MissReason.NONE


def test_other_domain() -> None:
    memory = make_memory()
    memory.free(write(memory, list(range(8)), "a"))
    assert miss(memory, list(range(8)), "b") == PrefixMiss(MissReason.OTHER_DOMAIN, 0)
    assert miss(memory, [*range(4), 9, 9, 9, 9, 9], "c").reason is MissReason.OTHER_DOMAIN
    assert miss(memory, [9, *range(8)], "b").reason is not MissReason.OTHER_DOMAIN


def test_not_asked() -> None:
    memory = make_memory()
    memory.free(write(memory, list(range(8))))
    sequence = make_sequence(memory, list(range(8)), prompt_logprobs=1)
    admit(memory, sequence)
    assert sequence.miss == PrefixMiss(MissReason.NOT_ASKED, 0)
    assert memory.prefixes.num_hit_tokens == 0


def test_a_disabled_cache_gives_no_reasons() -> None:
    memory = make_memory(caching=False)
    sequence = make_sequence(memory, list(range(8)))
    admit(memory, sequence)
    assert sequence.miss is None
    assert sum(memory.prefixes.misses.values()) == 0


def test_reasons_are_counted_once_for_each_first_admission() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(8)))
    memory.truncate(sequence, 1)
    admit(memory, sequence)
    miss(memory, [77] * 9)
    counts = {reason: count for reason, count in memory.prefixes.misses.items() if count}
    assert counts == {MissReason.NEVER_SEEN: 1, MissReason.DIFFERS: 1}


# ---- publishing together ------------------------------------------------------------------------


def decode_block(memory: KVCacheManager, sequence: Sequence, first_token: int) -> None:
    """Let a sequence generate the tokens of a block, without publishing it."""
    sequence.token_ids += range(first_token, first_token + 4)
    assert memory.grow(sequence, len(sequence.token_ids)) is not None
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = len(sequence.token_ids)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_blocks_published_together_equal_blocks_published_one_by_one(num_groups: int) -> None:
    found = []
    for is_together in (True, False):
        memory = make_memory(num_blocks=120, num_groups=num_groups)
        # The first two prompts are equal, and the first and the third generate equal tokens.
        sequences = [write(memory, list(range(at, at + 8))) for at in (0, 0, 20, 40)]
        for sequence, first_token in zip(sequences, (60, 60, 60, 80), strict=True):
            decode_block(memory, sequence, first_token)
        decode_block(memory, sequences[3], 90)  # it fills two blocks
        if is_together:
            memory.filled_blocks.publish(sequences)
        else:
            for sequence in sequences:
                memory.publish(sequence, sequence.num_confirmed_tokens)
        invariants.check_memory(memory, sequences)
        entries = [memory.cache.entries(group) for group in range(num_groups)]
        assert len(entries[0]) == 2 + 2 + 2 + 1 + 1 + 2
        found.append((entries, [sequence.num_published_blocks for sequence in sequences]))
    assert found[0] == found[1]
