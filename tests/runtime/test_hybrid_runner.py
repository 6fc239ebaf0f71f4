"""A hybrid's tokens and log-probabilities are the same however its memory was come by.

Layers of windows (with sinks and a soft cap), full attention, gated delta rules and convolutions
share one pool. Blocks that tables gave up hold NaN.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime.hand_core import HandCore, Held
from tests.runtime.hybrid_family import WINDOW, registered, save_hybrid

from quire.assembly.device_setup import DeviceSetup, choose_setup
from quire.core.kv_groups import KVKind
from quire.core.sampling_params import DecodingParams
from quire.core.step import HOLE_BLOCK
from quire.models.checkpoints.loader import load_model
from quire.models.interface import TextModel
from quire.models.registry import load_config
from quire.options.engine_options import EngineOptions
from quire.recurrence.backends import select
from quire.recurrence.cpu_states import CpuStates
from quire.recurrence.state_backend import StateBatch
from quire.runtime.batch import RowBatch
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner
from quire.runtime.page_layout import plan_layout
from quire.sampling.host.sampler import HostStepSampler, Sampler, SamplingRows

CPU = torch.device("cpu")
NUM_ROWS, NUM_BLOCKS, MODEL_LEN, STEP_TOKENS = 6, 160, 160, 160
NUM_SAMPLED = 12
SAMPLED = DecodingParams(max_tokens=40, temperature=1.0, seed=5, logprobs=0)

MakeCore = Callable[..., HandCore]


Made = tuple[TextModel, DeviceSetup]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The model with all kinds of layers."""
    return make_model(save_hybrid(tmp_path_factory.mktemp("hybrid")))


def make_model(folder: Path) -> Made:
    """And what it is computed with: kernels to whose bits nothing else matters."""
    with registered():
        config = load_config(folder)
        options = EngineOptions.from_mapping({"model": str(folder), "dtype": "float32"})
        setup = choose_setup(options, config, CPU, 2)
        if setup.kernels is None:
            pytest.skip("torch's products have other bits in other steps")
        where = {"dtype": torch.float32, "device": CPU, "max_model_len": MODEL_LEN}
        return load_model(folder, config, methods=setup.methods, **where), setup


@pytest.fixture
def make_core(made: Made) -> MakeCore:
    return core_maker(*made)


def core_maker(model: TextModel, setup: DeviceSetup) -> MakeCore:
    def make(block_size: int = 8) -> HandCore:
        backend = setup.new_backend()
        layout = plan_layout(
            model.attention_specs,
            type(backend),
            block_size,
            setup.kv_format,
            recurrent_specs=model.recurrent_specs,
            typical_tokens=64,
        )
        model.use_states(select(CPU.type, setup.kernels))
        sizes = layout.state_sizes
        rows = RowBatch(
            num_rows=NUM_ROWS,
            max_model_len=MODEL_LEN,
            max_num_tokens=STEP_TOKENS,
            num_groups=len(layout.groups) - len(sizes),
            block_size=block_size,
            state_sizes=sizes,
        )
        sampler = HostStepSampler(Sampler(SamplingRows(NUM_ROWS, model.vocab_size)), rows.history)
        runner = ModelRunner(model, backend, KVCache(layout, NUM_BLOCKS, CPU), rows, sampler)
        return HandCore(runner, layout.groups, NUM_BLOCKS, block_size)

    return make


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(499) for _ in range(length)]


def decode(core: HandCore, count: int) -> None:
    for _ in range(count):
        core.step()


def alone(
    make_core: MakeCore, tokens: list[int], count: int = NUM_SAMPLED, branch_index: int = 0
) -> Held:
    """All tokens in one step, nothing beside it, blocks of another size."""
    core = make_core(block_size=16)
    held = core.admit(tokens, SAMPLED, branch_index=branch_index)
    decode(core, count)
    return held


def same(found: Held, expected: Held) -> bool:
    return (found.sampled, found.logprobs) == (expected.sampled, expected.logprobs)


