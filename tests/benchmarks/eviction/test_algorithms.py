"""The study's algorithms: short sequences whose victims follow from the papers."""

import pytest
from benchmarks.eviction.algorithms import ALGORITHMS, Algorithm
from benchmarks.eviction.replay import replay
from benchmarks.eviction.traces import MIXES, Access, make_mix


def cached(name: str, num_blocks: int, keys: str) -> str:
    """What is cached after requests of a block each."""
    accesses = [Access(float(number), 0.0, (ord(key),)) for number, key in enumerate(keys)]
    policy = ALGORITHMS[name](num_blocks, accesses)
    replay(accesses, policy, num_blocks)
    return "".join(key for key in sorted(set(keys)) if ord(key) in policy)


@pytest.mark.parametrize(
    ("name", "num_blocks", "keys", "expected"),
    [
        ("lru", 3, "abcad", "acd"),
        ("belady", 3, "abcdab", "abd"),
        ("clock", 3, "abcad", "acd"),  # b is the first that was not used again
        ("clock", 3, "abcbaced", "cde"),  # all were used again: a has lost its chance first
        ("slru", 4, "aabcdefg", "aefg"),
        ("lru-2", 3, "aabbcde", "abe"),  # used once: before all that were used twice
        ("lru-2", 2, "aabcbd", "bd"),  # b's ghost makes its second use count
        ("lfu-ageing", 3, "aaabcdef", "aef"),
        ("lfu-ageing", 2, "aabcdef", "ef"),  # the values evicted lift the newcomers above a
        ("lfu-ghosts", 2, "abcaade", "ae"),
        ("gdsf", 3, "aaabcdef", "aef"),
        ("arc", 4, "aabbcdefgh", "abgh"),
        ("s3-fifo", 10, "aabbcdefghijklm", "abfghijklm"),
        ("s3-fifo", 3, "abcdae", "ade"),  # a's ghost brings it back into the main queue
        ("w-tinylfu", 3, "aabbcde", "abe"),
    ],
)
def test_victims(name: str, num_blocks: int, keys: str, expected: str) -> None:
    assert cached(name, num_blocks, keys) == expected


@pytest.mark.parametrize(
    "name", ["slru", "lru-2", "arc", "s3-fifo", "w-tinylfu", "lru-2-4x", "s3-fifo-4x"]
)
def test_scans_by_many_blocks_at_once_do_not_wash_out_what_is_used_often(name: str) -> None:
    """As requests come; what is made for it withstands a scan of three times the pool."""
    hot = Access(0.0, 0.0, (1, 2))
    scans = [Access(0.0, 0.0, tuple(range(10 * n, 10 * n + 10))) for n in range(1, 13)]
    accesses = [hot, hot, scans[0], hot, *scans[1:]]
    policy = ALGORITHMS[name](40, accesses)
    replay(accesses, policy, 40)
    assert 1 in policy and 2 in policy


def test_newcomers_to_w_tinylfu_must_have_been_used_more_often_than_who_they_replace() -> None:
    policy = ALGORITHMS["w-tinylfu"](20, [])
    chains = [tuple(range(5 * n, 5 * n + 5)) for n in range(12)]
    replay([Access(0.0, 0.0, chain) for chain in chains[:4] * 2], policy, 20)  # fills it, twice
    replay([Access(0.0, 0.0, chain) for chain in chains[4:]], policy, 20)
    old = [key for chain in chains[:4] for key in chain if key in policy]
    assert len(old) >= 14  # all but what the first newcomers had to have


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_books_are_kept(name: str) -> None:
    """Nothing held is evicted, and never is more cached than fits."""
    accesses = [
        Access(access.arrival_s, access.arrival_s % 7, access.block_ids)
        for access in make_mix(MIXES["drifting"])[:400]
    ]
    policy: Algorithm = ALGORITHMS[name](150, accesses)
    held: list[tuple[float, tuple[int, ...]]] = []
    for access in accesses:
        while held and (held[0][0] <= access.arrival_s or policy.num_free < len(access.block_ids)):
            for depth, key in reversed(list(enumerate(held.pop(0)[1]))):
                policy.release(key, depth)
        for key in access.block_ids:
            if key in policy:
                policy.hold(key)
        policy.insert([key for key in access.block_ids if key not in policy])
        held.append((access.arrival_s + access.hold_s, access.block_ids))
        now_held = {key for _, keys in held for key in keys}
        assert all(key in policy for key in now_held)
        assert policy.num_free == 150 - len(now_held)
        assert len(policy._cached) <= 150


def test_costly_depths_are_kept_by_gdsf_alone() -> None:
    chain = Access(0.0, 0.0, tuple(range(10)))
    scan = Access(1.0, 0.0, tuple(range(100, 105)))
    left = {}
    for name in ("gdsf", "lfu-ageing"):
        policy = ALGORITHMS[name](10, [chain, scan])
        replay([chain, scan], policy, 10)
        left[name] = [key for key in chain.block_ids if key in policy]
    assert left == {"gdsf": [5, 6, 7, 8, 9], "lfu-ageing": [0, 1, 2, 3, 4]}
