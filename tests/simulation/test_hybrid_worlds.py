"""Random worlds of all kinds of KV groups keep all laws; those that once broke one come first."""

import pytest

from quire.simulation.simulator import run
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import draw_hybrid_world

# Pages copied for a row that then got no tokens, and was preempted before they were copied; and a
# beam that made room by preempting its own search.
ONCE_BROKEN = (189, 225)


@pytest.mark.parametrize("index", ONCE_BROKEN)
def test_worlds_that_broke_a_law(index: int) -> None:
    assert run(draw_hybrid_world(7, index, 500)).num_steps >= 500


@pytest.mark.parametrize("index", range(6))
def test_some_worlds(index: int) -> None:
    report = run(draw_hybrid_world(15, index, 150, check_every=5))
    assert report.num_output_tokens > 0


def test_a_fork_goes_on_from_a_state_that_was_never_kept() -> None:
    report = run(SimulationConfig(kinds="state:2", num_requests=30, fork_rate=0.3, num_blocks=40))
    assert report.num_forks > 0 and report.num_cow_blocks > 0


def test_a_seed_replays_a_hybrid_exactly() -> None:
    config = SimulationConfig(
        kinds="full,window:6,latent,state:3", num_blocks=120, num_requests=30, overlap=1
    )
    assert run(config) == run(config)
