"""fp8 linears by the Triton kernels, in the interpreter, beside the numbers that they stand for."""

import pytest
import torch

pytest.importorskip("triton")

from tests.formats.block_quantized.test_triton_method import (
    FAST,
    INVARIANT,
    distance,
    filled,
    numbers,
)
from tests.formats.block_quantized_samples import FP8
from tests.kernels.cpu.test_float8 import random_codes

from quire.formats.block_quantized.float8_method import TritonFloat8Method
from quire.formats.block_quantized.weights import BlockFormat, UnpackedRows
from quire.formats.weight_format import ExpertLinears, LinearMethod
from quire.kernels.activations import Gating
from quire.kernels.routing import Routing

ROWS = BlockFormat("fp8", 8, 0, is_float8=True, scale_dtype=torch.float32)
BLOCK_FORMATS = {"groups": FP8, "rows": ROWS}


def random_rows(block_format: BlockFormat, num_outputs: int, num_inputs: int) -> UnpackedRows:
    torch.manual_seed(num_outputs)
    codes = random_codes(num_outputs, num_inputs)
    groups = num_inputs // (block_format.group_size or num_inputs)
    return UnpackedRows(block_format, codes, torch.rand(num_outputs, groups) * 0.001)


def method_of(block_format: BlockFormat, *, invariant: bool = False) -> LinearMethod:
    method = (INVARIANT if invariant else FAST).of(block_format)
    assert isinstance(method, TritonFloat8Method)
    return method


@pytest.mark.parametrize("num_rows", [3, 20, 40])
@pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_products_are_those_of_the_numbers(
    block_format: BlockFormat, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonFloat8Method, "most_rows", 32)
    rows, method = random_rows(block_format, 20, 256), method_of(block_format)
    linear = filled(method, rows, torch.bfloat16, has_bias=True)
    assert linear.bias is not None
    x = numbers(1, num_rows, 256).bfloat16()
    wanted = x.double() @ rows.numbers().double().T + linear.bias.double()
    found = method.apply(linear, x, torch.float32)
    assert found.shape == (1, num_rows, 20)
    # More than 32 rows meet numbers that are rounded to bf16.
    assert distance(found, wanted) < (1e-6 if num_rows <= 32 else 1e-2)
    assert distance(method.apply(linear, x), wanted) < 4e-3
    gate, up = wanted.bfloat16().double().chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    assert distance(method.silu_mul(linear, x), gated) < 1e-2


@pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_rows_are_invariant_if_asked_for(
    block_format: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonFloat8Method, "most_rows", 32)
    method = method_of(block_format, invariant=True)
    linear = filled(method, random_rows(block_format, 20, 256), torch.bfloat16)
    x = numbers(70, 256).bfloat16()
    for call in (method.apply, method.silu_mul):
        whole = call(linear, x)
        assert torch.equal(call(linear, x[3:4]), whole[3:4])
        assert torch.equal(call(linear, x[30:60]), whole[30:60])


@pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_rows_come_back_and_the_size_is_that_of_the_tensors(block_format: BlockFormat) -> None:
    rows, method = random_rows(block_format, 20, 256), method_of(block_format)
    linear = filled(method, rows, torch.bfloat16)
    source = method.tie(linear, torch.nn.Parameter(torch.empty(20, 256)))
    assert source is not None and method.is_exact
    picked = torch.tensor([19, 3, 3])
    assert torch.equal(source.unpack(picked), rows.numbers()[picked].bfloat16())
    weight = linear.state.weight  # type: ignore[attr-defined]
    num_bytes = weight.codes.nbytes + weight.scales.nbytes
    assert method.num_bytes(20, 256, torch.bfloat16) == num_bytes


def test_a_code_of_nan_makes_its_group_nan() -> None:
    rows, method = random_rows(FP8, 20, 256), method_of(FP8)
    rows.codes[7, 200] = 0xFF
    found = method.apply(filled(method, rows, torch.bfloat16), numbers(2, 256).bfloat16())
    assert found.isnan().any(0).nonzero().tolist() == [[7]]


def test_experts_of_both_sizes_of_groups_are_multiplied_at_once() -> None:
    up, down = method_of(FP8), method_of(ROWS)
    assert up.groups_experts and up.takes_experts_with(down)
    rows = [[random_rows(FP8, 64 + at, 128) for at in (0, 2)], [random_rows(ROWS, 128, 32)] * 2]
    rows[0] = [each.rows(0, 64) for each in rows[0]]
    layer = ExpertLinears(
        tuple(filled(up, each, torch.float32) for each in rows[0]),
        tuple(filled(down, each, torch.float32) for each in rows[1]),
        Gating(),
    )
    x, ids = numbers(3, 128), torch.tensor([[0, 1], [1, 0], [1, 0]])
    weights = torch.tensor([[0.3, 0.7], [1.0, 0.0], [0.5, 0.5]])
    wanted = torch.zeros(3, 128)
    for expert in (0, 1):
        gate, value = (x @ rows[0][expert].numbers().T).chunk(2, -1)
        outputs = (torch.nn.functional.silu(gate) * value) @ rows[1][expert].numbers().T
        wanted += outputs * weights[ids == expert][:, None]
    assert distance(up.experts(layer, x, Routing(ids, weights)), wanted) < 1e-5


def test_groups_that_no_tile_fits_into_are_dequantized() -> None:
    assert FAST.of(BlockFormat("fp8", 8, 24, is_float8=True, scale_dtype=torch.float32)) is None
