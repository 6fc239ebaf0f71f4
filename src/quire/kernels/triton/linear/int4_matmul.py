"""The Triton product of int4 weights and int8 activations.

It computes y = x W^T + b. Weights have four bits, in groups g of 32 inputs. Activations are int8,
with a scale for each stretch h of four groups. `kernels/quantize.py` defines the weights:

    w[n, k] ~ S[n] s[n, g] q[n, k] - O[n] o[n, g]
    y[m, n] = S[n] * sum over h of x_scale[m, h] * (sum over g in h of s[n, g] * dot[m, n, g])
            - O[n] * sum over h of x_scale[m, h] * (sum over g in h of o[n, g] * x_sum[m, g])
            + b[n]

Each dot of 32 inputs is one step of the tensor core in exact integers. Its product with s is below
2^24, so it is exact in fp32; the second inner sum is an exact integer. Sums are in fp32, in
ascending order, and each term is added with one rounding, as by a fused multiply-add. The order
does not depend on M, so a row has the same bits in any batch. The reference, `formats.int4`,
computes the same bits.

A few inputs, the wide ones (`WideInputs`), have int8 weights. Their exact dot, times the scales of
x and of the weights, is added to y before b. The packed weight and the quantized x have zeros for
these inputs.

Layout in memory, for each stretch of 128 inputs (K is padded with zeros):

    levels  [stretches][N][2 halves][32]  bytes: byte j of half t has input 64 t + j in the low four
                                          bits, and input 64 t + 32 + j in the high four
    scales  [stretches][N]                words of four bytes: s of each group
    offsets [stretches][N]                words of four bytes: o - 128 of each group, signed

So a program reads one contiguous range of levels for each stretch, and a word has the factors of
four groups. A weight takes 4.5 bits in all. Stretches of 256 inputs took up to 66 more registers.

Unpacking four bytes takes two instructions, which apply masks. W is the left operand of the
product, and is unpacked in the registers from which it is multiplied. The low halves of bytes are
q. The high halves stay in place with their top bit flipped: as signed bytes they are 16 q - 128. So
their product with x is 16 dot - 128 x_sum. The tensor core also multiplies a tile of -128 with x,
which gives -128 x_sum. This is subtracted, and the factor 16 goes into the scale, exactly. To get
o x_sum, it is also subtracted from the product of x with a tile of o - 128.

Shapes: M rows, K inputs, N outputs, W wide inputs. Called by `formats.int4`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from quire.kernels.quantize import INT4_GROUPS_PER_SCALE, Int4Rows, split_wide
from quire.kernels.triton.linear.matmul import store_transposed, tile_of_program
from quire.kernels.triton.linear.quantize_groups import quantize_groups
from quire.kernels.triton.linear.quantize_rows import quantize_rows
from quire.kernels.triton.support import as_rows

GROUP_SIZE = 32
_GROUPS = INT4_GROUPS_PER_SCALE

#: The number of inputs of x that share a scale.
STRETCH = _GROUPS * GROUP_SIZE

#: Maximum number of wide inputs of a weight, which are multiplied at once.
MOST_WIDE = 32

_ENOUGH_PROGRAMS = 256
_GROUPED_ROWS = 8


@dataclass(frozen=True, slots=True)
class WideInputs:
    """The inputs whose weights are int8, levels times scales; at most `MOST_WIDE` inputs."""

    #: The indices of the wide inputs, [W] int32.
    inputs: torch.Tensor
    #: Their rounded weights, [N, W] int8.
    levels: torch.Tensor
    #: One scale for each output, [N] fp32.
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight in the module's layout."""

    #: The packed q of the inputs, [stretches, N, 64] uint8.
    levels: torch.Tensor
    #: The packed s and o - 128 of the groups, [stretches, N] int32.
    scales: torch.Tensor
    offsets: torch.Tensor
    #: S and O of the formula, [N] bf16.
    scale_factors: torch.Tensor
    offset_factors: torch.Tensor
    #: The bias, [N] of any floating dtype; None adds nothing.
    bias: torch.Tensor | None
    #: None if the weight has no wide inputs.
    wide: WideInputs | None = None


