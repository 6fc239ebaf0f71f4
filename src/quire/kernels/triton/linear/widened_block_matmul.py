"""The Triton product of block-quantized weights, dequantized in registers, for 9 to 128 rows.

It computes y = x W^T + b as a dense linear of the dequantized weights does. Each weight is rounded
to x's dtype; x is not rounded. Reference: `UnpackedRows.numbers` of
`formats.block_quantized.weights`, then `torch.nn.functional.linear`. A weight is scale * code +
(-scale * zero - offset) in fp32. Its error, at most 2^-16 of the scale, is far below that of x's
dtype.

Reading W is the bound, so each program of a tile of outputs has all rows of x, up to 64, and W is
unpacked once. A tile has 2 to 4 outputs for each row, so that four-bit codes take at least half as
many bytes from L2 as x. Small weights are cut along K, so that all devices are filled; then fp32
sums are merged by a second kernel, in ascending order of K. (Frantar et al., MARLIN,
arXiv:2408.11743, section 3.)

Bits depend on the number of rows, which choose the tile.

Shapes: M rows, K inputs, N outputs. dtypes: bf16, fp16. Called by
`formats.block_quantized.triton_method`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.block_quantized_layout import (
    STRETCH,
    BlockQuantizedWeight,
    halves,
    num_stretches,
)
from quire.kernels.triton.linear.block_quantized_rows import chunk_group
from quire.kernels.triton.linear.matmul import (
    load_rows,
    merge_slices,
    store_transposed,
    tile_of_program,
)
from quire.kernels.triton.support import as_rows

# PTX that makes floats of codes without conversions, which are slow: prmt puts codes cc into bytes
# of fp32 numbers. 0x43cc0000 is 128 + cc for cc < 128, and 0x4700cc00 is 32,768 + cc.
HALVES_TO_FP32 = tl.constexpr("""{
    .reg .b32 low, high;
    and.b32 low, $8, 0x0F0F0F0F;
    shr.u32 high, $8, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0x43000000, 0x7044;
    prmt.b32 $1, low, 0x43000000, 0x7144;
    prmt.b32 $2, low, 0x43000000, 0x7244;
    prmt.b32 $3, low, 0x43000000, 0x7344;
    prmt.b32 $4, high, 0x43000000, 0x7044;
    prmt.b32 $5, high, 0x43000000, 0x7144;
    prmt.b32 $6, high, 0x43000000, 0x7244;
    prmt.b32 $7, high, 0x43000000, 0x7344;
}""")
BYTES_TO_FP32 = tl.constexpr("""{
    .reg .b32 raised;
    xor.b32 raised, $4, 0x80808080;
    prmt.b32 $0, raised, 0x47000000, 0x7404;
    prmt.b32 $1, raised, 0x47000000, 0x7414;
    prmt.b32 $2, raised, 0x47000000, 0x7424;
    prmt.b32 $3, raised, 0x47000000, 0x7434;
}""")

#: The fewest rows for which `block_quantized_matmul` is slower, by its time on an H200.
LEAST_ROWS = 9
DTYPES = (torch.bfloat16, torch.float16)

#: Two programs for each SM of the largest devices.
_ENOUGH_PROGRAMS = 264
#: A slice of K has at least this number of stretches.
_SMALLEST_SLICE = 4
_GROUPED_ROWS = 8


@dataclass(frozen=True, slots=True)
class _CodesTile:
    """The tile of a program, and Triton's options."""

    rows: int
    outputs: int
    quarters: int
    num_warps: int
    num_stages: int


def tile_of(num_rows: int) -> _CodesTile:
    """The tile for a step of this number of rows."""
    if num_rows <= 16:
        return _CodesTile(rows=16, outputs=64, quarters=4, num_warps=2, num_stages=4)
    if num_rows <= 32:
        return _CodesTile(rows=32, outputs=64, quarters=4, num_warps=2, num_stages=3)
    return _CodesTile(rows=64, outputs=128, quarters=2, num_warps=4, num_stages=3)


