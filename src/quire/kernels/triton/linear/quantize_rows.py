"""Quantizes activations to int8, with a scale per row, in Triton.

The result is multiplied by weights that a checkpoint stores in int8, and by wide inputs of int4.

    scale = max |x| / 127,  q = round(x * (127 / max |x|))

The reference is `kernels/quantize.py::quantize_int8`, which also defines the treatment of NaN and
infinity; the bits are the same. Divisions are rounded to the nearest, and no operations are fused.
A program reads its row twice, the second time from the cache.

Shapes: M rows, K inputs, P >= K with padding. dtypes: fp32, bf16, fp16.
Called by `int8_matmul.py` and `int4_matmul.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.quantize_groups import QuantizedGroups
from quire.kernels.triton.support import as_rows, next_power_of_two

_BLOCK = 4096


def quantize_rows(x: torch.Tensor, multiple: int) -> QuantizedGroups:
    """Quantize x [..., K], whose leading dimensions become M. P is a multiple of `multiple`. A row
    is one group, and scales are [M]."""
    rows = as_rows(x)
    num_rows, num_inputs = rows.shape
    width = triton.cdiv(num_inputs, multiple) * multiple
    q = torch.empty(num_rows, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        quantize_rows_kernel[(num_rows,)](
            rows,
            q,
            scales,
            num_inputs,
            width,
            rows.stride(0),
            BLOCK=min(_BLOCK, next_power_of_two(width)),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return QuantizedGroups(q, scales)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows x_stride apart
    q_ptr,  # [M, P]
    scales_ptr,  # [M]
    num_inputs,
    width,  # P
    x_stride,
    BLOCK: tl.constexpr,
):
    # First, find the row's largest magnitude, and its scale.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    unsound = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_inputs, BLOCK):
        mask = columns < num_inputs - start
        x = tl.abs(
            tl.load(x_ptr + row * x_stride + start + columns, mask, other=0.0).to(tl.float32)
        )
        is_finite = x < float("inf")  # false for a NaN
        largest = tl.where(is_finite, tl.maximum(largest, x), largest)
        unsound = tl.where(is_finite, unsound, 1)
    is_sound = tl.max(unsound, 0) == 0
    top = tl.max(largest, 0)
    usable = is_sound & (top >= 1e-30)  # below, 127 / top would overflow
    factor = tl.where(usable, tl.div_rn(127.0, tl.where(usable, top, 1.0)), 0.0)
    tl.store(scales_ptr + row, tl.where(is_sound, tl.div_rn(top, 127.0), float("nan")))

    # Then round the row, and fill q up to its width with zeros.
    for start in range(0, width, BLOCK):
        mask = columns < num_inputs - start
        x = tl.load(x_ptr + row * x_stride + start + columns, mask, other=0.0).to(tl.float32)
        # Adding 1.5 * 2^23 leaves no bits for a fraction, so it rounds to integers, ties to even.
        q = tl.where(usable, (x * factor + 12582912.0) - 12582912.0, 0.0).to(tl.int8)
        tl.store(q_ptr + row * width + start + columns, q, columns < width - start)
