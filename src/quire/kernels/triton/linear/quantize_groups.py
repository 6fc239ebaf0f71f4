"""Quantizes activations to int8, with a scale for each group of inputs, in Triton.

Products of block-quantized, int8 and int4 weights read the result. x may be rotated first.

    scale = max |x| / 127,  q = round(x * (127 / max |x|))           for each group

The reference is `rotate_blocks`, then `quantize_groups`, of `kernels.quantize`, and the bits are
the same. A group with an infinity or a NaN has the scale NaN. Divisions are rounded to the nearest,
and no operations are fused.

Shapes: M rows, K inputs, P >= K with padding, G groups of P. dtypes: fp32, bf16, fp16. Called by
`block_quantized_matmul.py`, `int8_matmul.py`, `int4_matmul.py` and their grouped products.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.dependent_launch import await_inputs, launch_options
from quire.kernels.triton.rotation import rotate_blocks
from quire.kernels.triton.support import as_rows

#: The number of inputs that a program rounds.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class QuantizedGroups:
    """Activations as int8 numbers times the scales of their groups."""

    #: Rounded activations, [M, P] int8, with zeros from input K on.
    q: torch.Tensor
    #: One scale for each group, fp32: [M, G], [G, M] if sorted by group, or [M] if a row is one
    #: group.
    scales: torch.Tensor


def quantize_groups(
    x: torch.Tensor, size: int, multiple: int, *, rotation: int = 1, by_group: bool = False
) -> QuantizedGroups:
    """Quantize x [..., K], whose leading dimensions become M.

    `size` is the number of inputs in a group, a power of two of at most 1024. P is a multiple of
    `multiple`, which is a multiple of `size`. `rotation` inputs are rotated together, a power of
    two that divides K and `size`; 1 rotates none. With `by_group`, scales are [G, M], so that the
    scales that a tile of rows reads at a time are contiguous.
    """
    rows = as_rows(x)
    num_rows, num_inputs = rows.shape
    width = triton.cdiv(num_inputs, multiple) * multiple
    num_groups = width // size
    q = torch.empty(num_rows, width, dtype=torch.int8, device=x.device)
    shape = (num_groups, num_rows) if by_group else (num_rows, num_groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    if num_rows:
        quantize_groups_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            rows,
            q,
            scales,
            num_inputs,
            width,
            rows.stride(0),
            1 if by_group else num_groups,
            num_rows if by_group else 1,
            SIZE=size,
            ROTATION=rotation,
            BLOCK=_BLOCK,
            **launch_options(x.device),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return QuantizedGroups(q, scales)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows x_stride apart
    q_ptr,  # [M, P]
    scales_ptr,  # [M, G], of any strides
    num_inputs,
    width,  # P
    x_stride,
    scales_stride,  # between rows
    group_stride,
    SIZE: tl.constexpr,  # inputs of a group
    ROTATION: tl.constexpr,  # inputs that are rotated together; 1 for no rotation
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr = False,  # see dependent_launch.py
):
    # First, load the program's groups, and rotate them.
    await_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    groups = tl.arange(0, BLOCK // SIZE)
    columns = start + groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + row * x_stride + columns, columns < num_inputs, other=0.0).to(tl.float32)
    x = rotate_blocks(x, ROTATION)
    # Then compute the scales.
    size = tl.abs(x)
    is_finite = size < float("inf")  # false for a NaN
    top = tl.max(tl.where(is_finite, size, 0.0), 1)
    is_sound = tl.min(is_finite.to(tl.int32), 1) == 1
    usable = is_sound & (top >= 1e-30)  # below, 127 / top would overflow
    factors = tl.where(usable, tl.div_rn(127.0, tl.where(usable, top, 1.0)), 0.0)
    scales = tl.where(is_sound, tl.div_rn(top, 127.0), float("nan"))
    places = start // SIZE + groups
    scales_ptrs = scales_ptr + row * scales_stride + places.to(tl.int64) * group_stride
    tl.store(scales_ptrs, scales, places < width // SIZE)
    # Last, round. Adding 1.5 * 2^23 leaves no bits for a fraction, so ties go to even.
    rounded = (x * factors[:, None] + 12582912.0) - 12582912.0
    q = tl.where(usable[:, None], rounded, 0.0).to(tl.int8)
    tl.store(q_ptr + row * width + columns, q, columns < width)
