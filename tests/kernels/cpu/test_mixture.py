"""The native choice of experts and their products: against torch's, and bitwise against themselves
and against one linear at a time, in every layout."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.cpu.expert_calls import linears_by_head, route
from tests.pairwise import pairwise

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.activations import gated as torch_gated
from quire.kernels.cpu.abi import Epilogue, WeightLayout
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.cpu.mixture import PackedExperts, linear_array, mix_experts
from quire.kernels.experts import mix_experts as torch_mix_experts
from quire.kernels.options import NATIVE_KERNELS
from quire.kernels.routing import RouterSpec, Routing, Scoring
from quire.kernels.routing import route as torch_route

LAYOUTS = {
    "float32": (WeightLayout.DENSE_F32, torch.float32, 0),
    "bfloat16": (WeightLayout.DENSE_BF16, torch.bfloat16, 0),
    "int8": (WeightLayout.INT8, torch.bfloat16, 0),
    "int8 of fp32": (WeightLayout.INT8, torch.float32, 0),
    "int4": (WeightLayout.INT4, torch.bfloat16, 32),
    "int4, groups of 64": (WeightLayout.INT4, torch.float32, 64),
}
GPT_OSS = Gating(ActivationFunction.SILU, limit=0.7, alpha=1.702, up_offset=1.0)
PLAIN = Gating()
GELU = Gating(ActivationFunction.GELU_TANH)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        yield


class Layer:
    """Experts in odd sizes: E of them, H inputs and outputs, F between."""

    def __init__(
        self,
        layout: str,
        *,
        sizes: tuple[int, int, int] = (11, 70, 45),
        top_k: int = 3,
        gating: Gating = PLAIN,
        bias: bool = False,
    ) -> None:
        self.layout, self.gating, self.bias = LAYOUTS[layout], gating, bias
        self.num_experts, hidden, inner = sizes
        self.hidden, self.top_k, self.dtype = hidden, top_k, self.layout[1]
        experts = range(self.num_experts)
        self.gate_up = [self._linear(2 * inner, hidden, inner) for _ in experts]
        self.down = [self._linear(hidden, inner, 0) for _ in experts]
        self.packed = PackedExperts(self.gate_up, self.down, gating, top_k)

    def _linear(self, num_outputs: int, num_inputs: int, interleave: int) -> PackedLinear:
        kind, dtype, group_size = self.layout
        linear = PackedLinear(
            kind,
            num_outputs,
            num_inputs,
            group_size=group_size,
            interleave=interleave,
            has_bias=self.bias,
            dtype=dtype,
        )
        linear.pack(torch.randn(num_outputs, num_inputs) * num_inputs**-0.5, 0)
        if self.bias:
            linear.set_bias(torch.randn(num_outputs))
        linear.finish()
        return linear

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, Routing]:
        ids = torch.rand(num_tokens, self.num_experts).argsort(-1)[:, : self.top_k]
        return torch.randn(num_tokens, self.hidden).to(self.dtype), Routing(
            ids, torch.rand(num_tokens, self.top_k)
        )

    def one_by_one(self, kernels: NativeKernels, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """By the definition, each expert's products on their own."""

        def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
            if self.gating == Gating():
                inner = apply(kernels, self.gate_up[expert], rows, epilogue=Epilogue.SILU_MUL)
            else:
                inner = torch_gated(apply(kernels, self.gate_up[expert], rows), self.gating)
            return apply(kernels, self.down[expert], inner)

        return torch_mix_experts(x, routing, compute)


def rows_of(routing: Routing, rows: slice) -> Routing:
    return Routing(routing.ids[rows], routing.weights[rows])


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 70])
def test_bits_are_those_of_one_expert_after_another(
    kernels: NativeKernels, layout: str, num_tokens: int
) -> None:
    layer = Layer(layout, bias=num_tokens == 9)
    x, routing = layer.inputs(num_tokens)
    found = mix_experts(kernels, layer.packed, x, routing)
    assert torch.equal(found, layer.one_by_one(kernels, x, routing))


