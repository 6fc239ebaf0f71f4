"""Random worlds whose steps verify drafts, wrong at random positions, keep all laws."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from quire.core.scheduling.drafts import Drafting
from quire.core.scheduling.step_results import StepInFlight
from quire.simulation.report import add_up
from quire.simulation.simulator import Simulator, run
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import draw_draft_world

CONFIG = SimulationConfig(
    seed=3,
    num_requests=50,
    num_blocks=40,
    fork_rate=0.1,
    grammar_rate=0.3,
    logprobs_rate=0.3,
    abort_rate=0.2,
    near_rate=0.4,
    step_failure_rate=0.02,
    max_drafts=4,
)


def test_random_worlds_keep_all_laws() -> None:
    """`python -m quire.simulation --drafts` runs longer ones."""
    total = add_up([run(draw_draft_world(2, index, 60, 5)) for index in range(14)], 2)
    assert 0 < total.num_accepted_drafts < total.num_drafts
    assert total.num_preemptions and total.num_failed_steps and total.num_forks
    assert total.num_constrained and total.num_stored_blocks and total.num_beams


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_drafter_that_errs_keeps_all_laws(overlap: int) -> None:
    simulator = Simulator(replace(CONFIG, overlap=overlap, has_drafter=True))
    simulator.run()
    drafting = simulator.scheduler.drafting
    assert drafting is not None
    verified, accepted = (
        sum(getattr(drafting.counts["fake drafter"], name)) for name in ("verified", "accepted")
    )
    assert 0 < accepted < verified


@pytest.mark.parametrize(("has_drafter", "overlap"), [(False, 0), (False, 1), (True, 1)])
def test_plain_rows_and_rows_with_drafts_take_turns(
    has_drafter: bool, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps, at random, ask for no drafts, as steps of tiny models do."""
    rng, counts = random.Random(overlap), Counter[str]()
    begin, split = Drafting.begin, StepInFlight.split

    def begin_or_rest(drafting: Drafting) -> None:
        drafting._num_to_rest = 2 if rng.random() < 0.6 else 0
        begin(drafting)

    def split_and_count(step: StepInFlight, *args: Any) -> Any:
        counts["plain"] += len(step.plain.rows)
        counts["drafting"] += len(step.drafts or ())
        return split(step, *args)

    monkeypatch.setattr(Drafting, "begin", begin_or_rest)
    monkeypatch.setattr(StepInFlight, "split", split_and_count)
    report = run(replace(CONFIG, overlap=overlap, has_drafter=has_drafter))
    assert counts["plain"] > 30 < counts["drafting"]
    assert report.num_preemptions and report.num_failed_steps and report.num_forks


@pytest.mark.parametrize("overlap", [0, 1])
def test_tokens_take_fewer_steps_with_drafts(overlap: int) -> None:
    """The simulator compares every token with those of the request alone."""
    config = replace(CONFIG, overlap=overlap, step_failure_rate=0.0, arrivals="at_once")
    plain = run(replace(config, max_drafts=0))
    drafted = run(replace(config, draft_error_rate=0.1))
    assert plain.num_drafts == 0
    assert drafted.num_accepted_drafts > 0.5 * drafted.num_drafts
    assert drafted.num_steps < (0.8 if overlap else 0.65) * plain.num_steps


def test_the_same_seed_drafts_the_same() -> None:
    assert run(CONFIG) == run(CONFIG)


@pytest.mark.parametrize("overlap", [0, 1])
def test_models_with_states_take_fewer_steps_too(overlap: int) -> None:
    config = replace(
        CONFIG,
        kinds="full,state:2",
        num_blocks=120,
        overlap=overlap,
        step_failure_rate=0.0,
        arrivals="at_once",
    )
    plain = run(replace(config, max_drafts=0))
    drafted = run(replace(config, draft_error_rate=0.1))
    assert drafted.num_accepted_drafts > 0.5 * drafted.num_drafts > 0
    assert drafted.num_steps < 0.9 * plain.num_steps
