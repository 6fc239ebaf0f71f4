"""The Triton product of block-quantized weights and int8 activations.

It computes y = x W^T + b for weights in any layout of `block_quantized_layout.py`.
`formats.block_quantized.linear_methods` defines the result and is the reference. Activations are
int8 with a scale for each chunk of 32 inputs. The dot of a chunk, or of each of its two groups, is
an exact integer; dots are scaled and summed in fp32, one after the other. The order of the sum
doesn't depend on M, so a row has the same bits in any batch.

W is the left operand of the tensor core's product. It is unpacked in registers, four weights per
instruction, and multiplied from there. The tensor core also computes the terms of zeros and
offsets, since the other units are the bottleneck. A zero, of the layout or of a group, is repeated
in a tile that is multiplied with x. A tile of ones gives the sums of x, which offsets multiply. The
tensor core's product takes 32 inputs; for a group of 16, the other 16 inputs of x are set to zero.

For up to 16 rows, a program streams all inputs of 32 outputs, as in `int4_matmul.py`. With more
rows it computes 32 x 64 elements, or 16 x 64 if blocks have offsets. If a program can begin before
the previous kernel has ended (`dependent_launch.py`), it prefetches the first 64 KiB of its levels
(packed weights) into the L2 cache. In a launch of more than 512 programs none prefetches, since
most of them begin later anyway.

Shapes: M rows, K inputs, N outputs. Called by `formats.block_quantized.triton_method`, which has
`widened_block_matmul` for 9 to 128 rows if a row's bits may depend on the batch.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.dependent_launch import (
    LINE_BYTES,
    await_inputs,
    launch_options,
    prefetch,
)
from quire.kernels.triton.linear.block_quantized_layout import (
    CHUNK_INPUTS,
    STRETCH,
    BlockQuantizedLayout,
    BlockQuantizedWeight,
    byte_of,
    factor_of,
    float_of,
    halves,
    num_stretches,
    number_of,
)
from quire.kernels.triton.linear.matmul import store_transposed, tile_of_program
from quire.kernels.triton.linear.quantize_groups import quantize_groups

_ENOUGH_PROGRAMS = 256
_GROUPED_ROWS = 8

_PREFETCHED_BYTES = 64 << 10
_MOST_PREFETCHING = 512


def block_quantized_matmul(
    x: torch.Tensor, weight: BlockQuantizedWeight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [..., K] of any floating dtype -> [..., N] in `out_dtype`: x's dtype (None), or fp32."""
    stretches, width, _ = weight.levels.shape
    if num_stretches(x.shape[-1]) != stretches:
        raise ValueError(
            f"x is {tuple(x.shape)}, but weight has {stretches} stretches of {STRETCH} inputs"
        )
    out = torch.empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(x, weight, out.view(-1, width))
    return out


def most_rows(layout: BlockQuantizedLayout) -> int:
    """The largest number of rows per program whose sums fit the registers."""
    return 16 if layout.is_blocked and layout.has_offsets else 32


