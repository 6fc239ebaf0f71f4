"""The load and the predictions of the benchmark of plans with a disk tier."""

from collections import Counter

from benchmarks.planning.disk import NUM_ROUNDS, QUESTION, _with_disk, draw_load, predicted
from tests.planning.costs import known_step_costs, small_shape

from quire.simulation.virtual_disk import DiskSpeeds
from quire.tiers.disk.load_rate import LoadSpeed


def test_each_prompt_comes_in_every_round_with_a_new_question() -> None:
    load = draw_load(5, 100, 1e-3)
    firsts = Counter(tuple(each.prompt[:100]) for each in load)
    assert list(firsts.values()) == [NUM_ROUNDS] * 5
    assert len({tuple(each.prompt[-QUESTION:]) for each in load}) == len(load)
    assert [each.at_s for each in load] == sorted(each.at_s for each in load)


def test_the_prediction_loads_what_the_pool_has_evicted() -> None:
    load, costs = draw_load(8, 400, 1e-3), known_step_costs()
    shape = small_shape(num_blocks=60, max_itl_ratio=0.0)
    speed = LoadSpeed(1e-3, 1e-9)
    without = predicted(shape, costs, (1.0, 1.0), load)
    found = predicted(_with_disk(shape, DiskSpeeds(speed, speed, 1e-9)), costs, (1.0, 1.0), load)
    assert without["loaded_tokens"] == 0 < 0.8 * 16 * 400 < found["loaded_tokens"]
    slower = predicted(shape, costs, (2.0, 2.0), load)
    assert slower["ttft_p50_s"] > 1.5 * without["ttft_p50_s"] > 3 * found["ttft_p50_s"]
