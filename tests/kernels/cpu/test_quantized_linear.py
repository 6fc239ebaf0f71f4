"""int8 and int4 linears: the integers exactly, the rest within fp32's rounding, and bits that
depend on nothing but the row and the output.

The references are torch's `quantize` and fp64. int8 and int4 add up rounded terms of groups, which
torch's methods repeat to the bit where the processor has fused multiply-adds
(`tests/formats/test_packed.py`); against fp64 the bound is 2^-23 of the terms' magnitudes for each,
or two without.
"""

import hashlib

import pytest
import torch
from tests.pairwise import pairwise
from torch.nn import functional

from quire.kernels.cpu.abi import Epilogue, WeightLayout
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.options import NATIVE_KERNELS
from quire.kernels.quantize import (
    INT4_GROUPS_PER_SCALE,
    INT8_GROUP,
    quantize_groups,
    quantize_int4,
    quantize_int8_weight,
    rotate_blocks,
    rotation_size,
)

FORMATS = {"int8": (WeightLayout.INT8, INT8_GROUP), "int4": (WeightLayout.INT4, 32)}
FORMATS["int8, whole rows"] = (WeightLayout.INT8, 0)
FORMATS["int4-64"] = (WeightLayout.INT4, 64)
# Digests of results, computed on x86-64 (avx2): of all instruction sets with fused multiply-adds.
KNOWN = {
    "int8": "40bea62c31baae3b",
    "int8, whole rows": "a0d3903597f6d77d",
    "int4": "f1b0ea6ed0e4c1ae",
    "int4-64": "5c3a76ed48f325b4",
}
SHAPES = [(1, 1), (31, 7), (33, 77), (100, 130), (48, 256), (64, 768)]


