"""Dequantizes rows of an fp8 weight, in Triton: widened codes times the scales of groups.

Each product is rounded once, in fp32, and then to the wanted dtype, as by `UnpackedRows.numbers` of
`formats.block_quantized.weights`, which is the reference. A program takes 1,024 inputs of one row.

Shapes: R rows, K inputs, N outputs, G groups. Called by `formats.block_quantized.float8_method`,
for embeddings and for products that are faster in cuBLAS.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.matmul import check_scales
from quire.kernels.triton.widening import widen

_BLOCK_INPUTS = 1024


def unpack_float8_rows(
    codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor | range, dtype: torch.dtype
) -> torch.Tensor:
    """codes [N, K] uint8, scales [G, N] fp32, rows [R] int64, or a range of step 1 -> these rows,
    dequantized to `dtype`, [R, K]."""
    check_scales(codes, scales)
    num_outputs, num_inputs = codes.shape
    out = torch.empty(len(rows), num_inputs, dtype=dtype, device=codes.device)
    if not out.numel():
        return out
    is_range = isinstance(rows, range)
    float8_rows_kernel[(len(rows), triton.cdiv(num_inputs, _BLOCK_INPUTS))](
        None if is_range else rows,
        codes,
        scales,
        out,
        rows.start if isinstance(rows, range) else 0,
        num_outputs,
        num_inputs,
        num_inputs // len(scales),
        BLOCK=_BLOCK_INPUTS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def float8_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R] int64, or None: consecutive rows from `first` on
    codes_ptr,  # [N, K]
    scales_ptr,  # [G, N]
    out_ptr,  # [R, K]
    first,
    num_outputs,
    num_inputs,
    group_size,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    if rows_ptr is not None:
        row = tl.load(rows_ptr + place)
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = inputs < num_inputs
    codes = tl.load(codes_ptr + row * num_inputs + inputs, mask, other=0)
    groups = (inputs // group_size).to(tl.int64)
    scales = tl.load(scales_ptr + groups * num_outputs + row, mask, other=0.0)
    numbers = widen(codes, tl.float32) * scales
    tl.store(out_ptr + place * num_inputs + inputs, numbers.to(out_ptr.dtype.element_ty), mask)
