"""The Triton backend in the interpreter: against float64, and bitwise against itself.

Small states, since a program takes two milliseconds a token here. Errors as in `test_states.py`;
the interpreter's exp is numpy's.
"""

import pytest
import torch
from tests.recurrence.state_steps import Spec, World, call, cut, exact, inputs

pytest.importorskip("triton")

from quire.errors import ConfigurationError
from quire.kernels.state_calls import GatedDeltaInputs
from quire.kernels.triton.recurrence import causal_conv, units
from quire.recurrence.backends import select
from quire.recurrence.state_backend import StateBatch
from quire.recurrence.state_specs import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from quire.recurrence.triton_states import TritonStates

DELTA = GatedDeltaSpec(1, 2, key_dim=20, value_dim=16)
SCAN = Mamba2Spec(2, head_dim=16, state_size=19, num_groups=2, min_step=0.1, max_step=1.5)
CONV = ShortConvSpec(150, width=4)
SPECS: tuple[Spec, ...] = (
    DELTA,
    GatedDeltaSpec(1, 1, key_dim=8, value_dim=48, normalizes=False),
    SCAN,
    Mamba2Spec(1, head_dim=32, state_size=16),
    CONV,
    ShortConvSpec(64, width=3, has_silu=False),
    ShortConvSpec(33, width=2),
)


@pytest.fixture
def backend() -> TritonStates:
    return TritonStates()


@pytest.fixture(autouse=True)
def whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program a unit: fewer of them to interpret."""
    monkeypatch.setattr(units, "_MANY_PROGRAMS", 1)


def test_it_is_chosen_where_the_kernels_are_tritons() -> None:
    assert type(select("cpu", None, is_triton=True)) is TritonStates
    assert type(select("cuda", None, is_triton=True)) is TritonStates
    assert not isinstance(select("cuda", None), TritonStates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_results(backend: TritonStates, spec: Spec, dtype: torch.dtype) -> None:
    given = inputs(spec, 24, 10, dtype)
    world = World(backend, spec, units_per_page=2, first_unit=1)
    parts = [world.step({1: part})[1] for part in cut(given, 18, 1, 1, 4)]
    bound = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert parts[0].dtype == dtype
    found = torch.cat(parts).double()
    torch.testing.assert_close(found, exact(spec, given), rtol=bound, atol=bound)


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_company_and_places_change_no_bit(backend: TritonStates, spec: Spec) -> None:
    """40 tokens are three tiles of a convolution."""
    given, others = inputs(spec, 40, 20, torch.bfloat16), inputs(spec, 20, 40, torch.bfloat16)
    alone = World(TritonStates(), spec).step({0: given})[0]
    crowd = World(backend, spec, units_per_page=2, first_unit=3)
    found = []
    pieces = zip(cut(given, 1, 2, 1, 35, 1), cut(others, 9, 1, 1, 3, 6), strict=True)
    for at, (ours, theirs) in enumerate(pieces):
        step = {3: ours, 1: theirs} if at % 2 else {1: theirs, 3: ours}
        found.append(crowd.step(step)[3])
    assert torch.equal(torch.cat(found), alone)


@pytest.mark.parametrize("spec", [DELTA, SCAN])
def test_the_columns_of_a_program_change_no_bit(
    backend: TritonStates, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(spec, 5, 60, torch.float32)
    expected = World(backend, spec).step({2: given})[2]
    monkeypatch.setattr(units, "_MANY_PROGRAMS", 4)
    world = World(backend, spec)
    assert torch.equal(world.step({2: given})[2], expected)
    assert units.program_columns(20, 32, 1) == 8


def test_the_programs_of_a_prompt_change_no_bit(
    backend: TritonStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tiles of two prompts and a sequence that decodes, of one program each or of several."""
    first, second = inputs(CONV, 60, 60, torch.float32), inputs(CONV, 33, 70, torch.float32)
    found = []
    for most in (1, 2 * 2 * 3):
        monkeypatch.setattr(causal_conv, "_MANY_PROGRAMS", most)
        world = World(backend, CONV)
        start, rest = cut(first, 59, 1)
        world.step({1: start})
        out = world.step({0: first, 1: rest, 2: second})
        found.append(torch.cat([out[row] for row in range(3)]))
    assert torch.equal(*found)
    assert torch.equal(found[0][60], found[0][59])


def test_columns_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert units.program_columns(128, 4096, num_prompts=0) == 16
    assert units.program_columns(256, 4096, num_prompts=0) == 8
    monkeypatch.setattr(units, "_MANY_PROGRAMS", 512)
    assert units.program_columns(128, 4096, num_prompts=1) == 8
    assert units.program_columns(128, 1536, num_prompts=1) == 4
    assert units.program_columns(128, 1536, num_prompts=8) == 16