def num_stretches(num_inputs: int) -> int:
    """The number of stretches of a weight with `num_inputs` inputs."""
    return -(-num_inputs // STRETCH)


def pack_levels(rows: Int4Rows) -> torch.Tensor:
    """The packed levels [stretches, rows, 64] of rows in groups of 32."""
    num_rows, num_groups, _ = rows.levels.shape
    spare = -num_groups % _GROUPS
    levels = functional.pad(rows.levels, (0, 0, 0, spare)).view(num_rows, -1, 2, 2, GROUP_SIZE)
    packed = levels[:, :, :, 0] | levels[:, :, :, 1] << 4
    return packed.flatten(2).transpose(0, 1)


def pack_scales(rows: Int4Rows) -> torch.Tensor:
    """The packed scales [stretches, rows] int32."""
    return _words(rows.scales)


def pack_offsets(rows: Int4Rows) -> torch.Tensor:
    """The packed offsets [stretches, rows] int32."""
    return _words(rows.offsets ^ 128)


def _words(factors: torch.Tensor) -> torch.Tensor:
    """Packs factors [rows, groups] uint8, four to a word, as [stretches, rows]."""
    padded = functional.pad(factors, (0, -factors.shape[1] % _GROUPS)).contiguous()
    return padded.view(torch.int32).T


def int4_matmul(
    x: torch.Tensor, weight: Int4Weight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [..., K] of any floating dtype -> [..., N] in `out_dtype`: x's dtype (None), or fp32."""
    num_inputs, width = x.shape[-1], len(weight.scale_factors)
    if num_stretches(num_inputs) != len(weight.levels):
        raise ValueError(
            f"x is {tuple(x.shape)}, but weight has {len(weight.levels)} stretches of {STRETCH} "
            "inputs"
        )
    out = torch.empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(x, weight, out.view(-1, width))
    return out


def _launch(x: torch.Tensor, weight: Int4Weight, out: torch.Tensor) -> None:
    """`out` is [M, N], contiguous."""
    # First, quantize x, and its wide inputs separately.
    num_rows, width = out.shape
    wide_x = wide = None
    if weight.wide is not None:
        wide = weight.wide
        wide_numbers, x = split_wide(as_rows(x), wide.inputs)
        wide_x = quantize_rows(wide_numbers, MOST_WIDE)
    rows = quantize_groups(x, STRETCH, STRETCH, by_group=True)
    # Then choose the tile of a program: fewer outputs if 32 would give too few programs.
    is_narrow = triton.cdiv(width, 32) < _ENOUGH_PROGRAMS
    block_rows = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    block_outputs = 64 if num_rows > 16 else 16 if is_narrow else 32
    num_programs = triton.cdiv(num_rows, block_rows) * triton.cdiv(width, block_outputs)
    int4_matmul_kernel[(num_programs,)](
        rows.q,
        rows.scales,
        weight.levels,
        weight.scales,
        weight.offsets,
        weight.scale_factors,
        weight.offset_factors,
        weight.bias,
        None if wide_x is None else wide_x.q,
        None if wide_x is None else wide_x.scales,
        None if wide is None else wide.levels,
        None if wide is None else wide.scales,
        out,
        num_rows,
        width,
        len(weight.levels),
        NUM_WIDE=0 if wide is None else len(wide.inputs),
        BLOCK_M=block_rows,
        BLOCK_N=block_outputs,
        GROUP_M=_GROUPED_ROWS,
        num_warps=block_outputs // 16,
        num_stages=8 if num_rows <= 16 else 5,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def int4_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, 128 stretches] int8
    x_scales_ptr,  # [stretches, M]
    levels_ptr,  # [stretches, N, 64] uint8
    scales_ptr,  # [stretches, N] int32
    offsets_ptr,  # [stretches, N] int32
    scale_factors_ptr,  # [N]
    offset_factors_ptr,  # [N]
    bias_ptr,  # [N], or None
    wide_x_ptr,  # [M, 32] int8, or None
    wide_x_scales_ptr,  # [M], or None
    wide_levels_ptr,  # [N, NUM_WIDE] int8, or None
    wide_scales_ptr,  # [N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_stretches,
    NUM_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # First, sum over the stretches.
    rows, row_mask, outputs, near = tile_of_program(
        num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M
    )
    inputs = tl.arange(0, 32)
    scaled, below = multiply_stretches(
        x_ptr + rows.to(tl.int64)[:, None] * (num_stretches * 128) + inputs[None, :],
        x_scales_ptr + rows,
        num_rows,
        row_mask,
        levels_ptr + near[:, None] * 64 + inputs[None, :],
        scales_ptr + near,
        offsets_ptr + near,
        num_outputs,
        num_stretches,
        BLOCK_M,
        BLOCK_N,
    )
    result = in_units(scaled, below, scale_factors_ptr + near, offset_factors_ptr + near)
    # Then add the product of the wide inputs, and the bias.
    if NUM_WIDE:
        wide_x = load_group(
            wide_x_ptr + rows.to(tl.int64)[:, None] * 32 + inputs[None, :], row_mask
        )
        levels_ptrs = wide_levels_ptr + near[:, None] * NUM_WIDE + inputs[None, :]
        levels = tl.load(levels_ptrs, inputs[None, :] < NUM_WIDE, other=0)
        x_scales = tl.load(wide_x_scales_ptr + rows, row_mask, other=0.0)
        dots = tl.dot(levels, wide_x, out_dtype=tl.int32)
        added = dots.to(tl.float32) * x_scales[None, :]
        result += added * tl.load(wide_scales_ptr + near)[:, None]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + near)[:, None].to(tl.float32)
    store_transposed(out_ptr, result, rows, row_mask, outputs, num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def multiply_stretches(  # type: ignore[no-untyped-def]
    x_ptrs,  # to the first 32 inputs of each row
    x_scales_ptrs,  # to the first scale of each row
    x_scales_stride,  # from one stretch to the next
    row_mask,
    levels_ptrs,  # to the first 32 bytes of each output
    scales_ptrs,  # to the first word of each output
    offsets_ptrs,
    num_outputs,
    num_stretches,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The formula's two sums over h, of scales and of offsets: [outputs, rows] fp32."""
    scaled = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    below = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    least = tl.full((BLOCK_N, 32), -128, tl.int8)
    for _ in range(num_stretches):
        scales = tl.load(scales_ptrs)
        offsets = tl.load(offsets_ptrs)
        above = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
        # `above` and `sums` are the formula's inner sums; a pair of groups shares its bytes.
        for pair in tl.static_range(2):
            levels = tl.load(levels_ptrs + pair * 32)
            first_x = load_group(x_ptrs + pair * 64, row_mask)
            second_x = load_group(x_ptrs + pair * 64 + 32, row_mask)
            offset = (offsets >> (16 * pair)).to(tl.int8)[:, None]
            offset = tl.broadcast_to(offset, (BLOCK_N, 32))
            sums = tl.dot(offset, first_x, sums, out_dtype=tl.int32)
            offset = (offsets >> (16 * pair + 8)).to(tl.int8)[:, None]
            offset = tl.broadcast_to(offset, (BLOCK_N, 32))
            sums = tl.dot(offset, second_x, sums, out_dtype=tl.int32)
            sums -= tl.dot(least, first_x, out_dtype=tl.int32)
            # The low halves are q, the high halves 16 q - 128.
            low = (levels & 0x0F).to(tl.int8, bitcast=True)
            high = ((levels & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
            dots = tl.dot(low, first_x, out_dtype=tl.int32)
            above += dots.to(tl.float32) * factor(scales, 16 * pair)[:, None]
            least_dots = tl.dot(least, second_x, out_dtype=tl.int32)
            sums -= least_dots
            dots = tl.dot(high, second_x, out_dtype=tl.int32) - least_dots
            above += dots.to(tl.float32) * (factor(scales, 16 * pair + 8) * 0.0625)[:, None]
        x_scales = tl.load(x_scales_ptrs, row_mask, other=0.0)
        of_x = tl.broadcast_to(x_scales[None, :], (BLOCK_N, BLOCK_M))
        scaled = tl.fma(above, of_x, scaled)
        below = tl.fma(sums.to(tl.float32), of_x, below)
        x_ptrs += 128
        x_scales_ptrs += x_scales_stride
        levels_ptrs += num_outputs * 64
        scales_ptrs += num_outputs
        offsets_ptrs += num_outputs
    return scaled, below


@triton.jit
def in_units(scaled, below, scale_factors_ptrs, offset_factors_ptrs):  # type: ignore[no-untyped-def]
    """The product, from the sums of `multiply_stretches` and each output's S and O."""
    scale_factors = tl.load(scale_factors_ptrs).to(tl.float32)
    offset_factors = tl.load(offset_factors_ptrs).to(tl.float32)
    return scaled * scale_factors[:, None] - below * offset_factors[:, None]


@triton.jit
def load_group(ptrs, row_mask):  # type: ignore[no-untyped-def]
    """Loads 32 inputs of each row of x, as [inputs, rows]."""
    return tl.trans(tl.load(ptrs, row_mask[:, None], other=0))


@triton.jit
def factor(words, shift):  # type: ignore[no-untyped-def]
    """The unsigned byte at bit `shift` of each word, as fp32."""
    return ((words >> shift) & 255).to(tl.float32)
