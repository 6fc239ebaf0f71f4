"""Block-quantized weights: their numbers by the definition, and torch's products of them."""

from dataclasses import replace

import pytest
import torch
from tests.formats.block_quantized_samples import BLOCK_FORMATS, INT8, NVFP4, random_codes

from quire.formats.block_quantized import linear_methods
from quire.formats.block_quantized.linear_methods import (
    CHUNK_INPUTS,
    BlockQuantizedMethods,
    PartsMethod,
    multiply_block_quantized,
)
from quire.formats.block_quantized.weights import (
    BlockFormat,
    InputOrder,
    UnpackedRows,
)
from quire.formats.dense import DenseMethod
from quire.formats.weight_format import LinearMethod, LinearModule
from quire.kernels.quantize import quantize_groups, quantize_int8

CPU = torch.device("cpu")
ALL = BLOCK_FORMATS | {"floats, a factor": NVFP4}


def by_definition(codes: UnpackedRows, row: int, column: int) -> float:
    """One number, in Python's floats."""
    block_format = codes.block_format
    group = column // block_format.group_size
    code = int(codes.codes[row, column])
    value = block_format.table[code] if block_format.table else code
    scale = float(codes.scales[row, group])
    offset = 0.0 if codes.offsets is None else float(codes.offsets[row, group])
    if block_format.has_output_factors:
        scale *= float(codes.factors[row])
    elif codes.factors is not None:
        of_scales, of_offsets = codes.factors[row, column // block_format.block_size].tolist()
        scale, offset = scale * of_scales, offset * of_offsets
    zero = block_format.zero if codes.zeros is None else int(codes.zeros[row, group])
    return scale * (value - zero) - offset


@pytest.mark.parametrize("block_format", ALL.values(), ids=ALL)
def test_numbers_are_those_of_the_definition(block_format: BlockFormat) -> None:
    codes = random_codes(block_format, 5, 512)
    numbers = codes.numbers()
    for row, column in [(0, 0), (1, 31), (2, 32), (3, 255), (4, 511), (0, 256), (2, 300)]:
        wanted = by_definition(codes, row, column)
        assert numbers[row, column].item() == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("block_format", ALL.values(), ids=ALL)
def test_rows_and_columns_are_those_of_the_numbers(block_format: BlockFormat) -> None:
    rows = random_codes(block_format, 9, 768)
    numbers = rows.numbers()
    assert torch.equal(rows.rows(2, 5).numbers(), numbers[2:5])
    picked = torch.tensor([8, 0, 3])
    assert torch.equal(rows.picked(picked).numbers(), numbers[picked])
    assert torch.equal(rows.columns(256, 512).numbers(), numbers[:, 256:512])


@pytest.mark.parametrize("block_format", ALL.values(), ids=ALL)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_near_that_of_the_numbers(block_format: BlockFormat, has_bias: bool) -> None:
    codes = random_codes(block_format, 48, 512)
    linear = LinearModule(512, (48,), has_bias=has_bias)
    method = BlockQuantizedMethods().of(block_format)
    assert method is not None and method.takes_quantized(0)
    method.create(linear, has_bias, torch.float32, CPU)
    for start in (32, 0, 16):
        part = codes.rows(start, start + 16)
        method.load_quantized(linear, 0, start, part)
    bias = torch.randn(48) if has_bias else torch.zeros(48)
    if has_bias:
        method.load_part(linear, "bias", 0, 0, bias)
    method.finish(linear)
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ codes.numbers().double().T + bias
    result = method.apply(linear, x)
    assert (result - exact).norm() / exact.norm() < 2e-2
    # With activations that are multiples of their scales nothing is rounded but fp32 sums.
    q, scales = quantize_groups(x, CHUNK_INPUTS)
    rounded = (q * scales[..., None]).view(7, 512)
    exact = rounded.double() @ codes.numbers().double().T + bias
    assert (result - exact).norm() / exact.norm() < 1e-6
    alone = torch.cat([method.apply(linear, row[None]) for row in x])
    assert torch.equal(alone, result)
    source = method.tie(linear, torch.nn.Parameter(torch.empty(48, 512)))
    assert source is not None
    wanted = torch.tensor([47, 3])
    assert torch.equal(source.unpack(wanted), codes.numbers()[wanted])
    assert method.num_bytes(48, 512, torch.float32) >= 48 * 512


def test_a_large_weight_is_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a product takes beside the codes does not grow with the outputs."""
    codes = random_codes(BLOCK_FORMATS["blocks, offsets"], 48, 512)
    linear, method = (
        LinearModule(512, (48,), has_bias=True),
        BlockQuantizedMethods().of(codes.block_format),
    )
    assert method is not None
    method.create(linear, True, torch.float32, CPU)
    method.load_quantized(linear, 0, 0, codes)
    method.load_part(linear, "bias", 0, 0, torch.randn(48))
    x = torch.randn(67, 512)
    whole, sizes = method.apply(linear, x), []

    def multiply(x: torch.Tensor, codes: UnpackedRows) -> torch.Tensor:
        sizes.append((*x.shape, *codes.codes.shape))
        return multiply_block_quantized(x, codes)

    monkeypatch.setattr(linear_methods, "multiply_block_quantized", multiply)
    monkeypatch.setattr(linear_methods, "_MAX_WEIGHTS", 20 * 512 + 3)
    assert torch.equal(method.apply(linear, x), whole)
    assert sizes == [(m, 512, n, 512) for n in (20, 20, 8) for m in (64, 3)]


def test_parts_of_unlike_block_formats_are_separate_products() -> None:
    block_formats = [BLOCK_FORMATS["blocks, offsets"], BLOCK_FORMATS["bytes, blocks"]]
    quantized = [BlockQuantizedMethods().of(block_format) for block_format in block_formats]
    methods = [*(method for method in quantized if method is not None), DenseMethod()]
    sizes = (32, 16, 8)
    linear = LinearModule(512, sizes, has_bias=True)
    method = PartsMethod(methods, sizes)
    method.create(linear, True, torch.float32, CPU)
    numbers = []
    for index, block_format in enumerate(block_formats):
        codes = random_codes(block_format, sizes[index], 512, seed=index)
        method.load_quantized(linear, index, 0, codes)
        numbers.append(codes.numbers())
    assert not method.takes_quantized(2)
    numbers.append(torch.randn(8, 512) * 0.02)
    method.load_part(linear, "weight", 2, 0, numbers[2])
    biases = torch.randn(56)
    for index, bias in enumerate(biases.split(sizes)):
        method.load_part(linear, "bias", index, 0, bias)
    method.finish(linear)
    x = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(1))
    exact = x @ torch.cat(numbers).T + biases
    assert (method.apply(linear, x) - exact).norm() / exact.norm() < 2e-2
    assert method.num_bytes(56, 512, torch.float32) == sum(
        each.num_bytes(size, 512, torch.float32) for each, size in zip(methods, sizes, strict=True)
    )


def test_a_group_that_is_not_finite_makes_its_row_nan() -> None:
    x = torch.randn(2, 64)
    x[1, 40] = torch.inf
    q, scales = quantize_groups(x, 32)
    assert scales[0].isfinite().all() and scales[1].isnan().tolist() == [False, True]
    assert q.isfinite().all() and (q[1, 1] == 0).all()


def filled(block_format: BlockFormat, codes: UnpackedRows) -> tuple[LinearMethod, LinearModule]:
    """A linear that is kept as these codes."""
    method = BlockQuantizedMethods().of(block_format)
    assert method is not None
    linear = LinearModule(codes.codes.shape[1], (len(codes.codes),), has_bias=False)
    method.create(linear, False, torch.float32, CPU)
    method.load_quantized(linear, 0, 0, codes)
    method.finish(linear)
    return method, linear


def test_columns_in_another_order_meet_their_inputs() -> None:
    inputs = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    plain = BlockFormat("GPTQ", 4, 64, has_zeros=True)
    block_format = replace(plain, input_order=InputOrder.of(inputs))
    assert block_format == replace(plain, input_order=InputOrder.of(inputs.clone()))
    assert (
        block_format != plain and str(block_format) != str(plain) and len(str(block_format)) < 400
    )
    assert torch.equal(block_format.input_order.inputs().long(), inputs)
    assert block_format.alignment == 0 and plain.alignment == 64
    stored = random_codes(plain, 24, 256)
    codes = replace(stored, block_format=block_format)
    assert torch.equal(codes.numbers()[:, inputs], stored.numbers())
    assert torch.equal(codes.rows(3, 9).numbers(), codes.numbers()[3:9])
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    found = apply(filled(block_format, codes), x)
    assert torch.equal(found, apply(filled(plain, stored), x[:, inputs]))
    exact = x @ codes.numbers().T
    assert (found - exact).norm() / exact.norm() < 2e-2


def apply(filled: tuple[LinearMethod, LinearModule], x: torch.Tensor) -> torch.Tensor:
    method, linear = filled
    return method.apply(linear, x)


def test_int8_codes_are_multiplied_with_a_scale_for_each_token() -> None:
    assert INT8.is_int8 and not any(block_format.is_int8 for block_format in BLOCK_FORMATS.values())
    codes = random_codes(INT8, 24, 96)
    method, linear = filled(INT8, codes)
    assert method.is_exact and method.takes_quantized(0)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    q, x_scales = quantize_int8(x)
    dots = (q.double() @ (codes.codes.double() - 128).T).float()
    assert torch.equal(method.apply(linear, x), dots * x_scales[:, None] * codes.scales[:, 0])
    exact = x @ codes.numbers().T
    assert (method.apply(linear, x) - exact).norm() / exact.norm() < 2e-2
    source = method.tie(linear, torch.nn.Parameter(torch.empty(24, 96)))
    assert source is not None
    wanted = torch.tensor([23, 3])
    assert torch.equal(source.unpack(wanted), codes.numbers()[wanted])
    assert torch.equal(codes.columns(5, 20).numbers(), codes.numbers()[:, 5:20])