@pytest.mark.parametrize("spec", [DELTA, SCAN, CONV])
def test_a_copied_state_goes_on_as_the_first(backend: TritonStates, spec: Spec) -> None:
    world = World(backend, spec)
    start, rest = cut(inputs(spec, 9, 30, torch.float32), 4, 5)
    world.step({0: start})
    world.copy(0, 4)
    first = world.step({0: rest})[0]
    again = [world.step({4: part})[4] for part in cut(rest, 3, 2)]
    assert torch.equal(torch.cat(again), first)


@pytest.mark.parametrize("spec", [DELTA, SCAN, CONV])
def test_a_state_leaves_drafts_out(backend: TritonStates, spec: Spec) -> None:
    given = inputs(spec, 12, 30, torch.float32)
    expected = World(TritonStates(), spec).step({0: given})[0]
    world, others = World(backend, spec), cut(inputs(spec, 12, 60, torch.float32), 5, 1, 6)
    at = 0
    for (num_own, num_drafts), theirs in zip([(2, 5), (1, 2), (4, 1)], others, strict=True):
        part = cut(given, at, num_own + num_drafts, 12 - at - num_own - num_drafts)[1]
        found = world.step({1: theirs, 3: part}, {3: num_drafts})[3]
        assert torch.equal(found, expected[at : at + len(found)])
        at += num_own
    assert torch.equal(world.step({3: cut(given, at, 12 - at)[1]})[3], expected[at:])


@pytest.mark.parametrize("spec", [DELTA, SCAN, CONV])
def test_a_sequence_begins_with_zeros_whatever_was_in_its_pages(
    backend: TritonStates, spec: Spec
) -> None:
    world = World(backend, spec)
    given = inputs(spec, 3, 30, torch.float32)
    first = world.step({2: given})[2]
    world.computed.clear()
    assert torch.equal(world.step({2: given})[2], first)


@pytest.mark.parametrize("spec", SPECS)
def test_units_of_other_layers_stay_as_they_are(backend: TritonStates, spec: Spec) -> None:
    world = World(backend, spec, units_per_page=40, first_unit=7)
    world.step({2: inputs(spec, 3, 1, torch.float32)})
    ours = slice(7 * spec.unit_bytes, (7 + spec.num_units) * spec.unit_bytes)
    page = world.pages[int(world.table[2, 0])]
    assert page[ours].ne(0xFF).any()
    page[ours] = 0xFF
    assert bool(world.pages.eq(0xFF).all())


@pytest.mark.parametrize("spec", [DELTA, SCAN, CONV])
def test_a_captured_step_reads_tensors_alone_and_leaves_padding(
    backend: TritonStates, spec: Spec
) -> None:
    """Sequences that decode, one of padding behind them: the batch's lists say nothing."""
    given = inputs(spec, 6, 70, torch.float32)
    expected = World(TritonStates(), spec).step({0: given})[0]
    world = World(backend, spec)
    starts, contexts = torch.arange(3, dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    rows = torch.tensor([3, 0])
    batch = StateBatch(starts, contexts, rows, [], [], [], 0, (world.table,))
    assert backend.serves_graphs
    backend.plan(batch)
    padding = world.table[0].long()
    for at in range(6):
        contexts[0] = at + 1
        now = [torch.cat([x[at : at + 1], torch.full_like(x[:1], torch.nan)]) for x in given]
        found = call(backend, spec, now)
        assert torch.equal(found[0], expected[at])
        assert bool(world.pages[padding].eq(0xFF).all())


def test_tensors_of_other_shapes_are_refused(backend: TritonStates) -> None:
    q, k, v, g, beta = inputs(DELTA, 3, 0, torch.float32)
    world = World(backend, DELTA)
    world.step({0: [q, k, v, g, beta]})
    for wrong in ((q, k[:2], v, g, beta), (q, k, v[..., :8], g, beta)):
        with pytest.raises(ValueError, match="Hv a multiple of Hk"):
            backend.gated_delta(0, GatedDeltaInputs(*wrong))
    with pytest.raises(ValueError, match="g is"):
        backend.gated_delta(0, GatedDeltaInputs(q, k, v, g[:, :1], beta))


def test_states_of_too_many_rows_are_refused(backend: TritonStates) -> None:
    with pytest.raises(ConfigurationError, match="state_size up to 1024"):
        backend.bind((Mamba2Spec(1, head_dim=16, state_size=1025),), ())


@pytest.mark.parametrize("spec", [DELTA, SCAN, CONV])
def test_views_of_fused_tensors(backend: TritonStates, spec: Spec) -> None:
    given = inputs(spec, 4, 80, torch.bfloat16)
    expected = World(backend, spec).step({0: given})[0]
    apart = [torch.cat([x, x], dim=-1).split(x.shape[-1], dim=-1)[1] for x in given]
    assert torch.equal(World(backend, spec).step({0: apart})[0], expected)
    behind = [torch.cat([x, x], dim=1).split(x.shape[1], dim=1)[1] for x in given]
    assert torch.equal(World(backend, spec).step({0: behind})[0], expected)
