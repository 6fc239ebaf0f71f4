"""What a request's time was spent on, by the engine's own clock."""

from dataclasses import dataclass

import pytest
from tests.engine.test_engine import MODEL, make_engine, request, run

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import MissReason, PrefixMiss, Sequence
from quire.engine.request_times import RequestTimes
from quire.observability.histogram import DURATION_BOUNDS_S, Histogram
from quire.simulation.fakes.fake_runner import Faults


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def sequence(name: str, branch_index: int = 0, *, beam_width: int = 0) -> Sequence:
    params = DecodingParams(max_tokens=10, beam_width=beam_width)
    ended = Sequence(name, [1, 2, 3], params, branch_index=branch_index)
    ended.arrival_s, ended.first_scheduled_s = 100.0, 100.5
    return ended


def output(name: str, branch: int = 0, num_tokens: int = 1, *, ends: bool = False):
    reason = FinishReason.LENGTH if ends else None
    return SequenceOutput(name, branch, [7] * num_tokens, finish_reason=reason)


def on_outputs(
    times: RequestTimes,
    outputs: list[SequenceOutput],
    known: dict[str, list[Sequence]],
    now_s: float,
) -> int:
    """Record outputs any of which may begin or end a branch."""
    return times.on_outputs(outputs, range(len(outputs)), known, now_s)


def only(histogram: Histogram) -> float:
    """The one value that it holds."""
    assert sum(histogram.counts) == 1
    return histogram.total


def test_a_request_s_time_falls_into_three_parts() -> None:
    times, known = RequestTimes(), {"a": [sequence("a")]}
    on_outputs(times, [output("a")], known, 102.0)
    on_outputs(times, [output("a")], known, 102.1)
    on_outputs(times, [output("a", ends=True)], known, 105.0)
    assert only(times.queue_s) == pytest.approx(0.5)
    assert only(times.prefill_s) == pytest.approx(1.5)
    assert only(times.decode_s) == pytest.approx(3.0)
    assert times.num_generated_tokens == 3


def test_the_outputs_that_begin_and_end_a_request_tell_its_times() -> None:
    times, known = RequestTimes(), {"a": [sequence("a")]}
    begins, goes_on, ends = [output("a")], [output("a")], [output("a", ends=True)]
    for outputs, now_s in ((begins, 102.0), (goes_on, 102.1), (ends, 105.0)):
        on_outputs(times, outputs, known, now_s)
    assert begins[0].phases == pytest.approx((0.5, 1.5, 0.0))
    assert goes_on[0].phases is None
    assert ends[0].phases == pytest.approx((0.5, 1.5, 3.0))


def test_a_beam_s_outputs_tell_no_times() -> None:
    times, known = RequestTimes(), {"a": [sequence("a", beam_width=2)]}
    outputs = [output("a", ends=True)]
    on_outputs(times, outputs, known, 102.0)
    assert outputs[0].phases is None


def test_branches_wait_and_compute_their_prompt_once_and_decode_each() -> None:
    times, known = RequestTimes(), {"a": [sequence("a", branch) for branch in range(3)]}
    on_outputs(times, [output("a", branch) for branch in range(3)], known, 101.0)
    on_outputs(times, [output("a", 0, ends=True), output("a", 1)], known, 102.0)
    on_outputs(times, [output("a", 1, ends=True)], known, 103.0)
    assert sum(times.queue_s.counts) == sum(times.prefill_s.counts) == 1
    assert sum(times.decode_s.counts) == 2 and times.decode_s.total == pytest.approx(3.0)


def test_a_single_token_is_not_decoded() -> None:
    times = RequestTimes()
    on_outputs(times, [output("a", ends=True)], {"a": [sequence("a")]}, 101.0)
    assert sum(times.prefill_s.counts) == 1 and sum(times.decode_s.counts) == 0


def test_a_beam_search_counts_in_the_queue_only() -> None:
    times, known = RequestTimes(), {"a": [sequence("a", beam_width=2)]}
    outputs = [output("a", branch, 5, ends=True) for branch in range(2)]
    on_outputs(times, outputs, known, 101.0)
    assert only(times.queue_s) == pytest.approx(0.5)
    assert sum(times.prefill_s.counts) == sum(times.decode_s.counts) == 0
    assert times.num_generated_tokens == 10