def _launch(x: torch.Tensor, weight: BlockQuantizedWeight, out: torch.Tensor) -> None:
    """`out` is [M, N], contiguous."""
    rows = quantize_groups(x, CHUNK_INPUTS, STRETCH)
    num_rows, width = out.shape
    is_narrow = triton.cdiv(width, 32) < _ENOUGH_PROGRAMS
    block_rows = 8 if num_rows <= 8 else 16 if num_rows <= 16 else most_rows(weight.layout)
    block_outputs = 64 if num_rows > 16 else 16 if is_narrow else 32
    num_programs = triton.cdiv(num_rows, block_rows) * triton.cdiv(width, block_outputs)
    prefetched = _PREFETCHED_BYTES // (block_outputs * weight.layout.level_bytes)
    block_quantized_matmul_kernel[(num_programs,)](
        rows.q,
        rows.scales,
        weight.levels,
        weight.words,
        weight.bias,
        out,
        num_rows,
        width,
        len(weight.levels),
        LAYOUT=weight.layout,
        BLOCK_M=block_rows,
        BLOCK_N=block_outputs,
        GROUP_M=_GROUPED_ROWS,
        PREFETCHED=prefetched if num_programs <= _MOST_PREFETCHING else 0,
        **launch_options(x.device),
        num_warps=block_outputs // 16,
        num_stages=(5 if weight.layout.width == 4 else 4) if num_rows <= 16 else 3,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def block_quantized_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, 256 stretches] int8
    x_scales_ptr,  # [M, 8 stretches]
    levels_ptr,  # [stretches, N, bytes]
    words_ptr,  # [stretches, W, N] int32
    bias_ptr,  # [N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_stretches,
    LAYOUT: tl.constexpr,  # a BlockQuantizedLayout
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCHED: tl.constexpr = 0,  # stretches of levels to prefetch, a power of two
    IS_EARLY: tl.constexpr = False,  # see dependent_launch.py
):
    rows, row_mask, outputs, near = tile_of_program(
        num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M
    )
    # First, prefetch levels while the previous kernel still runs.
    if IS_EARLY and PREFETCHED:
        stretches = tl.minimum(tl.arange(0, PREFETCHED), num_stretches - 1).to(tl.int64)
        LEVEL_BYTES: tl.constexpr = LAYOUT.level_bytes
        lines = (stretches[None, :] * num_outputs + near[:, None]) * LEVEL_BYTES
        for line in tl.static_range(0, LEVEL_BYTES, LINE_BYTES):
            prefetch(levels_ptr + lines + line)
    # Then multiply.
    await_inputs(IS_EARLY)
    result = multiply_stretches(
        x_ptr + rows.to(tl.int64)[:, None] * (num_stretches * 256),
        x_scales_ptr + rows.to(tl.int64) * (num_stretches * 8),
        row_mask,
        levels_ptr + near[:, None] * LAYOUT.level_bytes,
        words_ptr + near,
        num_outputs,
        num_stretches,
        LAYOUT,
        BLOCK_M,
        BLOCK_N,
    )
    if bias_ptr is not None:
        result += tl.load(bias_ptr + near)[:, None].to(tl.float32)
    store_transposed(out_ptr, result, rows, row_mask, outputs, num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def multiply_stretches(  # type: ignore[no-untyped-def]
    x_ptrs,  # [BLOCK_M, 1] to rows of q
    x_scales_ptrs,  # [BLOCK_M] to their scales
    row_mask,
    levels_ptrs,  # [BLOCK_N, 1] to each output's bytes in the first stretch
    words_ptrs,  # [BLOCK_N] to each output's first word
    num_outputs,
    num_stretches,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sum over all stretches, [BLOCK_N, BLOCK_M] fp32."""
    PARTS: tl.constexpr = LAYOUT.parts_of_chunk
    CHUNKS: tl.constexpr = LAYOUT.chunks_of_group
    inputs = tl.arange(0, 32)
    x_ptrs += inputs[None, :]
    levels_ptrs += inputs[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    nothing = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    levels_step = num_outputs.to(tl.int64) * LAYOUT.level_bytes
    words_step = num_outputs.to(tl.int64) * LAYOUT.num_words
    # Words are loaded a stretch ahead by hand: Triton does it only for operands of the tensor core.
    next_words = load_ahead(words_ptrs, num_outputs, LAYOUT)
    for stretch in range(num_stretches):
        words = next_words
        next_ptrs = words_ptrs + words_step * (stretch + 1 < num_stretches).to(tl.int64)
        next_words = load_ahead(next_ptrs, num_outputs, LAYOUT)
        for chunk in tl.static_range(8):
            if LAYOUT.width == 8:
                levels = tl.load(levels_ptrs + chunk * 32)
            elif chunk % 2 == 0:
                levels, others = halves(tl.load(levels_ptrs + chunk * 16), LAYOUT)
            else:
                levels = others
            for part in tl.static_range(PARTS):
                mask = row_mask[:, None]
                if PARTS > 1:
                    mask = mask & (inputs // 16 == part)[None, :]
                x = tl.trans(tl.load(x_ptrs + chunk * 32, mask, other=0))
                at = words_ptrs, num_outputs
                group = group_numbers(words, at, chunk * PARTS // CHUNKS + part, LAYOUT)
                dots, total = multiply_chunk(nothing, levels, x, group, LAYOUT, BLOCK_N)
                x_scales = tl.load(x_scales_ptrs + chunk, row_mask, other=0.0)
                sums = add_scaled(sums, dots, total, group, x_scales, LAYOUT)
        x_ptrs += 256
        x_scales_ptrs += 8
        levels_ptrs += levels_step
        words_ptrs = next_ptrs
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def load_ahead(words_ptrs, num_outputs, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the words of a stretch that `group_numbers` doesn't load itself, as a tuple of
    [BLOCK_N]: scales, then the factors of blocks, or offsets that are floats."""
    NUM_SCALES: tl.constexpr = LAYOUT.zeros_at
    words = (tl.load(words_ptrs),)
    for index in tl.static_range(1, NUM_SCALES):
        words += (tl.load(words_ptrs + index * num_outputs),)  # type: ignore[assignment]
    if LAYOUT.is_blocked:
        words += (tl.load(words_ptrs + LAYOUT.factors_at * num_outputs),)  # type: ignore[assignment]
    elif LAYOUT.has_offsets:
        for index in tl.static_range(NUM_SCALES):
            place = LAYOUT.offsets_at + index
            words += (tl.load(words_ptrs + place * num_outputs),)  # type: ignore[assignment]
    return words


@triton.jit  # type: ignore[untyped-decorator]
def group_numbers(  # type: ignore[no-untyped-def]
    words, at, GROUP: tl.constexpr, LAYOUT: tl.constexpr
):
    """The scale (fp32), zero (int8) and offset (fp32) of each output's group.

    A zero or offset that the layout lacks has an arbitrary value, which is not used. `words` is the
    result of `load_ahead`. `at` is (pointers to each output's first word, num_outputs), from which
    the other words are loaded.
    """
    words_ptrs, num_outputs = at
    WORD: tl.constexpr = GROUP // LAYOUT.groups_of_word
    place = GROUP % LAYOUT.groups_of_word
    scale = words[WORD]
    zero, offset = scale, scale
    if LAYOUT.has_zeros:
        zero = tl.load(words_ptrs + (LAYOUT.zeros_at + GROUP // 4) * num_outputs)
        zero = byte_of(zero, GROUP % 4)
    if LAYOUT.has_offsets:
        if LAYOUT.is_blocked:
            offset = tl.load(words_ptrs + (LAYOUT.offsets_at + WORD) * num_outputs)
            factors = factor_of(words[LAYOUT.zeros_at], 1, LAYOUT)
            offset = byte_of(offset, place).to(tl.float32) * factors
        else:
            offset = float_of(words[LAYOUT.zeros_at + WORD], place, LAYOUT)
    number = number_of(scale, place, LAYOUT)
    if LAYOUT.is_blocked:
        number = number.to(tl.float32) * factor_of(words[LAYOUT.zeros_at], 0, LAYOUT)
    return number, zero, offset


@triton.jit  # type: ignore[untyped-decorator]
def multiply_chunk(  # type: ignore[no-untyped-def]
    nothing, levels, x, group, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The dots of 32 inputs with weights minus their zeros, and the sums of x.

    For a group of 16, the other 16 inputs of x are zero. Dots and sums are [BLOCK_N, BLOCK_M]
    int32. If the layout has no offsets, the sums are `nothing`, a tensor of zeros.
    """
    _, zeros, _ = group
    dots, total = tl.dot(levels, x, nothing, out_dtype=tl.int32), nothing
    if LAYOUT.zero != 0:
        repeated = tl.full((BLOCK_N, 32), -LAYOUT.zero, tl.int8)
        dots = tl.dot(repeated, x, dots, out_dtype=tl.int32)
    if LAYOUT.has_zeros:
        repeated = tl.broadcast_to(zeros[:, None], (BLOCK_N, 32))
        dots -= tl.dot(repeated, x, out_dtype=tl.int32)
    if LAYOUT.has_offsets:
        repeated = tl.full((BLOCK_N, 32), 1, tl.int8)
        total = tl.dot(repeated, x, nothing, out_dtype=tl.int32)
    return dots, total


@triton.jit  # type: ignore[untyped-decorator]
def add_scaled(  # type: ignore[no-untyped-def]
    sums, dots, total, group, x_scales, LAYOUT: tl.constexpr
):
    """Add a chunk's scaled dots to `sums` in fp32, less the offsets times the sums of x."""
    scales, _, offsets = group
    sums = tl.fma(dots.to(tl.float32), scales[:, None] * x_scales[None, :], sums)
    if LAYOUT.has_offsets:
        scaled = total.to(tl.float32) * x_scales[None, :]
        sums = tl.fma(-tl.broadcast_to(offsets[:, None], scaled.shape), scaled, sums)
    return sums