def test_model_has_full_window_and_state_groups(make_core: MakeCore) -> None:
    groups = make_core().groups
    assert {group.kind for group in groups} >= {KVKind.FULL, KVKind.WINDOW, KVKind.STATE}
    assert max(group.num_state_blocks for group in groups) > 1
    assert len({group.bytes_per_block for group in groups}) == 1


@pytest.mark.parametrize("chunks", [[1] * 70, [8] * 9, [5, 30, 1, 1, 20, 13], [64, 6]])
def test_chunks_change_nothing(make_core: MakeCore, chunks: list[int]) -> None:
    tokens = prompt(70)
    core = make_core()
    held = core.admit(tokens, SAMPLED)
    for size in chunks:
        core.step({held.row: size})
    decode(core, NUM_SAMPLED - 1)
    assert same(held, alone(make_core, tokens))


def test_windows_give_their_blocks_back_and_states_never_grow(make_core: MakeCore) -> None:
    core = make_core()
    held = core.admit(prompt(100), SAMPLED)
    for _ in range(20):
        core.step({held.row: 5})
    by_kind = dict.fromkeys(KVKind, 0)
    for group, table in zip(core.groups, held.tables, strict=True):
        by_kind[group.kind] = max(by_kind[group.kind], sum(block >= 0 for block in table))
    assert by_kind[KVKind.FULL] == 13
    assert by_kind[KVKind.WINDOW] <= WINDOW // 8 + 1
    assert by_kind[KVKind.STATE] == max(group.num_state_blocks for group in core.groups)


def test_a_crowd_changes_nothing(make_core: MakeCore) -> None:
    """Chunks of some beside decodes of others; rows are left and taken again."""
    rng = random.Random(1)
    core = make_core()
    waiting = [prompt(length, seed=length) for length in (3, 40, 1, 61, 17, 33, 9, 50)]
    found: list[Held] = []
    while waiting or core.live:
        while waiting and len(core.live) < 4:
            found.append(core.admit(waiting.pop(), SAMPLED))
        core.step({held.row: rng.randint(1, 16) for held in core.live})
        for held in [each for each in core.live if len(each.sampled) >= NUM_SAMPLED]:
            core.drop(held)
    assert core.num_held == 0
    for held in found:
        assert same(held, alone(make_core, held.tokens[: held.num_prompt_tokens]))


def test_a_fork_goes_on_from_a_copy_of_the_states(make_core: MakeCore) -> None:
    core = make_core()
    trunk = core.admit(prompt(45), SAMPLED)
    decode(core, 4)
    branch = core.fork(trunk, SAMPLED, 3)
    core.part(branch)
    decode(core, NUM_SAMPLED - 4)
    assert same(trunk, alone(make_core, prompt(45)))
    assert branch.tokens != trunk.tokens  # other random numbers from the fork on
    expected = alone(make_core, branch.tokens[: 45 + 4], NUM_SAMPLED - 4, branch_index=3)
    assert branch.sampled[4:] == expected.sampled and branch.logprobs == expected.logprobs


def test_branches_of_a_prompt_join_its_last_step(make_core: MakeCore) -> None:
    core = make_core()
    first = core.admit(prompt(21), SAMPLED)
    core.step({first.row: 13})
    branches = [core.fork(first, SAMPLED, index, joins_step=True) for index in (1, 2)]
    core.step(joins=[(branch, first) for branch in branches])
    for branch in branches:
        core.part(branch)
    decode(core, NUM_SAMPLED - 1)
    for held in (first, *branches):
        assert same(held, alone(make_core, prompt(21), branch_index=held.branch_index))
    assert len({tuple(held.tokens) for held in core.live}) == 3


