"""Tests of what `quire top` knows of a server after its events."""

import pytest
from tests.cli.top.watching import CACHED, FREE, blocks, changed_blocks, engine, event, held, step

from quire.cli.top.watched import WatchedServer, quantile


def test_changes_of_blocks_are_applied_to_the_records() -> None:
    server = WatchedServer()
    server.take(event(engine(blocks=blocks([FREE, FREE, CACHED], {}))))
    server.take(event(engine(blocks=changed_blocks(3, {1: held(300), 2: FREE}, {300: "b"}))))
    found = server.engines[""].blocks
    assert bytes(found.records) == FREE + held(300) + FREE
    assert found.owners == {300: "b"}


def test_parts_that_an_event_lacks_stay_as_they_were() -> None:
    server = WatchedServer()
    server.take(event(engine(requests=[{"request_id": "a"}], facts={"max_num_seqs": 4})))
    server.take(event(engine()))
    assert server.engines[""].requests == [{"request_id": "a"}]
    assert server.engines[""].facts == {"max_num_seqs": 4}


def test_steps_are_remembered_for_a_window() -> None:
    server = WatchedServer()
    server.take(event(engine(100.0, events=[step(99.0), {"event": "end"}, step(100.0)])))
    server.take(event(engine(110.0, events=[step(109.0)])))
    assert [each["ended_s"] for each in server.engines[""].recent_steps(10.0)] == [109.0, 100.0]


def test_an_engine_whose_clock_began_anew_has_no_old_steps() -> None:
    server = WatchedServer()
    server.take(event(engine(100.0, events=[step(99.0)])))
    server.take(event(engine(1.0, events=[step(0.5)])))
    assert [each["ended_s"] for each in server.engines[""].steps] == [0.5]


def test_steps_that_a_new_connection_repeats_count_once() -> None:
    server = WatchedServer()
    server.take(event(engine(100.0, events=[step(98.0), step(99.0)])))
    server.take(event(engine(101.0, events=[step(98.0), step(99.0), step(100.5)])))
    assert [each["ended_s"] for each in server.engines[""].steps] == [98.0, 99.0, 100.5]


def test_a_removed_replica_is_forgotten() -> None:
    server = WatchedServer()
    server.take(event(engine(name="a"), engine(name="b")))
    server.take(event(engine(name="b")))
    assert list(server.engines) == ["b"]


def test_percentiles_are_those_of_the_values_since_the_first_event() -> None:
    server = WatchedServer()
    assert server.percentile("time_to_first_token_s", 0.5) is None
    server.take(event(engine(), first_token=(10, 0, 0, 0)))
    assert server.percentile("time_to_first_token_s", 0.5) == pytest.approx(0.005)
    server.take(event(engine(), first_token=(10, 0, 10, 0)))
    assert server.percentile("time_to_first_token_s", 0.5) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [((0, 0, 0), 0.5, None), ((4, 0, 0), 0.5, 0.5), ((1, 1, 0), 1.0, 2.0), ((0, 0, 2), 0.5, 2.0)],
)
def test_quantile_interpolates_within_a_bucket(
    counts: tuple[int, ...], share: float, expected: float | None
) -> None:
    assert quantile((1.0, 2.0), counts, share) == expected
