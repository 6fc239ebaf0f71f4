"""Each reason for which a prompt was not found whole, and what is reported with it."""

from tests.core.harness import make_memory, make_sequence
from tests.core.memory.test_kv_cache_manager import admit, write

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_index import TOKENS_AROUND
from quire.core.sequence import Eviction, MissReason, PrefixMiss


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
