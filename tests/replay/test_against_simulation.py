"""A replay on the real scheduler and memory, with a clock that known costs move."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.costs import KnownCosts, small_shape
from tests.traces.trace_cases import traces

from quire.planning.load import LoadRequest
from quire.planning.step_costs import MeasuredBounds
from quire.planning.virtual_run import run_virtually
from quire.replay.against_simulation import replay_in_simulation
from quire.replay.figures import ReplayFigures
from quire.traces.tokens import PromptTokens
from quire.traces.trace import Trace, TraceOptions, TraceRequest

COSTS = KnownCosts()
CALL = TraceRequest(0.0, 100, 20, (0, 1, 2))


def replayed(*requests: TraceRequest, queue: int = 1000, **shape: object) -> ReplayFigures:
    trace = Trace(32, requests)
    return replay_in_simulation(trace, small_shape(**shape), COSTS, max_queued_requests=queue)


def test_it_is_the_planner_s_run_where_that_knows_the_load() -> None:
    requests = tuple(
        replace(CALL, at_s=number * 0.05, prefix_ids=(number // 3,)) for number in range(30)
    )
    trace, shape = Trace(32, requests), small_shape()
    figures = replay_in_simulation(trace, shape, COSTS, max_queued_requests=99)
    prompts = PromptTokens(trace, 1 << 31)
    load = [LoadRequest(each.at_s, prompts.prompt(n), 20) for n, each in enumerate(requests)]
    outcome = run_virtually(load, shape, COSTS)
    ttft_s = [each.first_s - each.at_s for each in figures.replies if each.first_s is not None]
    assert sorted(ttft_s) == pytest.approx(sorted(outcome.ttft_s))
    assert sum(each.num_cached_tokens for each in figures.replies) == outcome.hit_tokens > 600


def test_turns_follow_their_answers_and_find_them_in_the_cache() -> None:
    first = replace(
        CALL, num_prompt_tokens=50, num_output_tokens=60, prefix_ids=(0,), output_ids=(1, 2)
    )
    turn = TraceRequest(0.01, 130, 5, (0, 1, 2, 3), parent=0, think_s=4.0)
    one, two = replayed(first, turn).replies
    assert two.at_s == pytest.approx(one.end_s + 4.0)
    assert two.num_cached_tokens == 109  # all but the token that was sampled last
    open_loop = replay_in_simulation(
        Trace(32, (first, turn)), small_shape(), COSTS, max_queued_requests=9, is_closed=False
    )
    assert open_loop.replies[1].at_s == 0.01


def test_choices_share_their_prompt_and_clients_leave() -> None:
    several = replace(CALL, options=TraceOptions(num_choices=3))
    gone = replace(CALL, end="disconnect", options=TraceOptions(max_tokens=500))
    early = replace(gone, num_output_tokens=0, took_s=0.001)
    figures = replayed(several, gone, early)
    by_number = {each.number: each for each in figures.replies}
    assert by_number[0].num_output_tokens == 60
    assert 20 <= by_number[1].num_output_tokens <= 22
    assert by_number[2].num_output_tokens <= 1
    assert by_number[1].end_s < 1.0


def test_requests_beyond_queue_and_pool_are_refused() -> None:
    figures = replayed(*[CALL] * 5, queue=2)
    assert figures.data()["refused"] == {"429 overloaded": 3}
    figures = replayed(replace(CALL, num_prompt_tokens=1500, prefix_ids=()), num_blocks=60)
    assert figures.data()["refused"] == {"422 request_never_fits": 1}


def test_differences_from_the_recording_are_reported() -> None:
    odd = replace(CALL, options=TraceOptions(beam_width=2, has_grammar=True, adapter=1))
    figures = replay_in_simulation(
        Trace(32, (odd,)),
        small_shape(),
        COSTS,
        bounds=MeasuredBounds(1, 10, 50, 1000),
        max_queued_requests=9,
    )
    assert [note.split(",")[0] for note in figures.notes] == [
        "1 requests had a grammar",
        "1 requests named an adapter",
        "1 requests used beam search",
        "the times are unreliable; steps exceeded the measured ones: 2 rows in a step"
        " (measured: 1)",
    ]
    assert figures.replies[0].num_output_tokens == 40


@settings(max_examples=15)
@given(traces(), st.booleans(), st.integers(1, 40))
def test_every_request_is_answered_or_refused(trace: Trace, overlap: bool, queue: int) -> None:
    shape = small_shape(num_blocks=40, block_size=8, overlap=overlap)
    figures = replay_in_simulation(trace, shape, COSTS, max_queued_requests=queue)
    assert len(figures.replies) + sum(figures.left_out.values()) == len(trace.requests)
    for reply in figures.replies:
        asked = trace.requests[reply.number]
        if asked.end != "disconnect" and reply.refused is None:
            assert reply.num_output_tokens == max(1, asked.num_output_tokens)