def widened_block_matmul(
    x: torch.Tensor, weight: BlockQuantizedWeight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [..., K] bf16 or fp16 -> [..., N] in `out_dtype`: x's dtype (None), or fp32, where sums are
    not rounded."""
    stretches, num_outputs, _ = weight.levels.shape
    if num_stretches(x.shape[-1]) != stretches or x.dtype not in DTYPES:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, but weight has {stretches} stretches of {STRETCH} "
            f"inputs, and x must be one of {DTYPES}"
        )
    out = torch.empty((*x.shape[:-1], num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(as_rows(x), weight, out.view(-1, num_outputs))
    return out


def _launch(x: torch.Tensor, weight: BlockQuantizedWeight, out: torch.Tensor) -> None:
    """x is [M, K] with any stride of rows; `out` is [M, N], contiguous."""
    # First, cut K into slices if there are too few tiles for a device.
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    stretches, tile = len(weight.levels), tile_of(num_rows)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
    num_slices = max(1, min(_ENOUGH_PROGRAMS // num_tiles, stretches // _SMALLEST_SLICE))
    slice_size = triton.cdiv(stretches, num_slices)
    num_slices = triton.cdiv(stretches, slice_size)
    sums = out
    if num_slices > 1:
        shape = (num_slices, num_rows, num_outputs)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    # Then multiply, and add the slices' sums.
    widened_block_matmul_kernel[(num_tiles, num_slices)](
        x,
        weight.levels,
        weight.words,
        weight.bias if num_slices == 1 else None,
        sums,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        stretches,
        slice_size,
        LAYOUT=weight.layout,
        IS_EVEN=num_inputs % STRETCH == 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        QUARTERS=tile.quarters,
        GROUP_M=_GROUPED_ROWS,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    if num_slices > 1:
        merge_slices(sums, None, weight.bias, out)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def widened_block_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows x_stride apart
    levels_ptr,  # [stretches, N, bytes]
    words_ptr,  # [stretches, W, N] int32
    bias_ptr,  # [N], or None
    out_ptr,  # [slices, M, N]
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    num_stretches,
    slice_size,  # the number of stretches of a slice
    LAYOUT: tl.constexpr,  # a BlockQuantizedLayout
    IS_EVEN: tl.constexpr,  # K is a multiple of 256
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUARTERS: tl.constexpr,  # the quarters of a stretch that an iteration reads: 1, 2 or 4
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,  # as of the launch; with it, words are fetched ahead, too
):
    rows, is_row, outputs, near = tile_of_program(num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M)
    inputs = tl.arange(0, 32)
    row_mask = is_row[:, None]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    levels_ptrs = levels_ptr + near[:, None] * LAYOUT.level_bytes + inputs[None, :]
    words_ptrs = words_ptr + near
    levels_step = num_outputs.to(tl.int64) * LAYOUT.level_bytes
    words_step = num_outputs.to(tl.int64) * LAYOUT.num_words

    # Sum over the slice.
    first = tl.program_id(1) * slice_size
    last = tl.minimum(first + slice_size, num_stretches)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    STEPS: tl.constexpr = 4 // QUARTERS
    for at in tl.range(first * STEPS, last * STEPS, num_stages=NUM_STAGES):
        stretch = at // STEPS
        words = words_ptrs + stretch * words_step
        for index in tl.static_range(QUARTERS):
            quarter = at % STEPS * QUARTERS + index
            pair = quarter_codes(levels_ptrs + stretch * levels_step, quarter, LAYOUT)
            for half in tl.static_range(2):
                scale, zero, offset = chunk_group(words, num_outputs, quarter * 2 + half, LAYOUT)
                base = -scale * (zero + pair[2])
                if LAYOUT.has_offsets:
                    base -= offset
                numbers = scale * pair[half] + base
                k = (at * QUARTERS + index) * 64 + half * 32
                x = tl.trans(load_rows(x_ptrs + k, row_mask, inputs, num_inputs - k, IS_EVEN))
                sums = tl.dot(numbers.to(x.dtype), x, sums)

    if bias_ptr is not None:
        sums += tl.load(bias_ptr + near)[:, None].to(tl.float32)
    slice_ptr = out_ptr + tl.program_id(1).to(tl.int64) * num_rows * num_outputs
    store_transposed(slice_ptr, sums, rows, is_row, outputs, num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def quarter_codes(  # type: ignore[no-untyped-def]
    levels_ptrs, quarter, LAYOUT: tl.constexpr
):
    """The values of a quarter (0 to 3) of a stretch plus a constant, as two tiles [BLOCK, 32] fp32,
    and the constant. `levels_ptrs` [BLOCK, 32] are to the first bytes of each row's stretch."""
    IS_PLAIN: tl.constexpr = LAYOUT.width == 4 and LAYOUT.table is None
    bias = 128.0 if IS_PLAIN else 0.0
    if LAYOUT.width == 8:
        first = _value_of(tl.load(levels_ptrs + quarter * 64), LAYOUT)
        second = _value_of(tl.load(levels_ptrs + quarter * 64 + 32), LAYOUT)
    else:
        levels = tl.load(levels_ptrs + quarter * 32)
        if LAYOUT.ptx is not None and IS_PLAIN:
            first, second = tl.inline_asm_elementwise(
                HALVES_TO_FP32,
                "=r,=r,=r,=r,=r,=r,=r,=r,r",
                [levels],
                (tl.float32, tl.float32),
                True,
                4,
            )
        else:
            first, second = halves(levels, LAYOUT)
            first = _value_of(first, LAYOUT) + bias
            second = _value_of(second, LAYOUT) + bias
    return first, second, bias


@triton.jit  # type: ignore[untyped-decorator]
def _value_of(levels, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """int8 -> fp32."""
    if LAYOUT.ptx is None:
        values = levels.to(tl.float32)
    else:
        values = tl.inline_asm_elementwise(
            BYTES_TO_FP32, "=r,=r,=r,=r,r", [levels], tl.float32, True, 4
        )
        values -= 32768.0 + 128.0
    return values
