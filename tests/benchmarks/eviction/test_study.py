"""The study on a small sample, and what the engine's order owes to it."""

from pathlib import Path

import pytest
from benchmarks.eviction.study import caches, main, table
from benchmarks.eviction.traces import MIXES, make_mix, read_trace
from tests.registering import restored

from quire.core.memory.eviction import EVICTION_ORDERS, ContentKey, LruOrder

SAMPLE = Path(__file__).parents[2] / "data" / "chats_trace.jsonl"
POOLS = [60, 150, 300, 600]


def rates(lines: list[str]) -> dict[str, list[float]]:
    """A printed table as numbers, by algorithm."""
    rows = [line.split() for line in lines]
    assert rows[0][0] == "blocks"
    return {name: list(map(float, row)) for name, *row in rows[1:]}


def test_on_the_sample_the_engine_is_never_behind_lru_and_ahead_where_there_is_room() -> None:
    by_name = rates(table(read_trace(SAMPLE), POOLS, list(caches())))
    assert list(by_name) == list(caches())
    assert by_name["pool-lru"] == by_name["lru"]
    for name, row in by_name.items():
        assert all(best >= rate for best, rate in zip(by_name["belady"], row, strict=True)), name
    for best, lru, ours in zip(*(by_name[name] for name in ROWS), strict=True):
        assert ours > lru - 0.5
        assert ours > lru + 1 or best < lru + 13  # the largest pool: most fits


ROWS = ("belady", "lru", "hit_density")


@pytest.mark.parametrize("name", ["steady", "few", "bursts"])
def test_on_a_mix_the_engine_goes_most_of_the_way_to_belady(name: str) -> None:
    by_name = rates(table(make_mix(MIXES[name])[:2500], [300], ROWS))
    best, lru, ours = (by_name[row][0] for row in ROWS)
    assert best > lru + 5
    assert ours - lru > 0.55 * (best - lru)


def test_the_command_prints_a_table_for_each_workload(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--trace {SAMPLE} --token-s 0.01 --mix few --requests :60 --pools 50,99 --seed 3"
    assert main([*words.split(), "--algorithms", "lru,hit_density"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[4]] == [
        "chats_trace.jsonl: 60 requests",
        "mix few, seed 3: 60 requests",
    ]
    for first in (1, 5):
        assert lines[first].split() == ["blocks", "50", "99"]
        assert list(rates(lines[first : first + 3])) == ["lru", "hit_density"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to replay"),
        ("--mix some", "'some' must be one of steady"),
        ("--mix few --algorithms fifo", "'fifo' must be one of belady"),
        ("--mix few --pools 0", "'0' must be numbers of blocks"),
        ("--mix few --requests 7", "'7' must be FIRST:LAST"),
        ("--mix few --token-s -1", "--token-s is -1.0, but must be at least 0"),
    ],
)
def test_bad_options_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert message in capsys.readouterr().err


def test_a_trace_that_cannot_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(tmp_path / "none")]) == 2
    (tmp_path / "bad").write_text("x")
    assert main(["--trace", str(tmp_path / "bad")]) == 2
    assert "line 1 of" in capsys.readouterr().err


class MostRecentFirst(LruOrder):
    """The order that a newcomer might try: what was freed last is forgotten first."""

    def take(self, count: int, evicted: list[ContentKey]) -> list[int]:
        newest = self.block_ids()[::-1][:count]
        for block in newest:
            key = self._content[block]
            assert key is not None
            evicted.append(key)
            self._content[block] = None
            self.drop(block)
        return newest


def test_an_order_that_is_registered_is_studied_beside_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with restored(EVICTION_ORDERS):
        EVICTION_ORDERS.register("most_recent_first", MostRecentFirst)
        assert list(caches())[-3:] == ["most_recent_first", "pool-lru", "hit_density"]
        words = ["--trace", str(SAMPLE), "--pools", "150", "--algorithms"]
        assert main([*words, "most_recent_first,pool-lru"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    found = rates(lines)
    assert found["most_recent_first"] != found["pool-lru"]
    assert len({len(line) for line in lines}) == 1, "columns"
