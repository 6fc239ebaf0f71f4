"""Loads by lengths and from traces, and the sentences for what is neither."""

from pathlib import Path

import pytest

from quire.errors import ConfigurationError
from quire.planning.load import at_once, offered_rate, parse_lengths, read_load


def test_lengths_are_drawn_between_their_bounds_and_the_same_each_time() -> None:
    load = read_load("prompt=20-40,output=3-5,rate=10,requests=200,shared=8")
    assert load.requests == read_load(load.name).requests
    assert {len(each.prompt) for each in load.requests} == set(range(20, 41))
    assert {each.num_output_tokens for each in load.requests} == {3, 4, 5}
    assert len({tuple(each.prompt[:8]) for each in load.requests}) == 1
    assert len({tuple(each.prompt[:9]) for each in load.requests}) == 200
    rate = offered_rate(load.requests)
    assert rate is not None and 8 < rate < 12
    assert load.longest <= 45


def test_all_may_come_at_once() -> None:
    load = read_load("prompt=4,output=2,at_once")
    assert len(load.requests) == 100
    assert offered_rate(load.requests) is None
    paced = read_load("prompt=4,output=2,rate=3")
    assert {each.at_s for each in at_once(paced.requests)} == {0.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt=4", "load is 'prompt=4', but must be a file or prompt=N,output=N"),
        ("nothing.jsonl", "load has 'nothing.jsonl', but must be a file or prompt=N"),
        ("prompt=4,output=2,rate=3,at_once", "load is 'prompt=4,output=2,rate=3,at_once'"),
        ("prompt=4,output=2,rate=0", "load has rate='0', but must be a number of requests"),
        ("prompt=0,output=2,at_once", "load has prompt='0', but must be a whole number from 1"),
        ("prompt=9-4,output=2,at_once", "load has prompt=9-4, but a range begins with its least"),
        ("prompt=4,output=2,at_once,shared=4", "shared=4, but must be below the shortest"),
        ("prompt=4,output=2,at_once=3", "load has 'at_once=3'"),
        ("prompt=4,prompt=5,output=2,at_once", "load has 'prompt=5'"),
    ],
)
def test_invalid_loads_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_lengths(text)


def test_more_than_can_be_simulated_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at most 1000 tokens; give fewer requests"):
        read_load("prompt=100,output=2,at_once", most_tokens=1000)


def test_a_trace_is_read_up_to_what_can_be_simulated(tmp_path: Path) -> None:
    lines = [
        f'{{"timestamp": {1000 + 500 * number}, "input_length": 600, "output_length": 5,'
        f' "hash_ids": [7, {100 + number}]}}'
        for number in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    load = read_load(str(path), most_tokens=605 * 4)
    assert (len(load.requests), load.num_left_out) == (4, 2)
    assert [each.at_s for each in load.requests] == [0.0, 0.5, 1.0, 1.5]
    assert len({tuple(each.prompt[:512]) for each in load.requests}) == 1
    assert len({tuple(each.prompt) for each in load.requests}) == 4


def test_a_trace_without_an_answer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 6, "output_length": 0, "hash_ids": [1]}')
    with pytest.raises(ConfigurationError, match="has no request with a prompt and an answer"):
        read_load(str(path))
