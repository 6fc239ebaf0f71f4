"""The Triton product of int8 weights and int8 activations.

It computes y = x W^T + b, where x is rotated and has a scale for each group g of 256 inputs, and W
was rotated before it was rounded. The reference is `formats.int8`:

    y[m, n] = w_scale[n] * sum over g of x_scale[m, g] * dot[m, n, g] + b[n]

Each dot is an exact integer. Groups are summed in fp32, in ascending order, with one rounding for a
product and its addition; other operations are rounded one by one. No order depends on M, so a row
has the same bits in any batch as in the reference. Weights that a checkpoint stores in int8
(`Int8Weight.is_rotated` is false) are multiplied by x without rotation, and a row is one group.

W is the left operand of the tensor core's product, as in `skinny_matmul.py`. For up to 16 rows,
programs stream W as described there, with half the bytes. A stage has four tiles of 32 x 128: two
for each of two groups, or two of the gate and two of up. With more rows a program computes 64 x 64
elements.

Shapes: M rows, K inputs (in q padded to whole stages), N outputs (of which a gated product returns
half). Called by `formats.int8`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.quantize import INT8_GROUP, rotation_size
from quire.kernels.triton.linear.matmul import (
    load_rows,
    load_weight,
    store_transposed,
    tile_of_program,
)
from quire.kernels.triton.linear.quantize_groups import QuantizedGroups, quantize_groups
from quire.kernels.triton.linear.quantize_rows import quantize_rows

#: Maximum number of inputs of a weight that is not rotated: the dot of a longer row might not fit
#: 32 bits.
MAX_INPUTS = (2**31 - 1) // (127 * 128)

#: Maximum number of rows for which programs stream W. Gated products may not have more rows.
MAX_SKINNY_ROWS = 16
_ENOUGH_PROGRAMS = 128
_GROUPED_ROWS = 8


@dataclass(frozen=True, slots=True)
class _Int8Tiles:
    """The tile of a program in one launch; results don't depend on it."""

    rows: int
    outputs: int
    #: The number of groups of inputs in a stage.
    groups: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight as levels times scales."""

    #: Rounded weights, [N, K] int8.
    levels: torch.Tensor
    #: One scale for each output, [N] fp32.
    scales: torch.Tensor
    #: The bias, [N] of any floating dtype; None adds nothing.
    bias: torch.Tensor | None
    #: Whether `quantize_int8_weight` rotated the weight, so that x is rotated too.
    is_rotated: bool = True


def int8_matmul(
    x: torch.Tensor,
    weight: Int8Weight,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [..., K] of any floating dtype -> [..., N] in `out_dtype`: x's dtype (None), or fp32.

    If gated, the first half of the outputs are gates, and silu(gate) * up, [..., N/2], is returned
    with the roundings of `kernels.activations.gated`; x may then have at most MAX_SKINNY_ROWS rows.
    """
    num_outputs, num_inputs = weight.levels.shape
    if x.shape[-1] != num_inputs:
        raise ValueError(f"x is {tuple(x.shape)}, but weight needs [..., {num_inputs}]")
    check_sums(num_inputs, is_rotated=weight.is_rotated)
    width = num_outputs // 2 if gated else num_outputs
    out = torch.empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(x, weight, out.view(-1, width), gated)
    return out


def check_sums(num_inputs: int, *, is_rotated: bool) -> None:
    """Raises ValueError if a weight's sums might not fit 32 bits. A rotated weight always fits,
    since its dots have 256 inputs."""
    if not is_rotated and num_inputs > MAX_INPUTS:
        raise ValueError(
            f"a weight that is not rotated has {num_inputs} inputs, but may have at most"
            f" {MAX_INPUTS}; keep it dense"
        )


def quantize(x: torch.Tensor, multiple: int, *, is_rotated: bool) -> QuantizedGroups:
    """Quantize x [..., K]: rotated and by groups for a rotated weight, otherwise by rows. The width
    of q is a multiple of `multiple`, which is a multiple of 256."""
    if not is_rotated:
        return quantize_rows(x, multiple)
    rotation = rotation_size(x.shape[-1])
    return quantize_groups(x, INT8_GROUP, multiple, rotation=rotation, by_group=True)


