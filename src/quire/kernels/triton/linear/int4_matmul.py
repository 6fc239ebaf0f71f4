"""The Triton product of int4 weights and int8 activations.

y = x W^T + b of weights in four bits, in groups of 32, and activations in int8:

    w[n, k] ~ S[n] s[n, g] q[n, k] - O[n] o[n, g]                       (`kernels/quantize.py`)
    y[m, n] = x_scale[m] * (S[n] * sum over g of s[n, g] * dot[m, n, g]
                            - O[n] * sum over g of o[n, g] * x_sum[m, g]) + b[n]

Each dot, of 32 inputs, is one step of the tensor core in exact integers; its product with s is
below 2^24, so exact in fp32; the first sum is in fp32, group after group, and the second one in
exact integers. No order depends on M: a row has the same bits in any batch, and those of
`formats.int4`, the reference.

Memory, for each stretch of 256 inputs (8 groups; K is padded with zeros):

    levels  [stretches][N][4 quarters][32]  bytes: of quarter t the low half is input 64 t + j, the
                                            high half input 64 t + 32 + j
    scales  [stretches][2][N]               words of four bytes: s of groups 4 w .. 4 w + 3
    offsets [stretches][2][N]               and o - 128, signed

so that what a program reads of a stretch is one run of bytes, and a word brings four groups'
factors: 4.5 bits a weight.

A byte costs no instruction of its own but two masks for four. W is the left operand of the product
and comes apart in the registers from which it is multiplied: its low halves are q; its high halves
stay where they are, with the top bit turned, which as a signed byte is 16 q - 128. So their dot is
16 dot - 128 x_sum; another product, of -128 for each weight, is taken from it, and the 16 goes into
the scale, exactly. The second sum is a product too, with o - 128 for each weight of the group, plus
128 times the row's sum.

Shapes: M rows, K inputs, N outputs. Called by `formats.int4`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from quire.kernels.quantize import Int4Rows
from quire.kernels.triton.linear.matmul import place_of
from quire.kernels.triton.linear.quantize_rows import quantize_rows

GROUP_SIZE = 32
STRETCH = 256
_GROUPS = STRETCH // GROUP_SIZE

MAX_INPUTS = (2**31 - 1) // (127 * 255) // STRETCH * STRETCH
"""Beyond, the sum with offsets might not fit into 32 bits."""

_ENOUGH_PROGRAMS = 256
_GROUPED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Packed as the module says. levels [stretches, N, 128] uint8; scales, offsets
    [stretches, 2, N] int32; scale_factors, offset_factors: S and O [N] fp32; bias [N], of any
    floating dtype, or None."""

    levels: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    scale_factors: torch.Tensor
    offset_factors: torch.Tensor
    bias: torch.Tensor | None


