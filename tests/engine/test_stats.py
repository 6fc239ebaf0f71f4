"""What an engine tells of itself: plain data for the wire, and a line a step for those who ask."""

import dataclasses
import logging
import time

import msgspec
import pytest
from tests.engine.test_engine import make_engine, request, run

from quire.engine.stats import StatsLog


def test_the_numbers_survive_the_wire() -> None:
    engine = make_engine(clock=time.monotonic)
    engine.add(request("a", n=2))
    run(engine)
    told = dataclasses.asdict(engine.stats())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == told
    assert told["num_generated_tokens"] == 24 and told["times"]["step_s"]["sum"] > 0


def test_each_step_is_one_line_at_debug_and_none_above(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    engine.add(request("a", length=10, max_tokens=4))
    with caplog.at_level(logging.INFO, "quire.engine.step"):
        engine.step()
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "quire.engine.step"):
        run(engine)
    lines = [record.message for record in caplog.records]
    assert [line.partition(",")[0] for line in lines] == [f"step {i}: 1 rows" for i in (1, 2, 3)]


def test_a_line_comes_after_ten_seconds_of_work_and_counts_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.125
        return now_s

    engine = make_engine(clock=clock)
    engine.stats_log = StatsLog()
    with caplog.at_level(logging.INFO, "quire.engine.stats"):
        for burst in range(6):  # ten minutes apart
            engine.add(request(f"r{burst}", length=10, max_tokens=4))
            run(engine)
            engine.add(request("gone", length=10, max_tokens=6))
            engine.abort("gone")
            now_s += 600
    worked_s = engine.utilization.worked_s
    assert 10 < worked_s < 20 and now_s > 3600
    (line,) = caplog.messages
    per_s = int(line.split(" tokens/s computed")[0])
    num_tokens = engine.times.num_computed_tokens
    assert per_s == pytest.approx(num_tokens / worked_s, abs=1)
