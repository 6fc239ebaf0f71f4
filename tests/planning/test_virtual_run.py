"""Loads on the real scheduler and a virtual clock."""

from dataclasses import replace
from statistics import fmean

import pytest
from tests.planning.costs import KnownCosts, small_shape

from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.planning.load import LoadRequest, at_once, read_load
from quire.planning.objectives import quantile
from quire.planning.virtual_run import RunOutcome, learned_pacer, run_virtually
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_disk import DiskShape, DiskSpeeds
from quire.tiers.disk.load_rate import LoadSpeed

COSTS = KnownCosts()


def run(text: str, **changes: object) -> RunOutcome:
    return run_virtually(read_load(text).requests, small_shape(**changes), COSTS)


def test_one_request_takes_what_its_steps_take() -> None:
    outcome = run("prompt=100,output=3,requests=1,at_once")
    prefill_s = 5e-3 + 100e-4 + 4e-7 * 5050 + 1e-3 + 5e-4 + 2e-4 + 100e-6
    decodes_s = [5e-3 + 1e-4 + 4e-7 * pairs + 1e-3 for pairs in (101, 102)]
    decodes_s[-1] += 1e-4  # it ends
    assert outcome.ttft_s == pytest.approx([prefill_s])
    assert outcome.itl_s == pytest.approx(decodes_s)
    assert outcome.duration_s == pytest.approx(prefill_s + sum(decodes_s))
    assert (outcome.num_steps, outcome.num_output_tokens, outcome.longest) == (3, 3, 102)
    assert outcome.busy_s == pytest.approx(outcome.duration_s)


def test_equal_runs_are_equal_and_all_tokens_come() -> None:
    text = "prompt=20-300,output=1-40,rate=9,requests=60"
    first, second = run(text, max_itl_ratio=2.8), run(text, max_itl_ratio=2.8)
    assert (first.ttft_s, first.itl_s) == (second.ttft_s, second.itl_s)
    load = read_load(text)
    assert first.num_output_tokens == sum(each.num_output_tokens for each in load.requests)
    assert len(first.ttft_s) == 60
    assert len(first.itl_s) == first.num_output_tokens - 60


def test_several_answers_share_a_prompt() -> None:
    load = [LoadRequest(float(number), range(100), 20, num_choices=3) for number in range(4)]
    outcome = run_virtually(load, small_shape(), COSTS)
    assert len(outcome.ttft_s) == 4
    assert outcome.num_output_tokens == 4 * 3 * 20
    assert len(outcome.itl_s) == 4 * 3 * 19
    assert outcome.most_decodes == 3
    alone = run_virtually([replace(each, num_choices=1) for each in load], small_shape(), COSTS)
    assert outcome.ttft_s[0] == pytest.approx(alone.ttft_s[0], rel=0.03)


def test_beams_fork_and_their_tokens_come_at_the_end() -> None:
    load = [LoadRequest(float(number), range(100), 20, beam_width=3) for number in range(4)]
    outcome = run_virtually(load, small_shape(), COSTS)
    assert (outcome.num_output_tokens, outcome.itl_s) == (4 * 3 * 20, [])
    assert outcome.most_decodes == 3
    sampled = [replace(each, beam_width=0, num_choices=3) for each in load]
    assert min(outcome.ttft_s) > 5 * max(run_virtually(sampled, small_shape(), COSTS).ttft_s)


def test_grammars_and_adapters_are_simulated() -> None:
    load = [
        LoadRequest(0.0, range(100), 20, adapter=str(number), has_grammar=True)
        for number in range(3)
    ]
    alone = run_virtually(load, small_shape(max_loras=1), COSTS)
    together = run_virtually(load, small_shape(max_loras=3), COSTS)
    assert (alone.most_rows, together.most_rows) == (1, 3)
    assert alone.hit_tokens == 0
    base = run_virtually([replace(each, adapter="") for each in load], small_shape(), COSTS)
    assert base.hit_tokens > 150 and base.num_output_tokens == 60


def test_a_pace_shortens_intervals() -> None:
    text = "prompt=400,output=40,rate=6,requests=60"
    paced, full = run(text, max_itl_ratio=2.8), run(text)
    assert quantile(paced.itl_s, 0.97) < 0.7 * quantile(full.itl_s, 0.97)


def test_steps_take_more_and_less_as_they_did() -> None:
    class Uneven(KnownCosts):
        def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
            return (0.5, 1.0, 1.5)[int(3 * place)]

    load = read_load("prompt=50,output=80,at_once,requests=20").requests
    even = run_virtually(load, small_shape(), COSTS)
    uneven = run_virtually(load, small_shape(), Uneven())
    assert uneven.duration_s == pytest.approx(even.duration_s, rel=0.02)
    assert min(uneven.ttft_s) == pytest.approx(min(even.ttft_s))  # the first step is as usual
    assert quantile(uneven.itl_s, 0.9) > 1.4 * quantile(even.itl_s, 0.9)


