"""Requests with adapters, among others and alone, in worlds with every fault."""

from dataclasses import replace

import pytest

from quire.core.memory import prefix_index
from quire.core.memory.prefix_index import PrefixIndex
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import POLICIES
from quire.core.scheduling.residency import Residency
from quire.core.sequence import Sequence
from quire.core.step import Chunk, ItemLoad, RowAdmission, StepPlan
from quire.simulation.fakes.fake_runner import FakeRunner
from quire.simulation.simulator import SimulationError, run
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import draw_hybrid_world, draw_world


@pytest.mark.parametrize("index", range(6))
def test_all_get_the_tokens_of_their_own_adapter(index):
    world = draw_world(21, index, num_steps=100, check_every=3)
    slots = (1, 2, 4)[index % 3]
    report = run(replace(world, adapter_rate=(0.5, 1.0)[index % 2], max_loras=slots))
    assert report.num_adapter_loads


@pytest.mark.parametrize("index", range(3))
def test_hybrids_have_adapters_too(index):
    world = draw_hybrid_world(22, index, num_steps=100, check_every=5)
    report = run(replace(world, adapter_rate=0.7))
    assert report.num_adapter_loads


@pytest.mark.parametrize(
    ("policy", "overlap"), [(name, index % 2) for index, name in enumerate(sorted(POLICIES))]
)
def test_one_slot_for_six_adapters_starves_no_request(policy, overlap):
    """Whoever does not get a slot for ever is found: the world never ends then."""
    world = SimulationConfig(
        seed=5,
        num_requests=40,
        num_blocks=40,
        policy=policy,
        overlap=overlap,
        adapter_rate=0.9,
        max_loras=1,
        arrivals="bursts",
        beam_rate=0.2,
        fork_rate=0.1,
        step_failure_rate=0.02,
        crash_rate=0.01,
    )
    report = run(world)
    assert report.num_adapter_loads > 6 and report.finished["error"]


def test_a_world_without_adapters_is_what_it_was():
    world = SimulationConfig(seed=9, num_requests=30)
    assert run(world).digest == run(replace(world, max_loras=7)).digest


def make_runner() -> FakeRunner:
    config = SimulationConfig()
    return FakeRunner(config.groups, 16, 4, max_num_rows=2, max_num_tokens=40, model=config.model)


def admission(row: int, slot: int, blocks: tuple[int, ...]) -> RowAdmission:
    params = DecodingParams(max_tokens=4)
    return RowAdmission(row, list(range(2, 10)), 8, 0, (blocks,), params, adapter_slot=slot)


def test_the_fake_runner_refuses_an_empty_slot():
    plan = StepPlan(0, 1, 8, admit=(admission(0, 1, (0, 1)),), chunks=(Chunk(0, 8),))
    with pytest.raises(AssertionError, match="nothing is in slot 1"):
        make_runner().execute(plan)


def test_the_fake_runner_refuses_to_fill_a_slot_in_use():
    runner = make_runner()
    first = StepPlan(
        0,
        1,
        8,
        admit=(admission(0, 1, (0, 1)),),
        chunks=(Chunk(0, 8),),
        adapter_loads=(ItemLoad(1, "a"),),
    )
    runner.execute(first)
    runner.sample()
    second = StepPlan(
        1,
        2,
        9,
        admit=(admission(1, 1, (2, 3)),),
        chunks=(Chunk(1, 8),),
        adapter_loads=(ItemLoad(1, "b"),),
    )
    with pytest.raises(AssertionError, match="slot 1, which row 0 uses"):
        runner.execute(second)


def break_start_chain(monkeypatch):
    """The prefix cache does not know adapters."""
    whole = PrefixIndex.start_chain
    monkeypatch.setattr(
        PrefixIndex, "start_chain", lambda self, domain, adapter: whole(self, domain)
    )


def break_public_root(monkeypatch):
    """What is published for all is read under any adapter."""
    monkeypatch.setattr(prefix_index, "public_root", lambda cache, sequence: cache.public_root)


def break_victim(monkeypatch):
    """A slot is given away while its adapter is in use."""
    whole = Residency._find_victim

    def find(self):
        found = whole(self)
        return next(iter(self._slots), None) if found is None else found

    monkeypatch.setattr(Residency, "_find_victim", find)


def break_forks(monkeypatch):
    """A fork is computed without its parent's adapter."""
    whole = Sequence.branch

    def branch(self, *arguments):
        child = whole(self, *arguments)
        child.adapter = ""
        return child

    monkeypatch.setattr(Sequence, "branch", branch)


@pytest.fixture(scope="module")
def sound_world():
    world = SimulationConfig(
        seed=3,
        num_requests=80,
        adapter_rate=0.7,
        num_adapters=4,
        fork_rate=0.2,
        public_rate=0.3,
        num_cache_domains=1,
        shared_prefix_rate=0.9,
    )
    run(world)
    return world


@pytest.mark.parametrize(
    "break_something", [break_start_chain, break_public_root, break_victim, break_forks]
)
def test_bugs_are_found(monkeypatch, sound_world, break_something):
    break_something(monkeypatch)
    with pytest.raises(SimulationError):
        run(sound_world)


@pytest.mark.parametrize("seed", range(2))
def test_tiers_keep_blocks_by_adapter(seed):
    world = SimulationConfig(
        seed=seed,
        num_requests=60,
        num_blocks=30,
        tier=(("block_s", 1e-5), ("latency_s", 0.001), ("failure_rate", 0.05)),
        adapter_rate=0.7,
        num_cache_domains=1,
        public_rate=0.3,
        shared_prefix_rate=0.9,
        overlap=seed % 2,
        crash_rate=0.01,
    )
    report = run(world)
    assert report.num_adapter_loads and report.num_stored_blocks and report.num_loaded_tokens
