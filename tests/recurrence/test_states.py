"""Backends of states against float64, and bitwise against themselves in other steps and places.

fp32 sums over at most 300 tokens: relative errors of some 1e-6 of the largest term; results in bf16
are rounded once, by half a unit in the last place (2^-9).
"""

import pytest
import torch
from tests.native_library import require_isa
from tests.recurrence.state_steps import (
    SPECS,
    Spec,
    World,
    conv_weights,
    cut,
    exact,
    inputs,
    mamba_weights,
)
from torch.nn.functional import silu

from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.options import NATIVE_KERNELS
from quire.kernels.state_calls import Mamba2Inputs, Mamba2Weights
from quire.recurrence.cpu_states import CpuStates
from quire.recurrence.state_backend import StateBackend
from quire.recurrence.state_specs import (
    Mamba2Spec,
    ShortConvSpec,
)
from quire.recurrence.torch_states import TorchStates


def native(library: NativeLibrary, isa: str, num_threads: int = 2) -> StateBackend:
    require_isa(library, isa)
    return CpuStates.create(NativeKernels(library, isa, num_threads))


@pytest.fixture(params=[*NATIVE_KERNELS, "torch"])
def backend(request: pytest.FixtureRequest) -> StateBackend:
    if request.param == "torch":
        return TorchStates.create(None)
    return native(request.getfixturevalue("native_library"), request.param)