@pytest.mark.parametrize("output", [21, 34, 89])
def test_rare_steps_are_as_even_as_frequent_ones(output: int) -> None:
    """Those with prompts come at regular intervals here, one row at a time."""
    places: list[float] = []

    class Watching(KnownCosts):
        def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
            if work.load.num_chunk_tokens:
                places.append(place)
            return 1.0

    load = read_load(f"prompt=50,output={output},at_once,requests=40").requests
    run_virtually(load, small_shape(max_num_seqs=1), Watching())
    assert len(places) == 40
    for part in (places[:20], places[20:]):
        assert 0.45 < fmean(part) < 0.55 and min(part) < 0.1 and max(part) > 0.9


def test_a_pacer_has_learned_what_steps_take() -> None:
    """It begins with a model by which prompts take a fifth of what they do."""

    class Mistaken(KnownCosts):
        def pacing_model(self) -> StepCostModel:
            loads = [
                StepLoad(rows, 30 * rows, tokens) for rows in (1, 8) for tokens in (0, 50, 500)
            ]
            return StepCostModel.fit(
                [StepSample(load, 6e-3 + 2e-5 * load.num_chunk_tokens) for load in loads]
            )

    load, shape = read_load("prompt=400,output=40,rate=6,requests=60").requests, small_shape()
    shape, costs = replace(shape, max_itl_ratio=2.8), Mistaken()
    fresh = StepPacer(PacingConfig(2.8), costs.pacing_model(), num_late_rows=0.0)
    begins, goes_on = run_virtually(load, shape, costs, fresh), run_virtually(load, shape, costs)
    # Those that are late on purpose take longer.
    late, fewer = (sum(0.02 < gap < 0.09 for gap in run.itl_s) for run in (begins, goes_on))
    assert late > 20 and 10 * fewer <= late, (fewer, late)
    pacer = learned_pacer(load, shape, costs)
    assert pacer is not None and pacer.model.predict_s(StepLoad(4, 400, 500)) > 0.02


def test_more_rows_serve_more_and_one_at_a_time_waits() -> None:
    text = "prompt=50,output=40,at_once,requests=40"
    few, many = run(text, max_num_seqs=1), run(text, max_num_seqs=8)
    assert many.requests_per_s > 2 * few.requests_per_s
    assert (few.most_rows, many.most_rows) == (1, 8)


def test_shared_prefixes_are_found_and_too_little_memory_preempts() -> None:
    text = "prompt=300,output=100,at_once,requests=20,shared=200"
    assert run(text).hit_tokens > 15 * 190
    assert run(text, enable_prefix_caching=False).hit_tokens == 0
    tight = run("prompt=300,output=200,at_once,requests=20", num_blocks=80)
    assert (tight.most_rows, len(tight.ttft_s)) == (2, 20)


def test_requests_that_never_fit_are_refused() -> None:
    load = [LoadRequest(0.0, [1] * 3000, 5), LoadRequest(0.0, [1] * 1500, 5)]
    outcome = run_virtually(load, small_shape(num_blocks=60), COSTS)
    assert (outcome.num_refused, outcome.ttft_s, outcome.requests_per_s) == (2, [], 0.0)


def test_with_overlap_a_step_is_planned_while_one_runs() -> None:
    load = at_once(read_load("prompt=64,output=30,at_once,requests=16").requests)
    alone = run_virtually(load, small_shape(), COSTS)
    overlapped = run_virtually(load, small_shape(overlap=True), COSTS)
    assert overlapped.num_output_tokens == alone.num_output_tokens
    assert overlapped.duration_s == pytest.approx(alone.duration_s, rel=0.2)


def test_idle_time_passes_until_the_next_arrival() -> None:
    load = [LoadRequest(0.0, [1] * 40, 2), LoadRequest(9.0, [2] * 40, 2)]
    outcome = run_virtually(load, small_shape(), COSTS)
    assert outcome.duration_s > 9
    assert outcome.ttft_s[1] == pytest.approx(outcome.ttft_s[0])
    assert outcome.busy_s < 0.1


def test_prompts_that_were_evicted_come_back_from_the_disk() -> None:
    """Eight prompts of 400 tokens come three times, and the pool holds two of them."""
    load = [
        LoadRequest(float(number), range(1000 * (number % 8), 1000 * (number % 8) + 400), 4)
        for number in range(24)
    ]
    speed = LoadSpeed(1e-3, 1e-9)
    disk = DiskShape(speeds=DiskSpeeds(speed, speed, 1e-9), num_bytes=64 << 20)
    without = run_virtually(load, small_shape(num_blocks=60), COSTS)
    outcome = run_virtually(load, small_shape(num_blocks=60, disk=disk), COSTS)
    assert (without.hit_tokens, without.loaded_tokens) == (0, 0)
    assert outcome.hit_tokens >= outcome.loaded_tokens > 0.9 * 16 * 384
    assert fmean(outcome.ttft_s[8:]) < 0.5 * fmean(without.ttft_s[8:])
    slow = LoadSpeed(1e-3, 1e-3)
    slow_disk = replace(disk, speeds=DiskSpeeds(slow, slow, 1e-9))
    computed = run_virtually(load, small_shape(num_blocks=60, disk=slow_disk), COSTS)
    assert computed.loaded_tokens == 0 and computed.ttft_s == without.ttft_s
