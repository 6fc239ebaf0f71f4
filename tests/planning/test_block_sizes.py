"""Block sizes under a load: what each comes to, and which is chosen."""

from itertools import count

import pytest
from tests.planning.costs import known_step_costs, small_shape

from quire.assembly.reports.attention_speed import AttentionSpeed, measure_attention
from quire.assembly.reports.memory_fit import choose_model
from quire.core.scheduling.cost_model import StepLoad
from quire.errors import InsufficientMemoryError
from quire.options.engine_options import EngineOptions
from quire.planning import block_sizes
from quire.planning.block_sizes import SIZES, SizeOutcome, choose_size, host_block_s, try_sizes
from quire.planning.load import read_load
from quire.planning.step_costs import BlockFactors
from quire.planning.virtual_run import RunOutcome
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import EngineShape

SLOTS = 6400


def rated(size: int, rate: float) -> SizeOutcome:
    return SizeOutcome(size, RunOutcome(ttft_s=[1.0] * 100, duration_s=100 / rate))


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({8: 1.0, 16: 1.0, 32: 1.0}, 16),
        ({8: 1.0, 16: 1.005, 64: 1.009}, 16),
        ({8: 1.0, 16: 1.0, 64: 1.1}, 64),
        ({8: 2.0, 16: 1.0, 32: 1.99}, 8),
        ({8: 2.0, 16: 1.0, 32: 2.0}, 8),
    ],
)
def test_the_highest_rate_wins_and_equal_ones_are_near_the_default(
    rates: dict[int, float], chosen: int
) -> None:
    assert choose_size([rated(size, rate) for size, rate in rates.items()]) == chosen


def test_a_size_that_refuses_requests_is_not_faster() -> None:
    fast = rated(2048, 9.0)
    assert fast.outcome is not None
    fast.outcome.num_refused = 1
    unable = SizeOutcome(1024, None, None, "too large")
    assert choose_size([rated(8, 1.0), rated(32, 2.0), fast, unable]) == 32


def tried(text: str, monkeypatch: pytest.MonkeyPatch, slow: int = 0) -> dict[int, SizeOutcome]:
    """slow: a size whose attention takes ten times as long."""

    def speeds(options: object, kind: object, sizes: list[int]) -> dict[int, AttentionSpeed]:
        return {size: AttentionSpeed(*(2 * [10.0 if size == slow else 1.0])) for size in sizes}

    def shape(options: EngineOptions) -> EngineShape:
        size = options.block_size
        if size == 2048:
            raise InsufficientMemoryError("too large")
        return small_shape(block_size=size, num_blocks=SLOTS // size)

    monkeypatch.setattr(block_sizes, "measure_attention", speeds)
    monkeypatch.setattr(block_sizes, "host_block_s", lambda: 1e-6)
    options = EngineOptions.from_mapping({"skip_tokenizer_init": True})
    kind = choose_model(options)
    found = try_sizes(options, kind, known_step_costs(), shape, read_load(text).requests)
    assert [each.block_size for each in found] == list(SIZES)
    assert found[-1].obstacle == "too large"
    return {each.block_size: each for each in found}


def test_prompts_that_are_alike_need_blocks_that_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried("prompt=210,output=4,at_once,requests=40,shared=200", monkeypatch)
    hits = {size: each.outcome.hit_tokens for size, each in found.items() if each.outcome}
    assert hits[16] > 0.8 * 40 * 190
    assert hits[1024] < hits[16]
    assert found[16].rate > 1.2 * found[1024].rate


def test_a_size_that_the_kernels_are_slow_at_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried("prompt=1000,output=40,at_once,requests=20", monkeypatch, slow=16)
    assert choose_size(list(found.values())) != 16
    factors = found[8].factors
    assert factors is not None and factors.decode == pytest.approx(0.1)


def test_factors_change_attention_and_blocks_alone() -> None:
    costs = known_step_costs()
    changed = costs.with_blocks(BlockFactors(2.0, 3.0, 1e-4, 16))
    plain = PlannedWork(StepLoad(16, 16 * 1000), 1000, (), num_new_blocks=1)
    attention_s = 16_000 * 4e-7
    more_s = changed.predict_s(plain) - costs.predict_s(plain)
    assert more_s == pytest.approx(attention_s, rel=0.05)
    many = plain._replace(num_new_blocks=11)
    assert changed.predict_s(many) - changed.predict_s(plain) == pytest.approx(1e-3)


def test_a_block_s_work_on_the_host_is_measured() -> None:
    assert 1e-8 < host_block_s() < 1e-3
    ticks = count()
    assert host_block_s(lambda: float(next(ticks))) == 0.0


def test_attention_is_measured_at_each_size() -> None:
    options = EngineOptions.from_mapping({"skip_tokenizer_init": True})
    found = measure_attention(options, choose_model(options), [8, 64])
    assert set(found) == {8, 64}
    assert all(speed.decode_s > 0 and speed.chunk_s > 0 for speed in found.values())
