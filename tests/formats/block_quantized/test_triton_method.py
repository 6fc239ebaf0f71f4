"""Block-quantized linears by the Triton kernels, in the interpreter, beside torch's reference."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.formats.block_quantized_samples import BLOCK_FORMATS, INT8, NVFP4, random_codes

from quire.formats.block_quantized import triton_kept
from quire.formats.block_quantized.kept_weight import KeptWeight
from quire.formats.block_quantized.linear_methods import (
    BlockQuantizedMethods,
    BlockQuantizedTorchMethod,
)
from quire.formats.block_quantized.weights import (
    BlockFormat,
    InputOrder,
    UnpackedRows,
)
from quire.formats.int8 import GivenInt8TorchMethod
from quire.formats.weight_format import ExpertLinears, LinearMethod, LinearModule, TritonLinears
from quire.kernels.activations import Gating
from quire.kernels.operators import TORCH_OPERATORS
from quire.kernels.routing import Routing

CPU = torch.device("cpu")
FAST = BlockQuantizedMethods(None, TritonLinears(TORCH_OPERATORS, batch_invariant=False))
INVARIANT = BlockQuantizedMethods(None, TritonLinears(TORCH_OPERATORS, batch_invariant=True))


def filled(
    method: LinearMethod | None, codes: UnpackedRows, dtype: torch.dtype, *, has_bias: bool = False
) -> LinearModule:
    """In slices, not in order."""
    assert method is not None and method.takes_quantized(0)
    num_outputs, num_inputs = codes.codes.shape
    half = num_outputs // 2
    linear = LinearModule(num_inputs, (half, half), has_bias=has_bias, gated=True)
    method.create(linear, has_bias, dtype, CPU)
    for index in (1, 0):
        for start, stop in ((5, half), (0, 5)):
            rows = codes.rows(index * half + start, index * half + stop)
            method.load_quantized(linear, index, start, rows)
        if has_bias:
            method.load_part(linear, "bias", index, 0, numbers(half, seed=index))
    method.finish(linear)
    return linear


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_products_are_those_of_the_reference(block_format: BlockFormat) -> None:
    codes = random_codes(block_format, 16, 512)
    method, reference = FAST.of(block_format), BlockQuantizedTorchMethod(block_format)
    linear = filled(method, codes, torch.float32, has_bias=True)
    wanted = filled(reference, codes, torch.float32, has_bias=True)
    assert method is not None
    x = numbers(17, 512)
    result = method.apply(linear, x)
    assert torch.equal(result, reference.apply(wanted, x))
    # A row has the same bits whatever tile it is in.
    assert torch.equal(method.apply(linear, x[3:6]), result[3:6])


@pytest.mark.parametrize(
    "block_format",
    [
        BlockFormat("Q2_K", 4, 16, has_offsets=True, block_size=256),
        BlockFormat("Q3_K", 4, 16, zero=4, block_size=256),
        BlockFormat("GPTQ", 8, 64, has_zeros=True),
        BlockFormat("Q5_1", 5, 32, has_offsets=True),
        NVFP4,
    ],
    ids=lambda block_format: block_format.name,
)
def test_rarer_block_formats_are_multiplied_and_given_back(block_format: BlockFormat) -> None:
    codes = random_codes(block_format, 16, 256)
    if codes.zeros is not None:
        codes.zeros[::2] += 240
    method, reference = FAST.of(block_format), BlockQuantizedTorchMethod(block_format)
    linear, wanted = (filled(each, codes, torch.float32) for each in (method, reference))
    assert method is not None
    x = numbers(2, 256)
    assert torch.equal(method.apply(linear, x), reference.apply(wanted, x))
    source = method.tie(linear, torch.nn.Parameter(torch.empty(16, 256)))
    assert source is not None
    rows = torch.tensor([9, 2])
    assert torch.equal(source.unpack(rows), codes.numbers()[rows])


@pytest.mark.parametrize("name", ["flat, a zero", "bytes, blocks, offsets"])
def test_the_last_stretch_may_be_short_and_rows_short_numbers(name: str) -> None:
    block_format = BLOCK_FORMATS[name]
    num_inputs = 256 if block_format.block_size else 352
    codes = random_codes(block_format, 20, num_inputs)
    method, reference = INVARIANT.of(block_format), BlockQuantizedTorchMethod(block_format)
    linear = filled(method, codes, torch.bfloat16)
    wanted = filled(reference, codes, torch.bfloat16)
    assert method is not None
    x = numbers(2, 3, num_inputs).bfloat16()
    result = method.apply(linear, x)
    assert result.shape == (2, 3, 20) and result.dtype == torch.bfloat16
    assert distance(result, reference.apply(wanted, x)) < 2e-3
    wide = method.apply(linear, x, torch.float32)
    assert torch.equal(wide, reference.apply(wanted, x, torch.float32))
    assert distance(method.silu_mul(linear, x), reference.silu_mul(wanted, x)) < 1e-2


@pytest.mark.parametrize(
    ("name", "num_rows", "num_stretches"),
    # Eight stretches or more are cut into slices.
    [*((name, 9, 1) for name in BLOCK_FORMATS), ("a table", 20, 9), ("blocks, offsets", 70, 8)],
)
def test_some_rows_meet_numbers_that_are_made_in_the_kernel(
    name: str, num_rows: int, num_stretches: int
) -> None:
    block_format = BLOCK_FORMATS[name]
    num_inputs = 256 * num_stretches - (0 if block_format.block_size else 128)
    codes = random_codes(block_format, 70 if name == "flat, zeros, 128" else 20, num_inputs)
    method = FAST.of(block_format)
    linear = filled(method, codes, torch.bfloat16, has_bias=num_rows == 20)
    assert method is not None
    x = numbers(1, num_rows, num_inputs).bfloat16()
    wanted = x.double() @ codes.numbers().bfloat16().double().T
    if linear.bias is not None:
        wanted += linear.bias.double()
    found = method.apply(linear, x, torch.float32)
    assert found.shape == wanted.shape and distance(found, wanted) < 1e-5
    assert distance(method.apply(linear, x), wanted) < 4e-3
    # Fewer rows are rounded to int8.
    assert 1e-3 < distance(method.apply(linear, x[:, :8], torch.float32), wanted[:, :8]) < 2e-2


def test_float_scales_with_factors_meet_numbers_and_experts() -> None:
    """As NVFP4 has them: a step of some rows, experts, and the bytes in memory."""
    codes = random_codes(NVFP4, 20, 336)
    method = FAST.of(NVFP4)
    linear = filled(method, codes, torch.bfloat16)
    assert method is not None
    x = numbers(9, 336).bfloat16()
    wanted = x.double() @ codes.numbers().bfloat16().double().T
    assert distance(method.apply(linear, x, torch.float32), wanted) < 1e-5
    assert 1e-3 < distance(method.apply(linear, x[:8], torch.float32), wanted[:8]) < 2e-2
    assert_grouped(NVFP4)
    assert method.num_bytes(1, 4096, torch.bfloat16) / 512 == 4.625


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_are_multiplied_by_numbers(
    has_bias: bool, out_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kept.TritonKeptMethod, "most_rows", 4)
    monkeypatch.setattr(triton_kept, "_PIECE_BYTES", 12 * 512)
    block_format = BLOCK_FORMATS["blocks, offsets"]
    codes = random_codes(block_format, 20, 256)
    method = FAST.of(block_format)
    linear = filled(method, codes, torch.bfloat16, has_bias=has_bias)
    assert method is not None
    x = numbers(5, 256).bfloat16()
    found = method.apply(linear, x, out_dtype)
    assert found.dtype == (out_dtype or torch.bfloat16)
    wanted = torch.nn.functional.linear(x, codes.numbers().bfloat16(), linear.bias)
    torch.testing.assert_close(found, wanted.to(found.dtype), atol=1e-2, rtol=1e-2)
    # Not where bits are to be the same in any batch.
    same = INVARIANT.of(block_format)
    assert same is not None
    assert torch.equal(same.apply(linear, x)[:2], same.apply(linear, x[:2]))


@pytest.mark.parametrize(
    "block_format", [*BLOCK_FORMATS.values(), INT8], ids=[*BLOCK_FORMATS, "int8"]
)
def test_rows_come_back_and_the_size_is_that_of_the_tensors(block_format: BlockFormat) -> None:
    codes = random_codes(block_format, 40, 256)
    method = FAST.of(block_format)
    for dtype in (torch.float32, torch.bfloat16):
        linear = filled(method, codes, dtype)
        assert method is not None and method.is_exact
        source = method.tie(linear, torch.nn.Parameter(torch.empty(40, 256)))
        assert source is not None
        rows = torch.tensor([39, 3, 3])
        assert torch.equal(source.unpack(rows), codes.numbers()[rows].to(dtype))
    kept = [*linear.parameters()]
    if isinstance(linear.state, KeptWeight):
        kept += [linear.state.weight.levels, linear.state.weight.words]
    assert method.num_bytes(40, 256, torch.bfloat16) == sum(each.nbytes for each in kept)


def test_each_layout_takes_the_expected_bits_per_weight() -> None:
    per_weight = {
        name: method.num_bytes(1, 4096, torch.bfloat16) / 512
        for name, block_format in BLOCK_FORMATS.items()
        if (method := FAST.of(block_format)) is not None
    }
    assert per_weight == {
        "flat, a zero": 4.5,
        "flat, offsets": 5.0,
        "flat, zeros, 128": 4.25,
        "flat, zeros, bf16": 4.375,
        "a table": 4.5,
        "blocks, offsets": 4.625,
        "blocks, a table": 4.375,
        "bytes": 8.5,
        "bytes, blocks": 8.625,
        "bytes, blocks, offsets": 8.625,
    }


def test_int8_codes_are_multiplied_as_int8() -> None:
    codes = random_codes(INT8, 24, 96)
    method, reference = FAST.of(INT8), GivenInt8TorchMethod()
    linear, wanted = (filled(each, codes, torch.float32) for each in (method, reference))
    assert method is not None
    x = numbers(7, 96)
    assert torch.equal(method.apply(linear, x), reference.apply(wanted, x))


def test_columns_in_another_order_meet_their_inputs() -> None:
    inputs = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    block_format = replace(BLOCK_FORMATS["flat, zeros, bf16"], input_order=InputOrder.of(inputs))
    codes = replace(random_codes(block_format, 24, 256), block_format=block_format)
    method, reference = FAST.of(block_format), BlockQuantizedTorchMethod(block_format)
    linear, wanted = (filled(each, codes, torch.float32) for each in (method, reference))
    assert method is not None and not method.groups_experts
    x = numbers(3, 256)
    assert torch.equal(method.apply(linear, x), reference.apply(wanted, x))
    source = method.tie(linear, torch.nn.Parameter(torch.empty(24, 256)))
    assert source is not None
    assert torch.equal(source.unpack(torch.tensor([5])), codes.numbers()[5:6])
    assert method.num_bytes(24, 256, torch.float32) == 24 * 256 * 35 // 64 + 8 * 256


@pytest.mark.parametrize("name", ["flat, a zero", "bytes"])
def test_experts_are_multiplied_at_once(name: str) -> None:
    assert_grouped(BLOCK_FORMATS[name])


def assert_grouped(block_format: BlockFormat) -> None:
    method, reference = FAST.of(block_format), BlockQuantizedTorchMethod(block_format)
    assert method is not None and method.groups_experts
    layers = []
    for each in (method, reference):
        gate_up, down = (
            [
                filled(each, random_codes(block_format, *shape, seed=seed), torch.float32)
                for seed in range(3)
            ]
            for shape in ((64, 64), (64, 32))
        )
        layers.append(ExpertLinears(tuple(gate_up), tuple(down), Gating()))
    x = numbers(4, 64)
    ids = torch.tensor([[0, 2], [2, 0], [2, 1], [2, 0]])
    routing = Routing(ids, torch.rand(4, 2, generator=torch.Generator().manual_seed(2)))
    found = method.experts(layers[0], x, routing)
    wanted = reference.experts(layers[1], x, routing)
    assert distance(found, wanted) < 2e-3  # a number near a half may be rounded the other way
    alone = method.experts(layers[0], x[2:3], Routing(ids[2:3], routing.weights[2:3]))
    assert torch.equal(alone, found[2:3])


def test_a_whole_row_may_share_a_scale() -> None:
    block_format = BlockFormat("W4A16", 4, 0, zero=8)
    codes = random_codes(block_format, 16, 200)
    method = FAST.of(block_format)
    linear = filled(method, codes, torch.float32)
    assert method is not None
    x = numbers(2, 200)
    assert distance(method.apply(linear, x), x @ codes.numbers().T) < 2e-2
    source = method.tie(linear, torch.nn.Parameter(torch.empty(16, 200)))
    assert source is not None
    assert torch.equal(source.unpack(torch.tensor([5])), codes.numbers()[5:6])


@pytest.mark.parametrize(
    "block_format",
    [
        BlockFormat("of 24", 4, 24),
        BlockFormat("blocks of 128", 4, 32, block_size=128),
        BlockFormat("fp32", 4, 32, scale_dtype=torch.float32),
        BlockFormat("nine bits", 9, 32),
        BlockFormat("zeros of 16", 4, 16, has_zeros=True),
        BlockFormat("bytes, no zero", 8, 32, has_offsets=True),
        BlockFormat("bytes, another zero", 8, 32, zero=129),
    ],
    ids=lambda block_format: block_format.name,
)
def test_other_block_formats_are_dequantized(block_format: BlockFormat) -> None:
    assert FAST.of(block_format) is None


def test_bytes_without_zeros_of_their_groups_are_signed_by_128() -> None:
    codes = random_codes(BlockFormat("W8A16", 8, 64, zero=128), 16, 64)
    codes.codes[::2, ::2] = torch.tensor([0, 255]).byte().repeat(16)
    method = FAST.of(codes.block_format)
    linear = filled(method, codes, torch.float32)
    assert method is not None
    source = method.tie(linear, torch.nn.Parameter(torch.empty(16, 64)))
    assert source is not None
    assert torch.equal(source.unpack(torch.arange(16)), codes.numbers())


def test_offsets_that_the_layout_cannot_hold_are_refused() -> None:
    codes = random_codes(BLOCK_FORMATS["blocks, offsets"], 16, 256)
    assert codes.offsets is not None
    codes.offsets[3, 5] = 200
    with pytest.raises(ValueError, match="Q4_K has an offset of 200, but the largest"):
        filled(FAST.of(codes.block_format), codes, torch.float32)
