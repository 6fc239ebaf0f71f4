"""What an engine tells of itself: plain data for the wire, and a line a step for those who ask."""

import dataclasses
import logging
import time

import msgspec
import pytest
from tests.engine.test_engine import MODEL, make_engine, request, run, tokens

from quire.core.scheduling.drafts import Drafting
from quire.engine.stats import StatsLog
from quire.simulation.fakes.fake_speculator import FakeSpeculator


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


def test_the_line_tells_of_drafts_if_there_were_any(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    log, drafts = StatsLog(), {"ngram": {"verified": [4, 4, 2], "accepted": [3, 1]}}

    def observe(worked_s: float) -> None:
        counts = {"by_proposer": drafts, "saved_s": 0.0}
        stats = dataclasses.replace(engine.stats(), drafts=counts)
        log.observe(1, 1, lambda: stats, worked_s)

    with caplog.at_level(logging.INFO, "quire.engine.stats"):
        observe(10.0)
        observe(20.0)  # no draft since
        drafts = {"ngram": {"verified": [4, 4, 2], "accepted": [3, 1]}}
        drafts["history"] = {"verified": [2, 2], "accepted": [2, 2]}
        observe(30.0)
    first, second, third = caplog.messages
    assert first.endswith(", 40% of drafts accepted, 2.0 tokens a step")
    assert "drafts" not in second
    assert third.endswith(", 100% of drafts accepted, 3.0 tokens a step")


@pytest.mark.parametrize("error_rate", [0.0, 0.5, 1.0])
def test_rejected_drafts_do_not_count_as_computed(error_rate: float) -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    proposer = FakeSpeculator(MODEL, most=5, error_rate=error_rate, seed=1)
    slots = scheduler._slots
    scheduler.drafting = Drafting(proposer, scheduler.memory, scheduler.running_set, slots, 5)
    engine.add(request("a", 10, 60))
    engine.add(request("b", 10, 60, start=100))
    outputs = run(engine)
    stats = engine.stats()
    assert stats.num_generated_tokens == sum(len(tokens(found)) for found in outputs.values())
    # All tokens of a sequence but its last are computed.
    assert stats.num_computed_tokens == 2 * (10 - 1) + stats.num_generated_tokens
    assert stats.num_drafts > 0
    accepted = stats.num_accepted_drafts / stats.num_drafts
    assert accepted == 1 - error_rate if error_rate in (0.0, 1.0) else 0 < accepted < 0.6
