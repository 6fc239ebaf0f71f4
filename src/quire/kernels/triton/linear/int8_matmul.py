"""The Triton product of int8 weights and int8 activations.

y = x W^T + b of weights and activations in int8, each with a scale:

    y[m, n] = dot[m, n] * x_scale[m] * w_scale[n] + b[n],  dot = sum over k of x[m, k] w[n, k]

The dot is an exact integer, whatever the order, and the rest is rounded operation by operation:
so a row has the same bits in any batch, and those of `formats.int8`, the reference.

W is the left operand of the tensor core's product, as in `skinny_matmul.py`, and up to 16 rows all
that is said there holds with half the bytes: two tiles of 32 x 256 a stage, with a sum each, of
stretches of K or of gate and up. With more rows a program computes 64 x 64 or 128 x 128 elements.

Shapes: M rows, K inputs (in q padded to a multiple of 16), N outputs (of which a gated product
returns half). Called by `formats.int8`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.matmul import load_rows, load_weight, place_of
from quire.kernels.triton.linear.quantize_rows import quantize_rows

MAX_INPUTS = (2**31 - 1) // (127 * 127)
"""Beyond, a dot might not fit into 32 bits."""

MAX_SKINNY_ROWS = 16
_ENOUGH_PROGRAMS = 128
_GROUPED_ROWS = 8


@dataclass(frozen=True, slots=True)
class _Int8Tiles:
    """Of one launch; results don't depend on them."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """levels [N, K] int8 and scales [N] fp32: w ~ levels * scale. bias [N], of any floating dtype,
    or None."""

    levels: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None


def int8_matmul(
    x: torch.Tensor,
    weight: Int8Weight,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [..., K] of any floating dtype -> [..., N]; if gated, which needs at most MAX_SKINNY_ROWS
    rows: the first half of the outputs are gates, and [..., N/2] is returned, with `silu_mul`'s
    roundings. out_dtype: x's (None), or fp32."""
    num_outputs, num_inputs = weight.levels.shape
    if x.shape[-1] != num_inputs or num_inputs > MAX_INPUTS:
        raise ValueError(
            f"x is {tuple(x.shape)}, but weight needs [..., {num_inputs}], and at most {MAX_INPUTS}"
        )
    width = num_outputs // 2 if gated else num_outputs
    out = torch.empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(x, weight, out.view(-1, width), gated)
    return out


def _tiles(num_rows: int, width: int) -> _Int8Tiles:
    if num_rows > 64:
        return _Int8Tiles(128, 128, 128, num_warps=8, num_stages=3)
    if num_rows > MAX_SKINNY_ROWS:
        return _Int8Tiles(64, 64, 128, num_warps=4, num_stages=4)
    is_narrow = triton.cdiv(width, 32) < _ENOUGH_PROGRAMS
    outputs = 16 if is_narrow else 32
    return _Int8Tiles(8 if num_rows <= 8 else 16, outputs, 256, outputs // 16, num_stages=5)


def _launch(x: torch.Tensor, weight: Int8Weight, out: torch.Tensor, gated: bool) -> None:
    """out [M, N] or [M, N/2] contiguous."""
    rows = quantize_rows(x)
    num_rows, width = out.shape
    num_inputs = weight.levels.shape[1]
    if gated and num_rows > MAX_SKINNY_ROWS:
        raise ValueError(
            f"x has {num_rows} rows, but if gated at most {MAX_SKINNY_ROWS} are served"
        )
    tiles = _tiles(num_rows, width)
    is_paired = num_rows <= MAX_SKINNY_ROWS and not gated
    stretch = 2 * tiles.inputs if is_paired else tiles.inputs
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
        IS_PAIRED=is_paired,
        IS_EVEN=num_inputs % stretch == 0,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        GROUP_M=_GROUPED_ROWS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def int8_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K] int8, rows x_stride apart
    x_scales_ptr,  # [M]
    weight_ptr,  # [N, K] int8, or [2 N, K] if gated: gates, then ups
    scales_ptr,  # [N] or [2 N]
    bias_ptr,  # [N] or [2 N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    IS_GATED: tl.constexpr,
    IS_PAIRED: tl.constexpr,  # an iteration takes two tiles of inputs
    IS_EVEN: tl.constexpr,  # K is a multiple of what an iteration takes
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    STRETCH: tl.constexpr = 2 * BLOCK_K if IS_PAIRED else BLOCK_K
    tile_m, tile_n = place_of(tl.program_id(0), num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    row_mask = rows[:, None] < num_rows
    near = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    first_ptrs = weight_ptr + near[:, None] * num_inputs + inputs[None, :]
    second_ptrs = first_ptrs + BLOCK_K
    if IS_GATED:
        second_ptrs = weight_ptr + (near + num_outputs)[:, None] * num_inputs + inputs[None, :]

    first_dots = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    second_dots = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for k in range(0, num_inputs, STRETCH):
        num_left = num_inputs - k
        x = tl.trans(load_rows(x_ptrs + k, row_mask, inputs, num_left, IS_EVEN))
        first = load_weight(first_ptrs + k, inputs, num_left, IS_EVEN)
        first_dots = tl.dot(first, x, first_dots, out_dtype=tl.int32)
        if IS_PAIRED:
            num_left -= BLOCK_K
            x = tl.trans(load_rows(x_ptrs + k + BLOCK_K, row_mask, inputs, num_left, IS_EVEN))
        if IS_PAIRED or IS_GATED:
            second = load_weight(second_ptrs + k, inputs, num_left, IS_EVEN)
            second_dots = tl.dot(second, x, second_dots, out_dtype=tl.int32)

    dtype = out_ptr.dtype.element_ty
    x_scales = tl.load(x_scales_ptr + rows, rows < num_rows, other=0.0)
    if IS_GATED:
        gate = scaled(first_dots, x_scales, scales_ptr + near, bias_ptr, near)
        place = num_outputs + near
        up = scaled(second_dots, x_scales, scales_ptr + place, bias_ptr, place)
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    else:
        dots = first_dots + second_dots
        result = scaled(dots, x_scales, scales_ptr + near, bias_ptr, near)
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    out_mask = (rows[None, :] < num_rows) & (outputs[:, None] < num_outputs)
    tl.store(out_ptrs, result.to(dtype), out_mask)


@triton.jit
def scaled(dots, x_scales, scale_ptrs, bias_ptr, places):  # type: ignore[no-untyped-def]
    """dots [outputs, rows] as the numbers that they stand for, fp32."""
    result = dots.to(tl.float32) * x_scales[None, :] * tl.load(scale_ptrs)[:, None]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + places)[:, None].to(tl.float32)
    return result