@pytest.mark.parametrize("layout", ["float32", "bfloat16"])
@pytest.mark.parametrize("gating", [GPT_OSS, GELU], ids=["gpt-oss", "gelu"])
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_other_gatings(
    kernels: NativeKernels, layout: str, gating: Gating, num_tokens: int
) -> None:
    layer = Layer(layout, gating=gating, bias=True)
    x, routing = layer.inputs(num_tokens)
    found = mix_experts(kernels, layer.packed, x, routing).float()
    expected = layer.one_by_one(kernels, x, routing).float()
    # Exponentials differ in their last bits, and so in bf16 a few results by one rounding.
    scale = 2e-6 if layer.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=scale, atol=scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_has_the_same_bits_in_every_batch(kernels: NativeKernels, layout: str) -> None:
    layer = Layer(layout, gating=GPT_OSS if layout == "int8" else Gating())
    x, routing = layer.inputs(80)
    alone = torch.cat(
        [
            mix_experts(kernels, layer.packed, x[t : t + 1], rows_of(routing, slice(t, t + 1)))
            for t in range(80)
        ]
    )
    for first, end in ((0, 80), (0, 2), (3, 20), (41, 80), (79, 80)):
        rows = slice(first, end)
        found = mix_experts(kernels, layer.packed, x[rows], rows_of(routing, rows))
        assert torch.equal(found, alone[rows])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_number_of_threads_changes_no_bit(library: NativeLibrary, layout: str) -> None:
    layer = Layer(layout, sizes=(5, 96, 200))
    x, routing = layer.inputs(33)
    alone = mix_experts(NativeKernels(library, num_threads=1), layer.packed, x, routing)
    for num_threads in (2, 3, 5):
        several = NativeKernels(library, num_threads=num_threads)
        assert torch.equal(mix_experts(several, layer.packed, x, routing), alone)


def test_many_tokens_of_one_expert(kernels: NativeKernels) -> None:
    """More rows than stay in the cache, beside experts that have none."""
    layer = Layer("bfloat16", sizes=(3, 1030, 20), top_k=1)
    x, _ = layer.inputs(250)
    routing = Routing(torch.full((250, 1), 1), torch.ones(250, 1))
    found = mix_experts(kernels, layer.packed, x, routing)
    assert torch.equal(found, layer.one_by_one(kernels, x, routing))


def test_a_token_of_nans_stays_alone(kernels: NativeKernels) -> None:
    layer = Layer("int8")
    x, routing = layer.inputs(20)
    clean = mix_experts(kernels, layer.packed, x, routing)
    x[7] = torch.nan
    found = mix_experts(kernels, layer.packed, x, routing)
    assert found[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[others], clean[others])


def test_rows_of_x_may_lie_apart(kernels: NativeKernels) -> None:
    layer = Layer("bfloat16")
    x, routing = layer.inputs(12)
    wide = torch.cat((x, x), dim=1)[:, : layer.hidden]
    expected = mix_experts(kernels, layer.packed, x, routing)
    assert torch.equal(mix_experts(kernels, layer.packed, wide, routing), expected)


def test_no_tokens(kernels: NativeKernels) -> None:
    layer = Layer("bfloat16")
    assert mix_experts(kernels, layer.packed, *layer.inputs(0)).shape == (0, layer.hidden)


SPECS: dict[str, RouterSpec] = {
    "softmax": RouterSpec(21, 4, rounds=True),
    "renormalized": RouterSpec(21, 4, renormalizes=True),
    "all": RouterSpec(5, 5, renormalizes=True),
    "one": RouterSpec(130, 1),
    "of the chosen": RouterSpec(130, 17, Scoring.SOFTMAX_OF_CHOSEN, rounds=True),
    "sigmoid": RouterSpec(128, 8, Scoring.SIGMOID, True, has_bias=True, scale=2.5),
    "groups": RouterSpec(
        *(24, 5, Scoring.SIGMOID, True), num_groups=4, top_groups=2, sums_best=True, has_bias=True
    ),
    "groups' best": RouterSpec(24, 3, num_groups=8, top_groups=3, scale=16.0),
    "scales": RouterSpec(24, 3, renormalizes=True, has_scales=True, rounds=True),
}


