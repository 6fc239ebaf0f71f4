"""The study of hybrids: what the oracles keep, and that the engine's memory comes near them."""

import pytest
from benchmarks.eviction.hybrid import KINDS, Oracle, Turn, main, replay, sessions, working_set


def turn(session: int, length: int, num_seen: int) -> Turn:
    return Turn(session, tuple(range(length)), (1,), num_seen)


def test_the_oracle_keeps_who_comes_next() -> None:
    turns = [turn(name, 160, 0) for name in range(3)]
    turns += [turn(name, 320, 160) for name in (2, 0, 1)]
    groups = KINDS["full"]
    assert Oracle(groups, 1000).replay(turns).percent == 100
    foreseen, recent = (Oracle(groups, 40, foresees=by).replay(turns) for by in (True, False))
    assert foreseen.found > recent.found > 0


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_in_turns_find_nearly_all_where_all_fit(kind: str) -> None:
    turns = sessions(8, 4, "random", seed=2)
    groups = KINDS[kind]
    num_blocks = int(1.5 * working_set(groups, turns))
    hits = replay(groups, turns, num_blocks, "lru")
    assert hits.found >= 0.95 * Oracle(groups, num_blocks).replay(turns).found > 0


@pytest.mark.parametrize("kind", ["window", "state", "window+state"])
@pytest.mark.parametrize("order", ["round", "random"])
def test_small_pools_keep_sessions_whole(kind: str, order: str) -> None:
    """As many hits as an oracle that keeps whole sessions, in a pool for some of them."""
    groups, found, kept = KINDS[kind], 0.0, 0.0
    for seed in range(2):
        turns = sessions(24, 6, order, seed)
        num_blocks = int(0.6 * working_set(groups, turns))
        found += replay(groups, turns, num_blocks, "hit_density").found
        kept += Oracle(groups, num_blocks, foresees=False).replay(turns).found
    assert found >= 0.95 * kept
    assert found > 0


def test_an_oracle_pays_for_what_a_request_holds() -> None:
    oracle = Oracle(KINDS["window+state"], 1000)
    # Of 41 tokens computed at once, 3 blocks in each group, and a state.
    assert oracle._most_held(0, 41) == 3 + 3 + 12
    # Going on from 1,000 of 1,041: 66 blocks; what the window sees before, and what is new; the
    # state that is copied, the copy, and the copied ends.
    assert oracle._most_held(1000, 1041) == 66 + (66 - 873 // 16) + 2 * 12 + 2
    # A chunk of 512 is held whole; the window before it, too.
    assert oracle._most_held(0, 1024) == 64 + (64 - 385 // 16) + 12


def test_of_all_equals_the_real_hits_if_all_sessions_fit() -> None:
    turns = sessions(6, 3, "random", seed=1)
    groups = KINDS["window+state"]
    num_blocks = 2 * int(working_set(groups, turns))
    for hits in (
        replay(groups, turns, num_blocks, "lru", of_all=True),
        Oracle(groups, num_blocks, foresees=False).replay(turns, of_all=True),
    ):
        assert hits.found == hits.seen > 0
    small = replay(groups, turns, num_blocks // 5, "lru", of_all=True)
    assert 0 < small.found < small.seen


def test_a_table_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sessions", "3", "--turns", "2", "--pools", "1,2"]
    assert main(["--kinds", "state,window", "--order", "round", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 5
    assert lines[0] == "state; 3 sessions, round: 6 requests"