@pytest.fixture(params=NATIVE_KERNELS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_results(backend: StateBackend, spec: Spec, dtype: torch.dtype) -> None:
    given = inputs(spec, 41, 10, dtype)
    world = World(backend, spec, units_per_page=3, first_unit=2)
    parts = [world.step({1: part})[1] for part in cut(given, 30, 1, 1, 9)]
    expected = exact(spec, given)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[dtype]
    assert parts[0].dtype == dtype
    torch.testing.assert_close(torch.cat(parts).double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_company_places_and_threads_change_no_bit(
    native_library: NativeLibrary, isa: str, spec: Spec
) -> None:
    """300 tokens are more than the kernels prepare at once."""
    given, others = inputs(spec, 300, 20, torch.bfloat16), inputs(spec, 120, 40, torch.bfloat16)
    alone = World(native(native_library, isa, 1), spec).step({0: given})[0]
    crowd = World(native(native_library, isa, 3), spec, units_per_page=5, first_unit=4)
    found = []
    pieces = zip(cut(given, 1, 2, 90, 200, 1, 6), cut(others, 50, 1, 1, 3, 60, 5), strict=True)
    for ours, theirs in pieces:
        found.append(crowd.step({3: ours, 1: theirs})[3])
    assert torch.equal(torch.cat(found), alone)


@pytest.mark.parametrize("spec", SPECS)
def test_a_copied_state_goes_on_as_the_first(backend: StateBackend, spec: Spec) -> None:
    world = World(backend, spec)
    start, rest = cut(inputs(spec, 20, 30, torch.float32), 12, 8)
    world.step({0: start})
    world.copy(0, 4)
    first = world.step({0: rest})[0]
    again = [world.step({4: part})[4] for part in cut(rest, 3, 5)]
    assert torch.equal(torch.cat(again), first)


@pytest.mark.parametrize("spec", SPECS)
def test_a_state_leaves_drafts_out(backend: StateBackend, spec: Spec) -> None:
    """The tokens of 4 are computed as drafts, some of them again, and at last one by one."""
    given = inputs(spec, 24, 30, torch.float32)
    alone = World(backend, spec)
    expected = torch.cat([alone.step({0: token})[0] for token in cut(given, *[1] * 24)])
    world, others = World(backend, spec), cut(inputs(spec, 24, 60, torch.float32), *[3] * 8)
    at, steps = 0, [(9, 0), (1, 7), (5, 3), (4, 1), (2, 0), (1, 2)]
    for (num_own, num_drafts), theirs in zip(steps, others, strict=False):
        part = cut(given, at, num_own + num_drafts, 24 - at - num_own - num_drafts)[1]
        found = world.step({1: theirs, 3: part}, {3: num_drafts})[3]
        assert torch.equal(found, expected[at : at + len(found)])
        at += num_own
    assert torch.equal(world.step({3: cut(given, at, 24 - at)[1]})[3], expected[at:])


@pytest.mark.parametrize("num_drafts", [40, 300])
@pytest.mark.parametrize("spec", SPECS)
def test_drafts_that_are_computed_in_several_parts(
    native_library: NativeLibrary, isa: str, spec: Spec, num_drafts: int
) -> None:
    """The kernels prepare 256 tokens at once, and convolve 32."""
    given, prompt = inputs(spec, 400, 20, torch.bfloat16), inputs(spec, 230, 40, torch.bfloat16)
    expected = World(native(native_library, isa), spec).step({0: given})[0]
    of_prompt = World(native(native_library, isa), spec).step({0: prompt})[0]
    world = World(native(native_library, isa), spec)
    first, more, rest = cut(given, 20, 10 + num_drafts, 370 - num_drafts)
    world.step({3: first})
    found = world.step({1: prompt, 3: more}, {3: num_drafts})
    assert torch.equal(found[3], expected[20 : 30 + num_drafts])
    assert torch.equal(found[1], of_prompt)
    last = [torch.cat(pair)[10:] for pair in zip(more, rest, strict=True)]
    assert torch.equal(world.step({3: last})[3], expected[30:])


def test_units_of_other_layers_stay_as_they_are(backend: StateBackend) -> None:
    spec = SPECS[0]
    world = World(backend, spec, units_per_page=1000, first_unit=7)
    world.step({2: inputs(spec, 5, 1, torch.float32)})
    ours = slice(7 * spec.unit_bytes, (7 + spec.num_units) * spec.unit_bytes)
    page = world.pages[int(world.table[2, 0])]
    assert page[ours].ne(0xFF).any()
    page[ours] = 0xFF
    assert bool(world.pages.eq(0xFF).all())


def test_silu_of_large_numbers(backend: StateBackend) -> None:
    spec = ShortConvSpec(70, width=2)
    ends = torch.tensor([0.0, -0.5, 20.0, -20.0, 90.0, -90.0, 1e30, -1e38, float("nan")])
    x = ends.repeat(8)[:70].view(1, 70)
    World(backend, spec).step({0: [x]})
    weight = torch.tensor([0.0, 1.0]).expand(70, 2)
    found = backend.short_conv(0, x, weight, None)
    torch.testing.assert_close(found, silu(x), rtol=1e-5, atol=1e-30, equal_nan=True)


def test_weights_of_a_convolution_are_read_in_their_own_dtype(
    native_library: NativeLibrary, isa: str
) -> None:
    spec = ShortConvSpec(150, width=4)
    x = inputs(spec, 6, 10, torch.bfloat16)[0]
    backend = native(native_library, isa)
    World(backend, spec).step({0: [x]})
    weight, bias = (part.bfloat16() for part in conv_weights(spec) if part is not None)
    plain = backend.short_conv(0, x, weight.float(), bias.float())
    for weight_dtype, bias_dtype in ((torch.bfloat16,) * 2, (torch.bfloat16, torch.double)):
        found = backend.short_conv(0, x, weight.to(weight_dtype), bias.to(bias_dtype))
        assert torch.equal(found, plain)


def test_missing_mamba2_weights_count_as_zeros(backend: StateBackend) -> None:
    spec = Mamba2Spec(2, head_dim=16, state_size=32)
    given = inputs(spec, 6, 10, torch.float32)
    World(backend, spec).step({0: given})
    a, zeros = mamba_weights(spec).a, torch.zeros(2)
    plain = backend.mamba2(0, Mamba2Inputs(*given), Mamba2Weights(a, zeros, zeros))
    assert torch.equal(backend.mamba2(0, Mamba2Inputs(*given), Mamba2Weights(a)), plain)


def test_another_kind_is_refused(backend: StateBackend) -> None:
    class Other:
        num_units, unit_bytes = 1, 64

    with pytest.raises(ConfigurationError, match="GatedDeltaSpec, Mamba2Spec, ShortConvSpec"):
        backend.bind((Other(),), ())  # type: ignore[arg-type]