def bias_of(spec: RouterSpec) -> torch.Tensor | None:
    return torch.randn(spec.num_experts) * 0.2 if spec.has_bias or spec.has_scales else None


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_choice_is_torchs(kernels: NativeKernels, name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    logits = torch.randn(100, spec.num_experts).to(dtype)
    bias = bias_of(spec)
    found = route(kernels, logits, bias, spec, torch.bfloat16)
    expected = torch_route(logits, bias, spec, torch.bfloat16)
    assert torch.equal(found.ids, expected.ids)
    tolerance = 2**-8 if spec.rounds else 1e-6  # where the unrounded ones lie between two
    torch.testing.assert_close(found.weights, expected.weights, rtol=tolerance, atol=1e-9)
    for token in (0, 57, 99):
        alone = route(kernels, logits[token : token + 1], bias, spec, torch.bfloat16)
        assert torch.equal(alone.ids[0], found.ids[token])
        assert torch.equal(alone.weights[0], found.weights[token])


def test_the_lower_id_of_equal_scores_is_chosen(kernels: NativeKernels) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5])
    for scoring in Scoring:
        found = route(kernels, logits, None, RouterSpec(5, 2, scoring), torch.float32)
        assert found.ids.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("name", SPECS)
def test_logits_that_are_no_numbers_choose_some_experts(kernels: NativeKernels, name: str) -> None:
    spec = SPECS[name]
    logits = torch.full((3, spec.num_experts), torch.nan)
    logits[1], logits[2] = torch.inf, -torch.inf
    bias = bias_of(spec)
    ids = route(kernels, logits, bias, spec, torch.float32).ids
    assert ((ids >= 0) & (ids < spec.num_experts)).all()
    assert all(row.unique().numel() == spec.top_k for row in ids)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_linears_of_heads(kernels: NativeKernels, layout: str, num_tokens: int) -> None:
    layer = Layer(layout)
    heads = layer.down[:5]
    wide = torch.randn(num_tokens, 5, heads[0].num_inputs + 9).to(layer.dtype)
    x = wide[..., : heads[0].num_inputs]
    found = linears_by_head(kernels, heads, x)
    for head, linear in enumerate(heads):
        assert torch.equal(found[:, head], apply(kernels, linear, x[:, head].contiguous()))


def refusals() -> Iterator[Any]:
    layer = Layer("bfloat16")
    x, routing = layer.inputs(4)
    yield r"x is \(4, 69\)", lambda k: mix_experts(k, layer.packed, x[:, :69], routing)
    other = Routing(routing.ids[:3], routing.weights[:3])
    yield (
        r"routing is \(3, 3\), but must be \(4, 3\)",
        lambda k: mix_experts(k, layer.packed, x, other),
    )
    high = Routing(routing.ids + 9, routing.weights)
    yield r"not within \[0, 11\)", lambda k: mix_experts(k, layer.packed, x, high)
    yield (
        "there are 11 gate_up and 10 down",
        lambda _: PackedExperts(layer.gate_up, layer.down[1:], Gating(), 2),
    )
    yield (
        "down has 70 inputs, but gate 45",
        lambda _: PackedExperts(layer.gate_up[:1], [layer._linear(70, 70, 0)], Gating(), 1),
    )
    yield "must be of one format", lambda _: linear_array([layer.down[0], layer.gate_up[0]])
    yield r"logits are \(4, 70\)", lambda k: route(k, x, None, RouterSpec(4, 1), torch.float32)
    yield (
        r"x is \(4, 70\), but must be \[any, 2, 45\]",
        lambda k: linears_by_head(k, layer.down[:2], x),
    )


def test_mismatched_arguments_are_refused(kernels: NativeKernels) -> None:
    for message, call in refusals():
        with pytest.raises(ValueError, match=message):
            call(kernels)


def test_addresses_are_of_the_linears_structures() -> None:
    layer = Layer("bfloat16")
    assert list(linear_array(layer.down)) == [ctypes.addressof(each.struct) for each in layer.down]
