"""Dequantizes rows of a block-quantized weight, in Triton.

The reference is `UnpackedRows.numbers` of `formats.block_quantized.weights`, and the bits are the
same: each operation is rounded once, in fp32, and the result to the wanted dtype. A program takes
32 rows of one stretch of 256 inputs.

Shapes: R rows, K inputs, N outputs. Called by `formats.block_quantized.triton_method`, for
embeddings and for products that are faster in cuBLAS.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.block_quantized_layout import (
    STRETCH,
    BlockQuantizedWeight,
    byte_of,
    factor_of,
    halves,
    number_of,
)

_BLOCK_ROWS = 32


def unpack_rows(
    weight: BlockQuantizedWeight, rows: torch.Tensor | range, num_inputs: int, dtype: torch.dtype
) -> torch.Tensor:
    """rows [R] int64, or a range of step 1 -> these rows, dequantized to `dtype`, [R, K]."""
    out = torch.empty(len(rows), num_inputs, dtype=dtype, device=weight.levels.device)
    if not out.numel():
        return out
    is_range = isinstance(rows, range)
    stretches, num_outputs, _ = weight.levels.shape
    if stretches != triton.cdiv(num_inputs, STRETCH):
        raise ValueError(
            f"num_inputs is {num_inputs}, but weight has {stretches} stretches of {STRETCH} inputs"
        )
    unpack_rows_kernel[(triton.cdiv(len(rows), _BLOCK_ROWS), stretches)](
        None if is_range else rows,
        weight.levels,
        weight.words,
        out,
        rows.start if isinstance(rows, range) else 0,
        len(rows),
        num_outputs,
        num_inputs,
        LAYOUT=weight.layout,
        BLOCK=_BLOCK_ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["first", "num_rows"])  # type: ignore[untyped-decorator]
def unpack_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R] int64, or None: consecutive rows from `first` on
    levels_ptr,  # [stretches, N, bytes]
    words_ptr,  # [stretches, W, N] int32
    out_ptr,  # [R, K]
    first,
    num_rows,
    num_outputs,
    num_inputs,
    LAYOUT: tl.constexpr,  # a BlockQuantizedLayout
    BLOCK: tl.constexpr,
):
    # First, find the program's rows.
    stretch = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_rows
    rows = (first + tl.minimum(places, num_rows - 1)).to(tl.int64)
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + rows)
    inputs = tl.arange(0, 32)
    levels_ptrs = levels_ptr + (stretch * num_outputs + rows)[:, None] * LAYOUT.level_bytes
    levels_ptrs += inputs[None, :]
    words_ptrs = words_ptr + stretch * num_outputs * LAYOUT.num_words + rows
    out_ptrs = out_ptr + places.to(tl.int64)[:, None] * num_inputs + (stretch * 256 + inputs)
    num_left = num_inputs - stretch * 256
    # Then unpack 32 inputs at a time; the bytes of an even chunk of width 4 hold the next chunk,
    # too.
    for chunk in tl.static_range(8):
        if LAYOUT.width == 8:
            levels = tl.load(levels_ptrs + chunk * 32)
        elif chunk % 2 == 0:
            levels, others = halves(tl.load(levels_ptrs + chunk * 16), LAYOUT)
        else:
            levels = others
        scale, zero, offset = chunk_group(words_ptrs, num_outputs, chunk, LAYOUT)
        numbers = scale * (levels.to(tl.float32) - zero)
        if LAYOUT.has_offsets:
            numbers -= offset
        out_mask = mask[:, None] & (inputs < num_left - chunk * 32)[None, :]
        tl.store(out_ptrs + chunk * 32, numbers.to(out_ptr.dtype.element_ty), out_mask)


@triton.jit  # type: ignore[untyped-decorator]
def chunk_group(  # type: ignore[no-untyped-def]
    words_ptrs, num_outputs, chunk, LAYOUT: tl.constexpr
):
    """The scale, zero and offset of each input of a chunk (0 to 7) of a stretch, fp32, as tiles of
    32 inputs, or of one if all share them. `words_ptrs` [BLOCK] are to the stretch's first word of
    each row. The offset is unused if the layout has none."""
    PARTS: tl.constexpr = LAYOUT.parts_of_chunk
    CHUNKS: tl.constexpr = LAYOUT.chunks_of_group
    scale, offset = fp32_numbers(words_ptrs, num_outputs, chunk * PARTS // CHUNKS, LAYOUT)
    if PARTS > 1:
        scale_2, offset_2 = fp32_numbers(words_ptrs, num_outputs, chunk * PARTS + 1, LAYOUT)
        is_first = (tl.arange(0, 32) < 16)[None, :]
        scale, offset = tl.where(is_first, scale, scale_2), tl.where(is_first, offset, offset_2)
    zero = tl.zeros_like(scale) + LAYOUT.zero
    if LAYOUT.has_zeros:
        zeros = tl.load(words_ptrs + (LAYOUT.zeros_at + chunk // CHUNKS // 4) * num_outputs)
        zero = byte_of(zeros, chunk // CHUNKS % 4).to(tl.float32)[:, None]
    return scale, zero, offset


@triton.jit  # type: ignore[untyped-decorator]
def fp32_numbers(  # type: ignore[no-untyped-def]
    words_ptrs, num_outputs, group, LAYOUT: tl.constexpr
):
    """The scale and offset of each row's group, [BLOCK, 1]. The offset is unused if the layout has
    none."""
    word, place = group // LAYOUT.groups_of_word, group % LAYOUT.groups_of_word
    scale = number_of(tl.load(words_ptrs + word * num_outputs), place, LAYOUT).to(tl.float32)
    offset = scale
    if LAYOUT.has_offsets:
        offset = tl.load(words_ptrs + (LAYOUT.offsets_at + word) * num_outputs)
        offset = number_of(offset, place, LAYOUT).to(tl.float32)
    if LAYOUT.is_blocked:
        factors = tl.load(words_ptrs + LAYOUT.factors_at * num_outputs)
        scale *= factor_of(factors, 0, LAYOUT)
        offset *= factor_of(factors, 1, LAYOUT)
    return scale[:, None], offset[:, None]
