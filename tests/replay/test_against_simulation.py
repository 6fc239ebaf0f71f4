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
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_disk import DiskShape, DiskSpeeds
from quire.simulation.virtual_engine import FIRST_NEW_TOKEN
from quire.tiers.disk.load_rate import LoadSpeed
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
    prompts = PromptTokens(trace, FIRST_NEW_TOKEN)
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
    beams = replace(CALL, options=TraceOptions(beam_width=2, has_grammar=True, adapter=1))
    grammar = replace(CALL, options=TraceOptions(has_grammar=True))
    figures = replay_in_simulation(
        Trace(32, (beams, grammar)),
        small_shape(),
        COSTS,
        bounds=MeasuredBounds(1, 10, 50, 1000),
        max_queued_requests=9,
    )
    assert [note.split(",")[0].split(";")[0] for note in figures.notes] == [
        "1 requests named an adapter",
        "1 requests used beam search",
        "1 requests had a grammar",
        "the times are unreliable",
    ]
    assert {reply.number: reply.num_output_tokens for reply in figures.replies} == {0: 40, 1: 20}


def test_beams_answer_at_their_end_and_cost_rows() -> None:
    beams, sampled = (
        replayed(replace(CALL, options=TraceOptions(**options))).replies[0]
        for options in ({"beam_width": 4}, {"num_choices": 4})
    )
    assert beams.num_output_tokens == sampled.num_output_tokens == 80
    assert beams.first_s == beams.end_s and not beams.gaps_s
    assert beams.end_s == pytest.approx(sampled.end_s, rel=0.3)


def test_adapters_have_slots_and_prefixes_of_their_own() -> None:
    calls = [replace(CALL, at_s=number, options=TraceOptions(adapter=number)) for number in (1, 2)]
    again = replace(calls[1], at_s=3.0)
    with_slots, without = (replayed(*calls, again, max_loras=slots) for slots in (1, 0))
    assert [reply.num_cached_tokens for reply in with_slots.replies] == [0, 0, 96]
    assert [reply.num_cached_tokens for reply in without.replies] == [0, 96, 96]
    # Two adapters take turns in one slot, so that their requests can't run together.
    together = [replace(call, at_s=0.0) for call in calls]
    turns, beside = (replayed(*together, max_loras=slots).replies for slots in (1, 2))
    assert turns[1].first_s == pytest.approx(turns[0].end_s, abs=0.1)
    assert beside[1].first_s is not None and beside[1].first_s < beside[0].end_s


def test_one_step_computes_a_whole_content_if_the_model_does() -> None:
    """And an equal content is found in the prefix cache."""
    call = replace(CALL, num_prompt_tokens=200, prefix_ids=(0, 1, 2, 3, 4), contents=((10, 150),))
    chunks: dict[bool, list[int]] = {}

    class Noting(KnownCosts):
        def predict_s(self, work: PlannedWork) -> float:
            if work.load.num_chunk_tokens:
                seen.append(work.load.num_chunk_tokens)
            return super().predict_s(work)

    for is_whole in (False, True):
        seen = chunks[is_whole] = []
        shape = small_shape(max_num_batched_tokens=64, reads_contents_whole=is_whole)
        trace = Trace(32, (call, replace(call, at_s=9.0)))
        figures = replay_in_simulation(trace, shape, Noting(), max_queued_requests=9)
        assert [reply.num_cached_tokens for reply in figures.replies] == [0, 160]
    assert chunks[False] == [64, 64, 64, 8, 40]
    assert chunks[True] == [10, 150, 40, 40]


def test_a_grammar_waits_for_its_last_token() -> None:
    """So its steps can't be planned while the one before runs, and take every other turn."""
    ends_s = {}
    for has_grammar in (False, True):
        call = replace(CALL, options=TraceOptions(has_grammar=has_grammar))
        replies = replayed(call, CALL, overlap=True).replies
        assert [reply.num_output_tokens for reply in replies] == [20, 20]
        ends_s[has_grammar] = {reply.number: reply.end_s for reply in replies}
    assert ends_s[True][0] > 1.3 * ends_s[False][0]


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


def test_a_disk_tier_keeps_prompts_and_its_loads_are_reported() -> None:
    speed = LoadSpeed(1e-3, 1e-9)
    disk = DiskShape(speeds=DiskSpeeds(speed, speed, 1e-9), num_bytes=64 << 20)
    requests = [
        replace(CALL, at_s=float(number), prefix_ids=(10 + number % 6,)) for number in range(12)
    ]
    figures = replayed(*requests, num_blocks=12, disk=disk)
    num_cached = [each.num_cached_tokens for each in figures.replies]
    assert num_cached == [0] * 6 + [32] * 6
    (note,) = figures.notes
    assert note == "192 prompt tokens were loaded from the disk tier, which began empty"