def _random(*shape, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def _quantize(x):
    """x [N, K] -> q [N, K], scales [N, 1]: x ~ q * scales. No row of zeros."""
    largest = x.float().abs().amax(-1, keepdim=True)
    # A tensor above, as torch takes the reciprocal of what a number is divided by.
    return (x.float() * (torch.full_like(largest, 127) / largest)).round(), largest / 127


def _pack(name, weight, **options):
    weight_format, group_size = FORMATS[name]
    packed = PackedLinear(weight_format, *weight.shape, group_size=group_size, **options)
    packed.pack(weight, 0)
    packed.finish()
    return packed


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


# ---- against references --------------------------------------------------------------------------


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_of_whole_rows_is_the_exact_sum_times_two_scales(kernels: NativeKernels, shape, dtype):
    weight, x = _random(*shape, scale=0.05, dtype=dtype), _random(5, shape[1], seed=1, dtype=dtype)
    (q, q_scale), (w, w_scale) = _quantize(x), _quantize(weight)
    exact = (q.double() @ w.double().T).float()  # as the kernel converts its int32
    expected = exact * q_scale * w_scale.T
    result = apply(kernels, _pack("int8, whole rows", weight), x, out_dtype=torch.float32)
    assert torch.equal(result, expected)


def _rotated(x):
    """x [N, K] -> fp32."""
    return rotate_blocks(x, rotation_size(x.shape[1]))


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_the_sum_of_its_rotated_groups(kernels: NativeKernels, shape, dtype):
    weight, x = _random(*shape, scale=0.05, dtype=dtype), _random(5, shape[1], seed=1, dtype=dtype)
    levels, scales = quantize_int8_weight(weight)
    q, x_scales = quantize_groups(_rotated(x), INT8_GROUP)
    padded = functional.pad(levels.double(), (0, q[0].numel() - shape[1])).view(
        len(levels), *q[0].shape
    )
    terms = torch.einsum("mgk,ngk->mng", q.double(), padded) * x_scales[:, None].double()
    expected = terms.sum(-1) * scales.double()
    bound = terms.abs().sum(-1) * scales * 2.0**-23 * (3 + 2 * terms.shape[-1])
    result = apply(kernels, _pack("int8", weight), x, out_dtype=torch.float32)
    assert ((result - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_within_the_steps_of_both_sides(kernels: NativeKernels, shape):
    weight, x = _random(*shape, scale=0.05), _random(5, shape[1], seed=1)
    turned_x, turned = _rotated(x), _rotated(weight) / rotation_size(shape[1])
    half_w, half_x = turned.abs().amax(-1) / 254, turned_x.abs().amax(-1)[:, None] / 254
    bound = half_x * turned.abs().sum(-1) + half_w * turned_x.abs().sum(-1, keepdim=True)
    bound += shape[1] * half_x * half_w
    result = apply(kernels, _pack("int8", weight), x)
    assert ((result - x @ weight.T).abs() <= bound * 1.001 + 1e-6).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_an_outlier_leaves_the_other_inputs_their_bits(kernels: NativeKernels, name):
    """A channel of a hundred times the rest, which a scale for each token would give all levels."""
    weight, x = _random(96, 1024, scale=0.05), _random(8, 1024, seed=1)
    weight[:, 288:320] = 0.0  # so that all of the result comes from the others
    packed, exact = _pack(name, weight), x.double() @ weight.double().T
    usual = apply(kernels, packed, x)
    x[:, 300] = 100.0
    error = (apply(kernels, packed, x) - usual).square().mean().sqrt()
    q, scale = _quantize(x)
    of_a_token = ((q * scale).double() @ weight.double().T - exact).square().mean().sqrt()
    assert error < {"int8": 0.2, "int4": 0.5}[name] * of_a_token, error / of_a_token


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_the_sum_of_its_groups(kernels: NativeKernels, shape, group_size):
    weight, x = _random(*shape, scale=0.05), _random(5, shape[1], seed=1)
    _check_int4_sums(kernels, weight, x, group_size)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_int4_sums_of_the_largest_levels_are_exact(kernels: NativeKernels, group_size, sign):
    """Nearly all levels are 15 and all of x is 127 or -127, so partial sums are the largest."""
    weight = torch.ones(40, 256)
    weight[:, ::32] = -1.0
    for num_rows in (1, 7):
        _check_int4_sums(kernels, weight, torch.full((num_rows, 256), sign), group_size)


def _check_int4_sums(kernels: NativeKernels, weight, x, group_size):
    """Compare the product of int4 weights and int8 inputs with its sum in fp64."""
    rows = quantize_int4(weight, group_size)
    shared = INT4_GROUPS_PER_SCALE * group_size
    q, q_scales = quantize_groups(x, shared)
    num_groups = rows.levels.shape[1]
    x_groups = (q * q_scales[..., None]).double().view(len(x), -1, group_size)[:, :num_groups]
    dots = torch.einsum("mgk,ngk->mng", x_groups, rows.levels.double())
    above = dots * rows.scales * rows.scale_factors[:, None].double()
    below = x_groups.sum(-1)[:, None] * rows.offsets * rows.offset_factors[:, None].double()
    expected = (above - below).sum(-1)
    magnitude = above.abs().sum(-1) + below.abs().sum(-1)
    packed = _pack("int4" if group_size == 32 else "int4-64", weight)
    result = apply(kernels, packed, x, out_dtype=torch.float32)
    bound = magnitude * 2.0**-23 * (6 + 2 * dots.shape[-1])
    assert ((result - expected).abs() <= bound).all()


def test_int4_is_as_close_as_four_bits_can_be(kernels: NativeKernels):
    weight, x = _random(96, 512, scale=0.05, dtype=torch.bfloat16), _random(8, 512, seed=1)
    exact = x.double() @ weight.double().T
    result = apply(kernels, _pack("int4", weight), x)
    # A normal group's 16 levels have an error of 0.08 of its deviation; plain rounding between its
    # extremes, one of 0.09.
    assert (result - exact).square().mean().sqrt() < 0.085 * exact.square().mean().sqrt()


def test_one_hot_rows_read_the_weights_back(kernels: NativeKernels, name):
    weight = _random(70, 96, scale=0.05)
    if name == "int8, whole rows":
        levels, scales = _quantize(weight)
        stored = levels * scales
    elif name == "int8":
        levels, scales = quantize_int8_weight(weight)
        stored = _rotated(levels * scales[:, None])
    else:
        stored = quantize_int4(weight, FORMATS[name][1]).dequantized().flatten(1)[:, :96]
    result = apply(kernels, _pack(name, weight), torch.eye(96))
    torch.testing.assert_close(result.T, stored, rtol=1e-6, atol=1e-7)


def test_int8_weights_are_taken_as_they_are(kernels: NativeKernels):
    weight, x = _random(75, 130, scale=0.05), _random(5, 130, seed=1)
    q, scales = _quantize(weight)
    for interleave in (0, 25):
        outputs = 2 * interleave or 75
        packed = PackedLinear(WeightLayout.INT8, outputs, 130, interleave=interleave)
        for first in range(0, outputs, 30):
            rows = slice(first, min(first + 30, outputs))
            packed.pack_int8(q[rows].to(torch.int8), scales[rows, 0], first)
        whole = _pack("int8, whole rows", weight[:outputs])
        assert torch.equal(apply(kernels, packed, x), apply(kernels, whole, x))


def test_int8_weights_of_another_shape_are_refused(library: NativeLibrary):
    packed, numbers = _pack("int8", _random(7, 32)), torch.zeros(3, 32, dtype=torch.int8)
    for rows, scales in ((numbers[:, 1:], torch.ones(3)), (numbers, torch.ones(2))):
        with pytest.raises(ValueError, match="rows"):
            packed.pack_int8(rows, scales, 0)
    with pytest.raises(ValueError, match="int8"):
        packed.pack_int8(numbers.float(), torch.ones(3), 0)
    with pytest.raises(ValueError, match="outputs"):
        packed.pack_int8(numbers, torch.ones(3), 5)
    with pytest.raises(ValueError, match="INT4"):
        _pack("int4", _random(7, 32)).pack_int8(numbers, torch.ones(3), 0)


# ---- the law -------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_in_every_batch(kernels: NativeKernels, name):
    weight, x = _random(80, 200, scale=0.05), _random(130, 200, seed=1, dtype=torch.bfloat16)
    packed = _pack(name, weight)
    whole = apply(kernels, packed, x, out_dtype=torch.float32)
    for num_rows in range(1, 65):
        start = 130 - num_rows if num_rows % 2 else 0
        rows = slice(start, start + num_rows)
        part = apply(kernels, packed, x[rows], out_dtype=torch.float32)
        assert torch.equal(part, whole[rows]), num_rows


@pytest.mark.parametrize("name", ["int4", "int4-64"])
@pytest.mark.parametrize("inputs", [64, 130, 390])
def test_an_int4_row_has_the_bits_that_it_has_alone(kernels: NativeKernels, name, inputs):
    """With wide inputs, and where a scale of x belongs to one pair of groups only."""
    weight, x = _random(70, inputs, scale=0.05), _random(25, inputs, seed=1)
    weight_format, group_size = FORMATS[name]
    packed = PackedLinear(weight_format, 70, inputs, group_size=group_size, num_wide=8)
    packed.set_wide_inputs(torch.arange(3, 59, 7, dtype=torch.int32))
    packed.pack(weight, 0)
    alone = torch.cat([apply(kernels, packed, row[None]) for row in x])
    for num_rows in range(2, 26):
        assert torch.equal(apply(kernels, packed, x[:num_rows]), alone[:num_rows]), num_rows


def test_a_row_has_the_same_bits_with_any_number_of_threads(library: NativeLibrary, name):
    weight, x = _random(224, 300, scale=0.05), _random(37, 300, seed=1, dtype=torch.bfloat16)
    packed = _pack(name, weight)
    results = [apply(NativeKernels(library, None, n), packed, x) for n in (1, 2, 3, 5)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_instruction_sets_with_fused_multiply_adds_agree(library: NativeLibrary, name):
    packed, x = _pack(name, _random(50, 333)), _random(9, 333, seed=1, dtype=torch.bfloat16)
    results = [
        apply(NativeKernels(library, isa, 1), packed, x, out_dtype=torch.float32)
        for isa in library.isas()
        if isa != "portable" or name == "int8, whole rows"
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_bits_are_those_of_other_processor_families(kernels: NativeKernels, name):
    """Uniform numbers: torch's normal distribution depends on the processor."""
    if kernels.isa == "portable" and name != "int8, whole rows":
        pytest.skip("these instructions have no fused multiply-adds")
    generator = torch.Generator().manual_seed(7)
    weight, x = (torch.rand(rows, 768, generator=generator) * 2 - 1 for rows in (80, 19))
    x[:, 8] *= 30
    result = apply(kernels, _pack(name, weight), x)
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16] == KNOWN[name]


def test_neighbours_and_strides_do_not_matter(kernels: NativeKernels, name):
    packed, x = _pack(name, _random(40, 64)), _random(6, 64, seed=1)
    alone = apply(kernels, packed, x[:1])
    neighbours = x.clone()
    neighbours[1:] *= 1e20
    wide = torch.full((6, 100), torch.nan)
    wide[:, :64] = neighbours
    out = torch.full((6, 50), -1.0)
    apply(kernels, packed, wide[:, :64], out=out[:, :40])
    assert torch.equal(out[:1, :40], alone)
    assert (out[:, 40:] == -1).all()


# ---- what follows the product --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_residual(kernels: NativeKernels, name, dtype):
    weight, bias = _random(70, 96, scale=0.1), _random(70, seed=2)
    x, residual = _random(7, 96, seed=1, dtype=dtype), _random(7, 70, seed=3, dtype=dtype)
    plain = apply(kernels, _pack(name, weight), x, out_dtype=torch.float32)
    packed = _pack(name, weight, has_bias=True)
    packed.set_bias(bias)
    assert torch.equal(apply(kernels, packed, x), (plain + bias).to(dtype))
    out = residual.clone()
    apply(kernels, packed, x, out=out, epilogue=Epilogue.ADD_RESIDUAL)
    assert torch.equal(out, residual + (plain + bias).to(dtype))


@pytest.mark.parametrize("size", [16, 23, 48])
def test_gate_and_up(kernels: NativeKernels, name, size):
    gate, up = _random(size, 96, scale=0.2), _random(size, 96, seed=4, scale=0.2)
    x = _random(7, 96, seed=1)
    expected = functional.silu(apply(kernels, _pack(name, gate), x))
    expected *= apply(kernels, _pack(name, up), x)
    fused = _pack(name, torch.cat([gate, up]), interleave=size)
    result = apply(kernels, fused, x, epilogue=Epilogue.SILU_MUL)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)


# ---- edges ---------------------------------------------------------------------------------------


def test_zeros_give_zeros(kernels: NativeKernels, name):
    weight, x = _random(40, 96), _random(3, 96, seed=1)
    weight[5] = 0
    x[1] = 0
    result = apply(kernels, _pack(name, weight), x)
    assert not result[1].any() and not result[:, 5].any()
    assert result[0].count_nonzero() == 39


@pytest.mark.parametrize("value", [0.25, -0.25, 1e-3])
def test_weights_that_are_all_alike_are_kept(kernels: NativeKernels, name, value):
    result = apply(kernels, _pack(name, torch.full((9, 96), value)), torch.eye(96))
    rtol = 2.0**-8 if name.startswith("int4") else 1e-5  # a row's factors are bf16 numbers
    torch.testing.assert_close(result, torch.full((96, 9), value), rtol=rtol, atol=0)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_affect_only_their_row_and_output(kernels: NativeKernels, name, broken):
    weight, x = _random(40, 96), _random(13, 96, seed=1)
    whole = apply(kernels, _pack(name, weight), x)
    weight[5, 40] = broken
    x[2, 50] = broken
    result = apply(kernels, _pack(name, weight), x)
    is_nan = result.isnan()
    assert is_nan[2].all() and is_nan[:, 5].all()
    assert is_nan.sum() == 40 + 13 - 1
    assert torch.equal(result[~is_nan], whole[~is_nan])


def test_tiny_and_huge_rows_keep_their_scale(kernels: NativeKernels, name):
    packed, x = _pack(name, _random(40, 96)), _random(3, 96, seed=1)
    plain = apply(kernels, packed, x)
    for factor in (2.0**-60, 2.0**60):
        assert torch.equal(apply(kernels, packed, x * factor), plain * factor)