@pytest.mark.parametrize("num_shared", [8, 48, 64])
def test_a_prefix_with_a_snapshot_of_its_states_is_not_computed_again(
    make_core: MakeCore, num_shared: int
) -> None:
    core = make_core()
    first = core.admit(prompt(80), SAMPLED)
    core.step({first.row: num_shared})
    snapshot = core.snapshot(first)
    decode(core, 3)
    core.drop(first)
    tokens = prompt(80)[:num_shared] + prompt(9, seed=2)
    second = core.admit(tokens, SAMPLED, snapshot)
    third = core.admit(prompt(80), SAMPLED, snapshot)
    core.step({second.row: 4, third.row: 7})
    decode(core, 30)
    for held, given in ((second, tokens), (third, prompt(80))):
        expected = alone(make_core, given, len(held.sampled))
        assert same(held, expected) and len(held.sampled) > NUM_SAMPLED
    core.drop(second)
    core.drop(third)
    core.forget(snapshot)
    assert core.num_held == 0


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_preempted_row_continues_with_the_same_tokens(
    make_core: MakeCore, has_snapshot: bool
) -> None:
    """From zeros, or from a snapshot, with all that it has sampled."""
    core = make_core()
    held = core.admit(prompt(40), SAMPLED)
    core.step({held.row: 32})
    snapshot = core.snapshot(held) if has_snapshot else None
    decode(core, 6)
    core.drop(held)
    other = core.admit(prompt(30, seed=4), SAMPLED)  # takes the row, and blocks that it had
    core.step()
    again = core.admit(held.tokens, SAMPLED, snapshot, num_prompt_tokens=40)
    core.step({again.row: 7})
    decode(core, 8)
    assert again.row != other.row == held.row
    expected = alone(make_core, prompt(40), len(again.sampled))
    assert again.sampled == expected.sampled
    assert held.logprobs + again.logprobs == expected.logprobs


def test_no_backend_reads_what_a_window_has_passed(made: Made) -> None:
    """Blocks that became holes hold NaN. Backends agree to fp32 rounding. Triton, which has no
    latent layers, is tried by itself in `tests/attention/test_every_backend.py`."""
    model, setup = made
    found: list[Held] = []
    for name in ("native", "torch"):
        core = core_maker(model, replace(setup, attention_backend=name))()
        found.append(core.admit(prompt(50), SAMPLED))
        for _ in range(5):
            core.step({found[-1].row: 10})
        decode(core, 4)
        assert any(HOLE_BLOCK in table for table in found[-1].tables)
    for held in found[1:]:
        assert held.sampled == found[0].sampled
        assert held.logprobs == pytest.approx(found[0].logprobs, abs=1e-3)


def test_a_model_of_states_alone_is_served_as_well(tmp_path: Path) -> None:
    make_core = core_maker(*make_model(save_hybrid(tmp_path, layer_types=["conv", "delta"])))
    core = make_core()
    assert {group.kind for group in core.groups} == {KVKind.STATE}
    held = core.admit(prompt(30), SAMPLED)
    core.step({held.row: 11})
    beside = core.admit(prompt(5, seed=8), SAMPLED)
    decode(core, NUM_SAMPLED)
    assert same(held, alone(make_core, prompt(30), len(held.sampled)))
    assert same(beside, alone(make_core, prompt(5, seed=8), len(beside.sampled)))


@pytest.mark.parametrize("broken", ["stale state", "no zeros", "hole too early"])
def test_wrong_states_change_the_results(
    make_core: MakeCore, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would see it."""
    expected = alone(make_core, prompt(40))
    core = make_core()
    held = core.admit(prompt(40), SAMPLED)
    core.step({held.row: 20})
    if broken == "stale state":
        group = next(at for at, each in enumerate(core.groups) if each.kind is KVKind.STATE)
        core.storage[held.tables[group][0]].zero_()
    elif broken == "no zeros":
        core.drop(held)
        plan = CpuStates.plan

        def plan_as_if_begun(self: CpuStates, batch: StateBatch) -> None:
            plan(self, replace(batch, context_lens=batch.context_lens + 1))

        monkeypatch.setattr(CpuStates, "plan", plan_as_if_begun)
        core.storage.view(torch.float32).fill_(0.5)
        held = core.admit(prompt(40), SAMPLED)
    else:
        group = next(at for at, each in enumerate(core.groups) if each.window)
        core.storage[held.tables[group][1]].fill_(0)
    decode(core, NUM_SAMPLED)
    assert held.logprobs[:NUM_SAMPLED] != expected.logprobs
