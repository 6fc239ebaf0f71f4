"""Linears of a checkpoint's codes: torch's products of the same codes, to the bit where fp32 is
added with one rounding, and bits that depend on nothing but the row and the output.

The reference, `formats.block_quantized.linear_methods.multiply_block_quantized`, rounds as the
kernels do where the processor has fused multiply-adds; without them each of a group's two terms is
rounded once more.
"""

import hashlib
from collections.abc import Callable

import pytest
import torch
from tests.formats.block_quantized_samples import BLOCK_FORMATS, random_codes
from tests.kernels.cpu.expert_calls import linears_by_head
from tests.pairwise import pairwise
from torch.nn import functional

from quire.formats.block_quantized.linear_methods import multiply_block_quantized
from quire.formats.block_quantized.weights import BlockFormat, UnpackedRows
from quire.kernels.cpu.abi import Epilogue
from quire.kernels.cpu.block_quantized.kernel_formats import KernelBlockFormat
from quire.kernels.cpu.block_quantized.quantized_linear import BlockQuantizedLinear
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.linear import apply
from quire.kernels.options import NATIVE_KERNELS

WIDE_TABLE = (-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
MORE_BLOCK_FORMATS = {
    "flat, five bits": BlockFormat("Q5_0", 5, 32, zero=16),
    "flat, five bits, offsets": BlockFormat("Q5_1", 5, 32, has_offsets=True),
    "flat, bytes, 128": BlockFormat("W8A16", 8, 128, zero=128, scale_dtype=torch.bfloat16),
    "blocks, two bits": BlockFormat("Q2_K", 4, 16, has_offsets=True, block_size=256),
    "blocks, three bits": BlockFormat("Q3_K", 4, 16, zero=4, block_size=256),
    "a wide table": BlockFormat("IQ4_NL", 4, 32, table=WIDE_TABLE),
    "a table, zero": BlockFormat("table", 4, 64, zero=3, table=tuple(range(-17, 15, 2))),
    "blocks, a wide table": BlockFormat("IQ4_XS", 4, 32, table=WIDE_TABLE, block_size=256),
    "flat, bytes, zeros": BlockFormat("GPTQ", 8, 64, has_zeros=True),
    "flat, bytes, offsets": BlockFormat("W8", 8, 32, has_offsets=True),
    "flat, a zero, offsets": BlockFormat("W4", 4, 64, zero=3, has_offsets=True),
}
ALL = BLOCK_FORMATS | MORE_BLOCK_FORMATS
# Digests of results, computed on x86-64 (avx2): of all instruction sets with fused multiply-adds.
KNOWN = {
    "flat, a zero": "e2c3cc38baadf940",
    "flat, offsets": "88113f10e4cc8bd8",
    "flat, zeros, 128": "5f03d4ba3121e558",
    "flat, zeros, bf16": "101362c255a5206b",
    "a table": "9b8bf978125c0abb",
    "blocks, offsets": "734f1a9d1c13c9fe",
    "blocks, a table": "743eb34ada9e72b8",
    "bytes": "8827de068357c898",
    "bytes, blocks": "8fc5549c643d55f8",
    "bytes, blocks, offsets": "89249bcbcfc3eb24",
    "flat, five bits": "b5e2094e2870ef04",
    "flat, five bits, offsets": "b9436c294be9d861",
    "flat, bytes, 128": "713620fd88b8cfe3",
    "blocks, two bits": "4000a0d7e0e5093d",
    "blocks, three bits": "c139b096403bf883",
    "a wide table": "331c69ea2c3929ac",
    "a table, zero": "d469f0b3d76773f4",
    "blocks, a wide table": "34babb223ecec55a",
    "flat, bytes, zeros": "df69e385480abe7c",
    "flat, bytes, offsets": "4ce827df50940e0c",
    "flat, a zero, offsets": "dca2d3e62edd3dc8",
}
EACH = pytest.mark.parametrize("block_format", ALL.values(), ids=ALL)
SOME = pytest.mark.parametrize(
    "block_format", [ALL["flat, zeros, 128"], ALL["bytes, blocks, offsets"]], ids=["flat", "blocks"]
)


def _x(rows: int, inputs: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _form(block_format: BlockFormat) -> KernelBlockFormat:
    return KernelBlockFormat(
        *(
            block_format.width,
            block_format.group_size,
            block_format.zero,
            block_format.block_size,
            block_format.scale_dtype,
        ),
        *(block_format.has_zeros, block_format.has_offsets, block_format.table),
    )


def _pack(
    codes: UnpackedRows, rows_at_once: int = 0, *, order: torch.Tensor | None = None, **options
):
    num_rows, num_inputs = codes.codes.shape
    linear = BlockQuantizedLinear(_form(codes.block_format), num_rows, num_inputs, **options)
    if order is not None:
        linear.set_input_order(order)
    zeros = codes.zeros
    seconds = codes.offsets if zeros is None else zeros.to(codes.block_format.scale_dtype)
    whole = (codes.codes, codes.scales, seconds, codes.factors)
    step = rows_at_once or num_rows
    for first in reversed(range(0, num_rows, step)):
        part = [None if each is None else each[first : first + step] for each in whole]
        linear.pack_codes(*part, first)
    return linear


def _sizes(block_format: BlockFormat) -> list[int]:
    """Inputs: as few as can be, and such that end within what is stored together."""
    unit = block_format.block_size or block_format.group_size
    return [unit, 3 * unit, 768]


# ---- against the reference -----------------------------------------------------------------------


@pairwise(kernels=NATIVE_KERNELS)
@EACH
@pytest.mark.parametrize("outputs", [1, 33, 80])
def test_products_are_those_of_torch(
    kernels: NativeKernels, block_format: BlockFormat, outputs: int
) -> None:
    for inputs in _sizes(block_format):
        codes, x = random_codes(block_format, outputs, inputs, seed=inputs), _x(29, inputs)
        expected = multiply_block_quantized(x, codes)
        result = apply(kernels, _pack(codes), x)
        if kernels.isa != "portable":
            assert torch.equal(result, expected)
        bound = 2.0**-22 * inputs / 32 * expected.abs().max()
        assert ((result - expected).abs() <= bound).all()


@pytest.mark.parametrize("name", ALL)
def test_bits_are_those_of_other_processor_families(kernels: NativeKernels, name: str) -> None:
    """Uniform numbers: torch's normal distribution depends on the processor."""
    if kernels.isa == "portable":
        pytest.skip("these instructions have no fused multiply-adds")
    x = torch.rand(19, 768, generator=torch.Generator().manual_seed(7)) * 2 - 1
    x[:, 8] *= 30
    result = apply(kernels, _pack(random_codes(ALL[name], 80, 768)), x)
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16] == KNOWN[name]


@EACH
def test_the_largest_sums_are_those_of_torch(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    """Of a group below 2^24, of a block's groups beyond, where fp32 would round each of them."""
    codes = random_codes(block_format, 33, 768)
    codes.codes.fill_(2**block_format.width - 1)
    if block_format.block_size:
        codes.scales.copy_(torch.randint(100, 128, codes.scales.shape))
    x = _x(5, 768).abs() + 3
    result, expected = apply(kernels, _pack(codes), x), multiply_block_quantized(x, codes)
    if kernels.isa != "portable":
        assert torch.equal(result, expected)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)


@EACH
def test_sums_of_the_largest_products_are_exact(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    """All of x is 127 or -127 and all codes are at an end, where sums of 16 bits would overflow."""
    codes = random_codes(block_format, 36, 256)
    ends = torch.tensor([2**block_format.width - 1, 0], dtype=torch.uint8)
    codes.codes.copy_(ends[torch.arange(36) // 18, None])
    signs = torch.ones(6, 256)
    signs[1:3] = -1.0  # one row, then several
    signs[3, ::2] = -1.0
    signs[4, 1::2] = -1.0
    signs[5, 2::4] = -1.0
    codes.codes[9:18, 1::2] = ends[1]
    codes.codes[27:, 1::2] = ends[0]
    expected, linear = multiply_block_quantized(signs, codes), _pack(codes)
    for rows in (slice(0, 1), slice(1, 2), slice(0, 6)):
        result = apply(kernels, linear, signs[rows])
        if kernels.isa != "portable":
            assert torch.equal(result, expected[rows])
        torch.testing.assert_close(result, expected[rows], rtol=1e-5, atol=1e-5)
    many = apply(kernels, linear, signs.repeat(9, 1))
    assert torch.equal(many, apply(kernels, linear, signs).repeat(9, 1))


@EACH
def test_bf16_rows_are_rounded_as_what_they_are(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    linear, x = _pack(random_codes(block_format, 40, 512)), _x(9, 512, torch.bfloat16)
    wide = apply(kernels, linear, x.float())
    assert torch.equal(apply(kernels, linear, x, out_dtype=torch.float32), wide)
    assert torch.equal(apply(kernels, linear, x), wide.bfloat16())


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_as_the_numbers_that_they_stand_for(
    library: NativeLibrary, block_format: BlockFormat, dtype: torch.dtype
) -> None:
    codes = random_codes(block_format, 70, 512)
    linear = _pack(codes, 9, dtype=dtype)
    outputs = torch.tensor([69, 0, 31, 32, 5])
    assert torch.equal(linear.unpack(outputs), codes.numbers().to(dtype)[outputs])


@SOME
def test_inputs_in_another_order_meet_their_weights(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    codes, x = random_codes(block_format, 50, 512), _x(13, 512)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    linear = _pack(codes, order=order, dtype=torch.float32)
    assert torch.equal(apply(kernels, linear, x), apply(kernels, _pack(codes), x[:, order]))
    numbers = torch.empty(50, 512)
    numbers[:, order] = codes.numbers()
    assert torch.equal(linear.unpack(torch.arange(50)), numbers)


def _with_wide(linear: BlockQuantizedLinear, *inputs: int) -> BlockQuantizedLinear:
    linear.set_wide_inputs(torch.tensor(inputs, dtype=torch.int32))
    return linear


@EACH
def test_wide_inputs_are_multiplied_as_torch_does_in_any_batch(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    codes, x, inputs = random_codes(block_format, 80, 768), _x(29, 768), (5, 300, 301, 767)
    x[:, 5] *= 10_000.0
    linear = _with_wide(_pack(codes), *inputs)
    result = apply(kernels, linear, x)
    expected = multiply_block_quantized(x, codes, torch.tensor(inputs, dtype=torch.int32))
    if kernels.isa != "portable":
        assert torch.equal(result, expected)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5 * expected.abs().max())
    alone = torch.cat([apply(kernels, linear, row[None]) for row in x])
    assert torch.equal(alone, result)
    # What is near them is rounded as if they were zeros.
    x[:, inputs] = 0.0
    assert torch.equal(apply(kernels, linear, x), apply(kernels, _pack(codes), x))


@SOME
def test_wide_inputs_of_reordered_and_gated_linears(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    codes, x = random_codes(block_format, 46, 512), _x(13, 512, torch.bfloat16)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    plain = _with_wide(_pack(codes), 0, 77)
    wide = order[torch.tensor([0, 77])].sort().values.tolist()
    result = apply(kernels, _with_wide(_pack(codes, order=order), *wide), x)
    assert torch.equal(result, apply(kernels, plain, x[:, order].contiguous()))
    gate, up = apply(kernels, plain, x.float()).split(23, dim=1)
    fused = _with_wide(_pack(codes, interleave=23), 0, 77)
    found = apply(kernels, fused, x.float(), epilogue=Epilogue.SILU_MUL)
    torch.testing.assert_close(found, functional.silu(gate) * up, rtol=1e-6, atol=1e-7)
    assert fused.kind != plain.kind != _pack(codes).kind


# ---- the law -------------------------------------------------------------------------------------


@EACH
def test_a_row_has_the_same_bits_in_every_batch(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    linear, x = _pack(random_codes(block_format, 48, 768)), _x(130, 768, torch.bfloat16)
    whole = apply(kernels, linear, x, out_dtype=torch.float32)
    for num_rows in range(1, 71):
        start = 130 - num_rows if num_rows % 2 else 0
        rows = slice(start, start + num_rows)
        part = apply(kernels, linear, x[rows], out_dtype=torch.float32)
        assert torch.equal(part, whole[rows]), num_rows


@EACH
def test_a_row_has_the_same_bits_with_any_number_of_threads(
    library: NativeLibrary, block_format: BlockFormat
) -> None:
    linear, x = _pack(random_codes(block_format, 224, 512)), _x(37, 512, torch.bfloat16)
    results = [apply(NativeKernels(library, None, n), linear, x) for n in (1, 2, 3, 5)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_many_inputs_of_many_rows_are_several_groups_of_rows(kernels: NativeKernels) -> None:
    codes, x = random_codes(BLOCK_FORMATS["bytes"], 33, 4096), _x(110, 4096)
    linear = _pack(codes)
    alone = torch.cat([apply(kernels, linear, row[None]) for row in x])
    assert torch.equal(apply(kernels, linear, x), alone)


@SOME
@pytest.mark.parametrize("inputs", [256, 4096])
def test_few_rows_have_the_bits_of_one(
    kernels: NativeKernels, block_format: BlockFormat, inputs: int
) -> None:
    """Two and three rows read short units in turn, and long units side by side."""
    linear, x = _pack(random_codes(block_format, 40, inputs)), _x(4, inputs)
    alone = torch.cat([apply(kernels, linear, row[None]) for row in x])
    for count in (2, 3, 4):
        assert torch.equal(apply(kernels, linear, x[:count]), alone[:count])


@SOME
def test_neighbours_and_strides_do_not_matter(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    linear, x = _pack(random_codes(block_format, 40, 256)), _x(6, 256)
    alone = apply(kernels, linear, x[:1])
    wide = torch.full((6, 300), torch.nan)
    wide[:, :256] = x
    wide[1:, :256] *= 1e20
    out = torch.full((6, 50), -1.0)
    apply(kernels, linear, wide[:, :256], out=out[:, :40])
    assert torch.equal(out[:1, :40], alone)
    assert (out[:, 40:] == -1).all()


# ---- what surrounds the product ------------------------------------------------------------------


@SOME
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_residual(
    kernels: NativeKernels, block_format: BlockFormat, dtype: torch.dtype
) -> None:
    codes, bias = random_codes(block_format, 70, 256), _x(1, 70)[0]
    x, residual = _x(7, 256, dtype), _x(7, 70, dtype, seed=3)
    plain = apply(kernels, _pack(codes), x, out_dtype=torch.float32)
    linear = _pack(codes, has_bias=True)
    linear.set_bias(bias)
    assert torch.equal(apply(kernels, linear, x), (plain + bias).to(dtype))
    out = residual.clone()
    apply(kernels, linear, x, out=out, epilogue=Epilogue.ADD_RESIDUAL)
    assert torch.equal(out, residual + (plain + bias).to(dtype))


@SOME
@pytest.mark.parametrize("size", [16, 23, 48])
def test_gate_and_up(kernels: NativeKernels, block_format: BlockFormat, size: int) -> None:
    codes, x = random_codes(block_format, 2 * size, 256), _x(7, 256)
    gate, up = apply(kernels, _pack(codes), x).split(size, dim=1)
    fused = _pack(codes, 5, interleave=size)
    result = apply(kernels, fused, x, epilogue=Epilogue.SILU_MUL)
    torch.testing.assert_close(result, functional.silu(gate) * up, rtol=1e-6, atol=1e-7)
    assert torch.equal(fused.unpack(torch.arange(2 * size)), codes.numbers().bfloat16())


@SOME
def test_many_linears_at_once(kernels: NativeKernels, block_format: BlockFormat) -> None:
    linears = [_pack(random_codes(block_format, 40, 256, seed=seed)) for seed in range(3)]
    x = torch.stack([_x(5, 256, seed=seed) for seed in range(3)], dim=1)
    result = linears_by_head(kernels, linears, x)
    for at, linear in enumerate(linears):
        assert torch.equal(result[:, at], apply(kernels, linear, x[:, at].contiguous()))


@SOME
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_affect_only_their_row(
    kernels: NativeKernels, block_format: BlockFormat, broken: float
) -> None:
    linear, x = _pack(random_codes(block_format, 40, 512)), _x(13, 512)
    whole_x, others = x.clone(), [row for row in range(13) if row != 2]
    x[2, 300] = broken
    for wide in ((), (7,), (300,)):
        _with_wide(linear, *wide)
        whole, result = (apply(kernels, linear, each) for each in (whole_x, x))
        assert result[2].isnan().all()
        assert torch.equal(result[others], whole[others])


@EACH
def test_zeros_give_zeros_and_any_scale_is_kept(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    linear, x = _pack(random_codes(block_format, 40, 256)), _x(3, 256)
    plain = apply(kernels, linear, x)
    for factor in (0.0, 2.0**-60, 2.0**60):
        assert torch.equal(apply(kernels, linear, x * factor), plain * factor)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_all_scales_are_what_their_bits_say(
    kernels: NativeKernels, scale_dtype: torch.dtype
) -> None:
    """Powers of two and neighbours, down to those that have no leading one."""
    finite = torch.arange(0x7C00 if scale_dtype is torch.float16 else 0x7F80).short()
    scales = finite.view(scale_dtype)[:: 61 if scale_dtype is torch.float16 else 67]
    scales = torch.cat((scales, -scales))[: len(scales) * 2 // 2 * 2, None].contiguous()
    block_format = BlockFormat("flat", 4, 32, zero=8, scale_dtype=scale_dtype)
    codes = UnpackedRows(block_format, torch.full((len(scales), 32), 9, dtype=torch.uint8), scales)
    linear = _pack(codes, dtype=torch.float32)
    assert torch.equal(linear.unpack(torch.arange(len(scales)))[:, :1], scales.float())
    x = torch.zeros(1, 32)
    x[0, 3] = 127.0  # whose scale is 1
    wide = scales.float().abs() < 2.0**120
    result = apply(kernels, linear, x)[0]
    assert torch.equal(result[wide[:, 0]], (127 * scales.float()[:, 0])[wide[:, 0]])


# ---- refusals ------------------------------------------------------------------------------------

Refused = Callable[[BlockQuantizedLinear], object]


@pytest.mark.parametrize(
    ("named", "act"),
    [
        ("codes", lambda each: each.pack_codes(_bytes(3, 63), _halves(3, 2), None, None, 0)),
        ("codes", lambda each: each.pack_codes(_halves(3, 64), _halves(3, 2), None, None, 0)),
        ("scales", lambda each: each.pack_codes(_bytes(3, 64), _halves(3, 3), None, None, 0)),
        ("seconds", lambda each: each.pack_codes(*[_bytes(3, 64), *[_halves(3, 2)] * 2], None, 0)),
        ("factors", lambda each: each.pack_codes(_bytes(3, 64), *_two(), _halves(3, 1, 2), 0)),
        ("outputs", lambda each: each.pack_codes(_bytes(3, 64), _halves(3, 2), None, None, 38)),
        ("rows", lambda each: each.pack(torch.zeros(3, 64), 0)),
        ("rows", lambda each: each.pack_blocks("Q4_0", _bytes(3, 35), 0)),
        ("name", lambda each: each.pack_blocks("Q4_K", _bytes(3, 36), 0)),
        ("name", lambda each: each.pack_blocks("IQ1_S", _bytes(3, 36), 0)),
        ("order", lambda each: each.set_input_order(torch.zeros(64))),
        ("inputs", lambda each: _with_wide(each, 3, 64)),
        ("inputs", lambda each: _with_wide(each, 3, 3)),
        ("outputs", lambda each: each.unpack(torch.tensor([40]))),
    ],
)
def test_errors_name_the_bad_argument(library: NativeLibrary, named: str, act: Refused) -> None:
    linear = BlockQuantizedLinear(KernelBlockFormat(4, 32, zero=8), 40, 64)
    with pytest.raises(ValueError, match=named):
        act(linear)


@pytest.mark.parametrize("zero", [-1.0, 7.5, 129.0, torch.nan])
def test_zeros_that_bytes_cannot_take_up_are_refused(library: NativeLibrary, zero: float) -> None:
    linear = BlockQuantizedLinear(KernelBlockFormat(4, 32, has_zeros=True), 40, 64)
    with pytest.raises(ValueError, match="zeros must be integers"):
        linear.pack_codes(_bytes(3, 64), _halves(3, 2), _halves(3, 2) + zero, None, 0)


@EACH
def test_the_widest_zeros_and_codes_of_many_rows(
    kernels: NativeKernels, block_format: BlockFormat
) -> None:
    """Rows that share expanded weights have the bits of rows alone at the ends of every range."""
    codes, x = random_codes(block_format, 40, 768), _x(17, 768)
    codes.codes[::2] = 2**block_format.width - 1
    codes.codes[1::2] = 0
    if codes.zeros is not None:
        codes.zeros[:, ::2] = min(2**block_format.width, 255)
        codes.zeros[:, 1::2] = 0
    linear = _pack(codes)
    alone = torch.cat([apply(kernels, linear, row[None]) for row in x])
    assert torch.equal(apply(kernels, linear, x), alone)


@pytest.mark.parametrize(
    "form",
    [
        KernelBlockFormat(3, 32),
        KernelBlockFormat(4, 16),
        KernelBlockFormat(8, 32, table=tuple(range(16))),
        KernelBlockFormat(4, 32, table=tuple(range(15))),
        KernelBlockFormat(6, 32, block=256),
        KernelBlockFormat(4, 32, block=128),
        KernelBlockFormat(4, 32, has_zeros=True, has_offsets=True),
        KernelBlockFormat(4, 32, scale_dtype=torch.float32),
    ],
    ids=str,
)
def test_forms_without_kernels_are_refused(library: NativeLibrary, form: KernelBlockFormat) -> None:
    assert not form.has_kernels
    with pytest.raises(ValueError, match="form"):
        BlockQuantizedLinear(form, 40, 256)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def _two() -> tuple[torch.Tensor, None]:
    return _halves(3, 2), None
