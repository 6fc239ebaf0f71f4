"""Costs that are known, and steps that took what they say."""

import random

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.planning.measuring import MeasuredStep
from quire.planning.step_costs import StepCosts, fit_costs
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import EngineShape

FULL = (KVGroup((0, 1), KVKind.FULL, 1024),)


def true_s(work: PlannedWork) -> float:
    """5 ms a step, 0.1 ms a token, 0.4 us for each token attended to, and so on."""
    load = work.load
    seconds = 5e-3 + 1e-4 * (load.num_decodes + load.num_chunk_tokens)
    seconds += 4e-7 * (load.num_decode_pairs + load.num_chunk_pairs)
    seconds += 1e-3 * bool(work.sampled) + 5e-4 * bool(work.num_admissions)
    seconds += 2e-4 * work.num_admissions + 1e-6 * work.num_admitted_tokens
    return seconds + 1e-4 * work.num_ended


class KnownCosts:
    """`virtual_run.Costs` of `true_s`."""

    def predict_s(self, work: PlannedWork) -> float:
        return true_s(work)

    def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
        return 1.0

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        return 1e-4 * num_ended

    def pacing_model(self) -> StepCostModel:
        loads = [StepLoad(size, 30 * size, 2 * size, size * size) for size in (1, 4, 16, 64, 256)]
        return StepCostModel.fit(
            [StepSample(load, true_s(PlannedWork(load, 9, (0,)))) for load in loads]
        )


def draw_work(rng: random.Random) -> PlannedWork:
    """Any step, up to 64 rows, 1,000 tokens of prompts and contexts of 2,000."""
    num_rows = rng.randint(0, 64)
    context = rng.randint(1, 2000)
    load = StepLoad(num_rows, num_rows * context)
    if rng.random() < 0.6 or not num_rows:
        load = load.with_chunk(rng.randint(0, 1000), rng.randint(1, 1000))
    num_admissions = rng.choice((0, 0, 1, 4))
    return PlannedWork(
        load,
        context,
        tuple(range(num_rows)),
        num_admissions=num_admissions,
        num_admitted_tokens=num_admissions * rng.randint(1, 900),
        num_ended=rng.choice((0, 0, 2)),
        num_read=num_rows * context,
    )


def draw_steps(
    num_runs: int = 40, noise: float = 0.02, outliers: float = 0.0
) -> list[MeasuredStep]:
    """Measured, with relative noise; some take ten times as long."""
    rng = random.Random(3)

    def taken(work: PlannedWork) -> float:
        factor = 10.0 if rng.random() < outliers else 1.0
        return factor * true_s(work) * (1 + noise * rng.uniform(-1, 1))

    works = [(run, draw_work(rng)) for run in range(num_runs) for _ in range(12)]
    return [MeasuredStep(run, work, (taken(work), taken(work))) for run, work in works]


def known_step_costs() -> StepCosts:
    """Fitted to `true_s`."""
    return fit_costs(draw_steps(noise=0.0))


def small_shape(**changes: object) -> EngineShape:
    values: dict[str, object] = {
        "groups": FULL,
        "num_blocks": 400,
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }
    return EngineShape(**{**values, **changes})  # type: ignore[arg-type]