def _tiles(num_rows: int, width: int, *, is_gated: bool) -> _Int8Tiles:
    if num_rows > MAX_SKINNY_ROWS:
        return _Int8Tiles(64, 64, 1, num_warps=4, num_stages=2)
    is_narrow = triton.cdiv(width, 32) < _ENOUGH_PROGRAMS
    rows, outputs = 8 if num_rows <= 8 else 16, 16 if is_narrow else 32
    return _Int8Tiles(rows, outputs, 1 if is_gated else 2, outputs // 16, num_stages=5)


def _launch(x: torch.Tensor, weight: Int8Weight, out: torch.Tensor, gated: bool) -> None:
    """`out` is [M, N], or [M, N/2] if gated, contiguous."""
    num_rows, width = out.shape
    num_inputs = weight.levels.shape[1]
    if gated and num_rows > MAX_SKINNY_ROWS:
        raise ValueError(
            f"x has {num_rows} rows, but a gated product may have at most {MAX_SKINNY_ROWS}"
        )
    tiles = _tiles(num_rows, width, is_gated=gated)
    stage = tiles.groups * INT8_GROUP
    rows = quantize(x, stage, is_rotated=weight.is_rotated)
    num_programs = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(width, tiles.outputs)
    int8_matmul_kernel[(num_programs,)](
        rows.q,
        rows.scales,
        weight.levels,
        weight.scales,
        weight.bias,
        out,
        num_rows,
        width,
        num_inputs,
        rows.q.stride(0),
        IS_GATED=gated,
        HAS_GROUPS=weight.is_rotated,
        IS_EVEN=num_inputs % stage == 0,
        GROUPS=tiles.groups,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        GROUP_M=_GROUPED_ROWS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def int8_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, x_stride] int8, x_stride a multiple of 256 GROUPS
    x_scales_ptr,  # [x_stride / 256, M], or [M] without HAS_GROUPS
    weight_ptr,  # [N, K] int8, or [2 N, K] if gated: gates, then ups
    scales_ptr,  # [N] or [2 N]
    bias_ptr,  # [N] or [2 N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    IS_GATED: tl.constexpr,
    HAS_GROUPS: tl.constexpr,  # x has a scale for each 256 inputs, not one for each row
    IS_EVEN: tl.constexpr,  # K is a multiple of 256 GROUPS
    GROUPS: tl.constexpr,  # groups of 256 inputs in an iteration
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # First, find the program's tile.
    rows, is_row, outputs, near = tile_of_program(num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M)
    inputs = tl.arange(0, 128)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    x_scales_ptrs = x_scales_ptr + rows
    first_ptrs = weight_ptr + near[:, None] * num_inputs + inputs[None, :]
    second_ptrs = weight_ptr + (near + num_outputs)[:, None] * num_inputs + inputs[None, :]

    # Then sum over the groups; the second sums are for up, if gated.
    first_sums = start_sums(BLOCK_N, BLOCK_M, HAS_GROUPS)
    second_sums = start_sums(BLOCK_N, BLOCK_M, HAS_GROUPS)
    for start in range(0, num_inputs, 256 * GROUPS):
        for group in tl.static_range(GROUPS):
            k = start + 256 * group
            x_scales = tl.load(x_scales_ptrs, is_row, other=0.0) if HAS_GROUPS else None
            x_scales_ptrs += num_rows
            low_x = tl.trans(load_rows(x_ptrs + k, is_row[:, None], inputs, 0, True))
            high_x = tl.trans(load_rows(x_ptrs + k + 128, is_row[:, None], inputs, 0, True))
            low = load_weight(first_ptrs + k, inputs, num_inputs - k, IS_EVEN)
            high = load_weight(first_ptrs + k + 128, inputs, num_inputs - k - 128, IS_EVEN)
            first_sums = add_group(first_sums, low, low_x, high, high_x, x_scales, HAS_GROUPS)
            if IS_GATED:
                low = load_weight(second_ptrs + k, inputs, num_inputs - k, IS_EVEN)
                high = load_weight(second_ptrs + k + 128, inputs, num_inputs - k - 128, IS_EVEN)
                second_sums = add_group(second_sums, low, low_x, high, high_x, x_scales, HAS_GROUPS)

    # Last, multiply by the scales, add the bias, and multiply up by silu(gate).
    dtype = out_ptr.dtype.element_ty
    x_scales = None if HAS_GROUPS else tl.load(x_scales_ptr + rows, is_row, other=0.0)
    result = scaled(first_sums, x_scales, scales_ptr, bias_ptr, near)
    if IS_GATED:
        up = scaled(second_sums, x_scales, scales_ptr, bias_ptr, num_outputs + near)
        gate = result.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    store_transposed(out_ptr, result, rows, is_row, outputs, num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def start_sums(  # type: ignore[no-untyped-def]
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, HAS_GROUPS: tl.constexpr
):
    """Zeros that `add_group` can add to."""
    return tl.zeros((BLOCK_N, BLOCK_M), tl.float32 if HAS_GROUPS else tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def add_group(  # type: ignore[no-untyped-def]
    sums, low, low_x, high, high_x, x_scales, HAS_GROUPS: tl.constexpr
):
    """Adds the product of 256 inputs, given as halves of the weight and of x, to the sums
    [outputs, rows]. With HAS_GROUPS the sums are fp32, otherwise integers."""
    if HAS_GROUPS:
        dots = tl.dot(low, low_x, out_dtype=tl.int32)
        dots = tl.dot(high, high_x, dots, out_dtype=tl.int32).to(tl.float32)
        sums = tl.fma(dots, tl.broadcast_to(x_scales[None, :], dots.shape), sums)
    else:
        sums = tl.dot(low, low_x, sums, out_dtype=tl.int32)
        sums = tl.dot(high, high_x, sums, out_dtype=tl.int32)
    return sums


@triton.jit
def scaled(sums, x_scales, scales_ptr, bias_ptr, places):  # type: ignore[no-untyped-def]
    """The sums [outputs, rows] times the scales, plus the bias, fp32.

    `x_scales` is None if the sums include them. `places` are the indices of the outputs' scales and
    biases.
    """
    result = sums.to(tl.float32)
    if x_scales is not None:
        result *= x_scales[None, :]
    result *= tl.load(scales_ptr + places)[:, None]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + places)[:, None].to(tl.float32)
    return result
