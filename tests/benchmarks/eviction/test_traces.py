"""Reading traces, and what the synthetic mixes are made of."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.eviction.traces import MIXES, Access, Mix, make_mix, read_trace

from quire.errors import ConfigurationError

SAMPLE = Path(__file__).parents[2] / "data" / "chats_trace.jsonl"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_a_request_is_read_with_its_times_in_seconds(tmp_path: Path) -> None:
    line = '{"timestamp": 1500, "input_length": 700, "output_length": 30, "hash_ids": [4, 9]}'
    path = write(tmp_path / "trace", line)
    assert read_trace(path) == [Access(1.5, 0.0, (4, 9))]
    assert read_trace(path, token_s=0.1) == [Access(1.5, pytest.approx(3.0), (4, 9))]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "{}",
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 3}',
        '{"timestamp": "x"}',
    ],
)
def test_lines_that_are_no_request_are_refused_with_their_number(line: str, tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}'
    with pytest.raises(ConfigurationError, match=r"line 2 of .*trace is not a request"):
        read_trace(write(tmp_path / "trace", good, line))


def test_an_id_twice_in_a_request_is_refused(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 1]}'
    with pytest.raises(ConfigurationError, match=r"line 1 of .*a prefix id occurs twice"):
        read_trace(write(tmp_path / "trace", line))


def test_the_sample_is_chats_over_one_system_prompt() -> None:
    accesses = read_trace(SAMPLE)
    assert len(accesses) == 600
    assert all(access.block_ids[0] == 0 for access in accesses)
    times = [access.arrival_s for access in accesses]
    assert times == sorted(times)
    parents: dict[int, int] = {}
    for access in accesses:  # an id stands for its whole prefix
        for parent, block in zip((-1, *access.block_ids), access.block_ids, strict=False):
            assert parents.setdefault(block, parent) == parent


@pytest.mark.parametrize("name", sorted(MIXES))
def test_mixes_are_drawn_from_their_seed(name: str) -> None:
    mix = replace(MIXES[name], num_requests=300)
    assert make_mix(mix) == make_mix(mix) != make_mix(replace(mix, seed=1))
    assert len(make_mix(mix)) == 300


def shared(accesses: list[Access]) -> list[bool]:
    """Whether each request begins as another does."""
    firsts = [access.block_ids[0] for access in accesses]
    return [firsts.count(first) > 1 for first in firsts]


def test_a_mix_has_its_hot_share_and_its_popularity() -> None:
    accesses = make_mix(Mix(num_requests=2000, num_hot=20, hot_share=0.3))
    hot = [access for access, is_hot in zip(accesses, shared(accesses), strict=True) if is_hot]
    assert 0.25 < len(hot) / 2000 < 0.35
    firsts = [access.block_ids[0] for access in hot]
    counts = sorted((firsts.count(first) for first in set(firsts)), reverse=True)
    assert len(counts) == 20
    assert counts[0] > 10 * counts[-1]


def test_bursts_are_scans_alone() -> None:
    hot = shared(make_mix(Mix(num_requests=400, num_hot=5, hot_share=1.0, burst=100)))
    assert hot == [True] * 100 + [False] * 100 + [True] * 100 + [False] * 100


def test_a_drifting_hot_set_is_replaced_bit_by_bit() -> None:
    accesses = make_mix(Mix(num_requests=2000, num_hot=10, hot_share=1.0, renewed_every=50))
    early = {access.block_ids[0] for access in accesses[:50]}
    later = {access.block_ids[0] for access in accesses[100:150]}
    last = {access.block_ids[0] for access in accesses[-50:]}
    assert early & later
    assert not early & last
