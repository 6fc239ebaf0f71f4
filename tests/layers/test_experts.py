"""The block of experts: shared ones, their gate, the sum over ranks."""

import pytest
import torch
from tests.formats.block_quantized_samples import BLOCK_FORMATS, random_codes
from torch.nn import functional

from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.formats.dense import DenseMethod
from quire.formats.weight_format import TritonLinears
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.operators import TORCH_OPERATORS
from quire.kernels.routing import RouterSpec, Routing, Scoring, route
from quire.layers.experts import Experts, MoESpec, SparseMLP
from quire.layers.linear import Linear

CPU = torch.device("cpu")
H, F = 12, 10


def make_block(**spec: object) -> SparseMLP:
    torch.manual_seed(2)
    router = RouterSpec(5, 2, Scoring.SIGMOID, renormalizes=True, has_bias=True)
    whole = MoESpec(router=router, intermediate_size=F, **spec)  # type: ignore[arg-type]
    block = SparseMLP(H, whole, dtype=torch.float32, device=CPU)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for buffer in block.buffers():
        torch.nn.init.normal_(buffer, std=0.4)
    return block


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, gate_up).chunk(2, -1)
    return functional.linear(functional.silu(gate) * up, down)


def routed(block: SparseMLP, x: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(x, block.gate.weight)
    chosen = route(logits, block.gate.correction, block.spec.router, x.dtype)
    total = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(chosen.ids[token], chosen.weights[token], strict=True):
            module = block.experts[int(expert)]
            y = gated_mlp(x[token], module.gate_up_proj.weight, module.down_proj.weight)
            total[token] += weight * y
    return total


@torch.no_grad()
def test_experts_and_shared_ones_with_and_without_a_gate() -> None:
    x = torch.randn(7, H)
    for spec in ({}, {"shared_size": 6}, {"shared_size": 6, "shared_gate": True}):
        block = make_block(**spec)
        expected = routed(block, x)
        if block.shared_experts is not None:
            shared = gated_mlp(
                x,
                block.shared_experts.gate_up_proj.weight,
                block.shared_experts.down_proj.weight,
            )
            if block.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(
                    functional.linear(x, block.shared_expert_gate.weight)
                )
            expected = expected + shared
        torch.testing.assert_close(block(x), expected)


@torch.no_grad()
def test_the_sum_over_ranks_is_taken_once_of_all() -> None:
    block, x = make_block(shared_size=6), torch.randn(3, H)
    calls = []

    def join(part: torch.Tensor) -> torch.Tensor:
        calls.append(part.clone())
        return part * 2

    expected = block(x)
    block.join = join
    assert torch.equal(block(x), expected * 2)
    assert len(calls) == 1 and torch.equal(calls[0], expected)


def test_a_share_has_all_experts_with_a_part_of_their_size() -> None:
    spec = make_block(shared_size=6).spec
    share = spec.share(2)
    assert (share.intermediate_size, share.shared_size) == (5, 3)
    assert share.router == spec.router
    assert spec.why_not_split(2) is None
    reason = spec.why_not_split(3)
    assert reason is not None and reason.startswith("the intermediate size of an expert, 10")
    assert spec.num_weights(H) == H * (3 * (5 * F + 6) + 5)
    assert spec.num_weights(H, active=True) == H * (3 * (2 * F + 6) + 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_a_router_may_be_fp32(dtype: torch.dtype) -> None:
    for fp32_logits in (True, False):
        router = RouterSpec(5, 2)
        spec = MoESpec(router=router, intermediate_size=F, fp32_logits=fp32_logits)
        block = SparseMLP(H, spec, dtype=dtype, device=CPU)
        logits = block.gate(torch.zeros(2, H, dtype=dtype))
        assert logits.dtype == (torch.float32 if fp32_logits else dtype)


@torch.no_grad()
def test_experts_that_are_stored_unlike_are_multiplied_each_by_its_own_method() -> None:
    block, x = make_block(), torch.randn(7, H)
    expected = routed(block, x)
    linear = block.experts[3].down_proj
    weight, method = linear.weight, TurnedMethod()
    linear.use(method, torch.float32, CPU)
    method.load_part(linear, "weight", 0, 0, weight)
    torch.testing.assert_close(block(x), expected)


class TurnedMethod(DenseMethod):
    """Stores the weight's negative."""

    def load_part(self, linear, parameter, index, first_row, rows) -> None:
        super().load_part(linear, parameter, index, first_row, -rows)

    def apply(self, linear, x, out_dtype=None) -> torch.Tensor:
        return -super().apply(linear, x, out_dtype)


def quantized_experts(methods: BlockQuantizedMethods) -> Experts:
    """gate_up in Q4_K, down in Q6_K, as llama.cpp's Q4_K_M has them."""
    spec = MoESpec(router=RouterSpec(3, 2), intermediate_size=256)
    experts = Experts(256, spec, dtype=torch.float32, device=CPU)
    for seed, (name, linears) in enumerate(
        (("blocks, offsets", experts.linears.gate_up), ("bytes, blocks", experts.linears.down))
    ):
        method = methods.of(BLOCK_FORMATS[name])
        assert method is not None
        for at, linear in enumerate(linears):
            assert isinstance(linear, Linear)
            linear.use(method, torch.float32, CPU)
            codes = random_codes(BLOCK_FORMATS[name], linear.output_size, 256, seed=3 * seed + at)
            for index, size in enumerate(linear.part_sizes):
                start = linear.part_start(index)
                rows = codes.rows(start, start + size)
                method.load_quantized(linear, index, 0, rows)
            linear.finish()
    return experts


@torch.no_grad()
@pytest.mark.parametrize("name", ["native", "triton"])
def test_down_may_have_another_block_format_than_gate_and_up(
    name: str, kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "triton":
        pytest.importorskip("triton")
        linears = TritonLinears(TORCH_OPERATORS, batch_invariant=False)
        experts = quantized_experts(BlockQuantizedMethods(None, linears))
    else:
        experts = quantized_experts(BlockQuantizedMethods(kernels))
    x, ids = torch.randn(4, 256), torch.tensor([[0, 2], [1, 2], [0, 1], [0, 2]])
    routing = Routing(ids, torch.rand(4, 2))
    expected = quantized_experts(BlockQuantizedMethods())(x, routing)
    # Which waits for the device to say who has which experts.
    monkeypatch.setattr("quire.layers.experts.mix_experts", None)
    result = experts(x, routing)
    assert (result - expected).norm() / expected.norm() < 2e-3