def test_an_output_without_a_token_is_no_first_token() -> None:
    times = RequestTimes()
    failed = SequenceOutput("a", 0, (), finish_reason=FinishReason.ERROR, error="no")
    on_outputs(times, [failed], {"a": [sequence("a")]}, 101.0)
    assert sum(times.queue_s.counts) == 0 and times.num_generated_tokens == 0


def test_why_the_cache_had_no_more_is_counted_once_a_request() -> None:
    ended = sequence("a")
    ended.miss = PrefixMiss(MissReason.EVICTED, 2)
    times = RequestTimes()
    for _ in range(3):
        on_outputs(times, [output("a")], {"a": [ended, sequence("a", 1)]}, 101.0)
    assert times.prefix_misses == {"evicted": 1}


def test_prefixes_of_another_domain_count_as_never_seen() -> None:
    times = RequestTimes()
    for name, reason in (("a", MissReason.OTHER_DOMAIN), ("b", MissReason.NEVER_SEEN)):
        ended = sequence(name)
        ended.miss = PrefixMiss(reason, 0)
        on_outputs(times, [output(name)], {name: [ended]}, 101.0)
    assert times.prefix_misses == {"never_seen": 2}


def test_a_forgotten_request_s_id_may_be_used_again() -> None:
    times, known = RequestTimes(), {"a": [sequence("a")]}
    for _ in range(2):
        on_outputs(times, [output("a")], known, 101.0)
        on_outputs(times, [output("a", ends=True)], known, 102.0)
        times.forget("a")
    times.forget("never seen")
    assert sum(times.queue_s.counts) == sum(times.decode_s.counts) == 2
    assert times.decode_s.total == pytest.approx(2.0)


def test_steps_are_counted_with_their_tokens() -> None:
    times = RequestTimes()
    times.on_step(0.25, 17)
    times.on_step(0.25, 3)
    assert times.num_computed_tokens == 20 and times.step_s.total == 0.5


def test_the_histograms_are_told_by_name_as_plain_data() -> None:
    told = RequestTimes().as_dict()
    assert set(told) == {"queue_s", "prefill_s", "decode_s", "step_s"}
    for each in told.values():
        assert each["bounds"] == list(DURATION_BOUNDS_S)
        assert len(each["counts"]) == len(each["bounds"]) + 1


def test_an_engine_tells_how_long_its_requests_took() -> None:
    """Ten seconds in the queue; then each step is a second later than the one before."""
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.add(request("a", length=10, max_tokens=5, n=2))
    engine.add(request("b", length=4, max_tokens=1, start=500))
    clock.now_s += 10
    while engine.has_work():
        engine.step()
        clock.now_s += 1
    stats = engine.stats()
    times = stats.times
    assert sum(times["queue_s"]["counts"]) == 2 and times["queue_s"]["sum"] == pytest.approx(20)
    assert sum(times["prefill_s"]["counts"]) == 2
    assert sum(times["decode_s"]["counts"]) == 2 and times["decode_s"]["sum"] == pytest.approx(8)
    assert sum(times["step_s"]["counts"]) == stats.num_steps > 0
    assert stats.num_generated_tokens == 11
    assert stats.num_computed_tokens >= 10 + 4 + 2 * 4
    assert sum(stats.prefix_misses.values()) == 2


def test_times_are_dropped_when_their_requests_end() -> None:
    engine = make_engine()
    for name in ("a", "b", "c"):
        engine.add(request(name))
    engine.step()
    engine.abort("b")
    run(engine)
    assert engine.times._first_tokens == {}
    assert engine.stats().times["queue_s"]["sum"] == 0.0


def test_failed_steps_count_no_time_and_lose_no_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(faults=Faults(execute_fails_at=frozenset({2})))
    engine.add(Request("a", [1, 2, 3], DecodingParams(max_tokens=6)))
    run(engine)
    stats = engine.stats()
    assert stats.num_failed_steps == 1
    assert sum(stats.times["step_s"]["counts"]) == stats.num_steps
    assert sum(stats.times["decode_s"]["counts"]) == 1
    expected = MODEL.expected_output(Request("a", [1, 2, 3], DecodingParams(max_tokens=6)), 0, 100)
    assert stats.num_generated_tokens == len(expected.token_ids)
