"""Worlds with a tier behind the pool that does all that a disk may do."""

import dataclasses
import random
from typing import Any

import pytest

from quire.core.memory.tiers.contract import LoadOrder
from quire.errors import ConfigurationError
from quire.simulation.fakes.fake_tiers import simulated_tier
from quire.simulation.report import SimulationReport, add_up
from quire.simulation.simulator import Simulator, run
from quire.simulation.workload import SimulationConfig

CONFIG = SimulationConfig(
    seed=16,
    num_requests=50,
    num_blocks=40,
    max_num_batched_tokens=32,
    shared_prefix_rate=0.5,
    near_rate=0.3,
    repeat_rate=0.6,
    fork_rate=0.05,
    abort_rate=0.2,
    crash_rate=0.05,
    overlap=1,
    check_every=3,
)
KINDS = ("", "full,window:9", "latent,state:2", "full,window:9,state:3")
GOOD: dict[str, float] = {"block_s": 1e-5, "latency_s": 0.01}


def run_with(kinds: str = "", **tier: float) -> SimulationReport:
    num_blocks = CONFIG.num_blocks * (3 if kinds else 1)
    options = tuple((GOOD | tier).items())
    return run(dataclasses.replace(CONFIG, kinds=kinds, num_blocks=num_blocks, tier=options))


@pytest.mark.parametrize(
    ("fault", "counters"),
    [
        ({"failure_rate": 0.3}, ["num_failed"]),
        ({"slow_rate": 0.5}, ["num_slow", "num_cancelled", "num_done_though_cancelled"]),
        ({"hang_rate": 0.05}, ["num_hung"]),
        ({"pause_rate": 0.1}, ["num_pauses"]),
        ({"loss_rate": 0.5}, ["num_lost"]),
        ({"clear_rate": 0.2, "latency_s": 0.04}, ["num_clears", "num_vanished"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else ",".join(value),
)
def test_no_fault_of_a_tier_breaks_a_law(fault: dict[str, float], counters: list[str]) -> None:
    report = add_up([run_with(kinds, **fault) for kinds in KINDS], CONFIG.seed)
    assert all(report.tier_faults.get(name, 0) > 0 for name in counters), report.tier_faults
    assert report.num_loads > 0 and report.num_stored_blocks > 0


@pytest.mark.parametrize("misjudged", [1.0, 10.0])
def test_wrong_predictions_break_no_law(misjudged: float) -> None:
    report = run_with(misjudged=misjudged, latency_s=0.03)
    assert report.num_loaded_tokens > 0
    assert (report.num_late_loads > 0) == (misjudged > 1.0)


def test_hanging_loads_and_stores_delay_no_other_request() -> None:
    """A request that waits for it is computed after a while; the others never notice."""
    report = run_with(hang_rate=0.1)
    assert report.tier_faults["num_hung"] > 0 and report.num_late_loads > 0
    assert report.max_first_token_s < 3 * run_with().max_first_token_s


def test_an_order_that_is_cancelled_may_end_at_once_and_ends_once() -> None:
    simulator = Simulator(dataclasses.replace(CONFIG, tier=(("latency_s", 5.0),)))
    tiers = simulator.memory.config.tiers
    assert tiers is not None
    orders = [LoadOrder(number, number, 0, b"name") for number in range(40)]
    tiers.start((), orders)
    assert not tiers.ended()
    tiers.cancel(range(40))
    at_once = tiers.ended()
    assert 0 < len(at_once) < 40
    simulator.clock.wait_until(100.0)
    later = tiers.ended()
    assert sorted(end.order_id for end in (*at_once, *later)) == list(range(40))
    assert not any(end.is_done for end in (*at_once, *later)), "nothing is kept under this name"


def test_a_tier_that_is_described_wrongly_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no speed; it has latency_s, block_s"):
        simulated_tier((("speed", 1.0),))


@pytest.mark.parametrize("index", range(4))
def test_random_worlds_with_tiers(index: int) -> None:
    rng = random.Random(f"tier world {index}")
    kinds = ("", "full,window:13", "state:3", "full,latent,window:5,state:2")[index]
    changes: dict[str, Any] = {
        "seed": rng.getrandbits(32),
        "kinds": kinds,
        "num_blocks": rng.choice((60, 200)) * (3 if kinds else 1),
        "block_size": rng.choice((2, 4, 8)),
        "beam_rate": 0.1,
        "step_failure_rate": 0.02,
        "crash_rate": 0.0,
        "num_steps": 150,
        "tier": (*GOOD.items(), ("failure_rate", 0.05), ("loss_rate", 0.05), ("hang_rate", 0.01)),
    }
    report = run(dataclasses.replace(CONFIG, **changes))
    assert report.num_stored_blocks > 0