def num_stretches(num_inputs: int) -> int:
    """Of a weight with so many inputs."""
    return -(-num_inputs // STRETCH)


def pack_levels(rows: Int4Rows) -> torch.Tensor:
    """Rows of a weight, in groups of 32, as levels [stretches, rows, 128]."""
    num_rows, num_groups, _ = rows.levels.shape
    spare = -num_groups % _GROUPS
    levels = functional.pad(rows.levels, (0, 0, 0, spare)).view(num_rows, -1, 4, 2, GROUP_SIZE)
    packed = levels[:, :, :, 0] | levels[:, :, :, 1] << 4
    return packed.flatten(2).transpose(0, 1)


def pack_scales(rows: Int4Rows) -> torch.Tensor:
    """Scales [stretches, 2, rows]."""
    return _words(rows.scales)


def pack_offsets(rows: Int4Rows) -> torch.Tensor:
    """Offsets [stretches, 2, rows]."""
    return _words(rows.offsets ^ 128)


def _words(factors: torch.Tensor) -> torch.Tensor:
    """[rows, groups] uint8, four to a word."""
    padded = functional.pad(factors, (0, -factors.shape[1] % _GROUPS)).contiguous()
    return padded.view(torch.int32).view(len(factors), -1, _GROUPS // 4).permute(1, 2, 0)


def int4_matmul(
    x: torch.Tensor, weight: Int4Weight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [..., K] of any floating dtype -> [..., N]. out_dtype: x's (None), or fp32."""
    num_inputs, width = x.shape[-1], len(weight.scale_factors)
    if num_stretches(num_inputs) != len(weight.levels) or num_inputs > MAX_INPUTS:
        raise ValueError(
            f"x is {tuple(x.shape)}, but weight has {len(weight.levels)} stretches of {STRETCH} "
            f"inputs, and at most {MAX_INPUTS} inputs are served"
        )
    out = torch.empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(x, weight, out.view(-1, width))
    return out


def _launch(x: torch.Tensor, weight: Int4Weight, out: torch.Tensor) -> None:
    """out [M, N] contiguous."""
    rows = quantize_rows(x, multiple=STRETCH, with_sums=True)
    num_rows, width = out.shape
    is_narrow = triton.cdiv(width, 32) < _ENOUGH_PROGRAMS
    block_rows = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    block_outputs = 64 if num_rows > 16 else 16 if is_narrow else 32
    num_programs = triton.cdiv(num_rows, block_rows) * triton.cdiv(width, block_outputs)
    int4_matmul_kernel[(num_programs,)](
        rows.q,
        rows.scales,
        rows.sums,
        weight.levels,
        weight.scales,
        weight.offsets,
        weight.scale_factors,
        weight.offset_factors,
        weight.bias,
        out,
        num_rows,
        width,
        len(weight.levels),
        BLOCK_M=block_rows,
        BLOCK_N=block_outputs,
        GROUP_M=_GROUPED_ROWS,
        num_warps=block_outputs // 16,
        num_stages=6 if num_rows <= 16 else 3,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def int4_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, 256 stretches] int8
    x_scales_ptr,  # [M]
    x_sums_ptr,  # [M] int32
    levels_ptr,  # [stretches, N, 128] uint8
    scales_ptr,  # [stretches, 2, N] int32
    offsets_ptr,  # [stretches, 2, N] int32
    scale_factors_ptr,  # [N]
    offset_factors_ptr,  # [N]
    bias_ptr,  # [N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_stretches,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = place_of(tl.program_id(0), num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, 32)
    row_mask = rows < num_rows
    near = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * (num_stretches * 256) + inputs[None, :]
    levels_ptrs = levels_ptr + near[:, None] * 128 + inputs[None, :]
    scales_ptrs = scales_ptr + near
    offsets_ptrs = offsets_ptr + near

    sums, below = multiply_stretches(
        x_ptrs,
        row_mask,
        levels_ptrs,
        scales_ptrs,
        offsets_ptrs,
        num_outputs,
        num_stretches,
        BLOCK_M,
        BLOCK_N,
    )
    below += 128 * tl.load(x_sums_ptr + rows, row_mask, other=0)[None, :]
    above = sums * tl.load(scale_factors_ptr + near)[:, None]
    result = above - below.to(tl.float32) * tl.load(offset_factors_ptr + near)[:, None]
    result *= tl.load(x_scales_ptr + rows, row_mask, other=0.0)[None, :]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + near)[:, None].to(tl.float32)
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    out_mask = row_mask[None, :] & (outputs[:, None] < num_outputs)
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), out_mask)


@triton.jit  # type: ignore[untyped-decorator]
def multiply_stretches(  # type: ignore[no-untyped-def]
    x_ptrs,  # of the first 32 inputs of each row
    row_mask,
    levels_ptrs,  # of each output, likewise
    scales_ptrs,
    offsets_ptrs,
    num_outputs,
    num_stretches,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The module's two sums, over groups, of scales and of offsets less 128: [outputs, rows]."""
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    below = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    least = tl.full((BLOCK_N, 32), -128, tl.int8)
    for _ in range(num_stretches):
        for half in tl.static_range(2):
            scales = tl.load(scales_ptrs + half * num_outputs)
            offsets = tl.load(offsets_ptrs + half * num_outputs)
            for pair in tl.static_range(2):
                quarter = 2 * half + pair
                levels = tl.load(levels_ptrs + quarter * 32)
                first_x = load_group(x_ptrs + quarter * 64, row_mask)
                second_x = load_group(x_ptrs + quarter * 64 + 32, row_mask)
                low = (levels & 0x0F).to(tl.int8, bitcast=True)
                high = ((levels & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
                dots = tl.dot(low, first_x, out_dtype=tl.int32)
                sums += dots.to(tl.float32) * factor(scales, 16 * pair)[:, None]
                dots = tl.dot(high, second_x, out_dtype=tl.int32)
                dots -= tl.dot(least, second_x, out_dtype=tl.int32)
                sums += dots.to(tl.float32) * (factor(scales, 16 * pair + 8) * 0.0625)[:, None]
                offset = (offsets >> (16 * pair)).to(tl.int8)[:, None]
                offset = tl.broadcast_to(offset, (BLOCK_N, 32))
                below = tl.dot(offset, first_x, below, out_dtype=tl.int32)
                offset = (offsets >> (16 * pair + 8)).to(tl.int8)[:, None]
                offset = tl.broadcast_to(offset, (BLOCK_N, 32))
                below = tl.dot(offset, second_x, below, out_dtype=tl.int32)
        x_ptrs += 256
        levels_ptrs += num_outputs * 128
        scales_ptrs += num_outputs * 2
        offsets_ptrs += num_outputs * 2
    return sums, below


@triton.jit
def load_group(ptrs, row_mask):  # type: ignore[no-untyped-def]
    """32 inputs of each row of x, as [inputs, rows]."""
    return tl.trans(tl.load(ptrs, row_mask[:, None], other=0))


@triton.jit
def factor(words, shift):  # type: ignore[no-untyped-def]
    """One of the four unsigned bytes of each word, fp32."""
    return ((words >> shift) & 255).to(tl.float32)
