"""Triton products of all experts of a layer, with int8 weights and int8 activations.

The tiles follow from the plan of `group_plan.py`. Rows are scaled and summed as in
`int8_matmul.py`. So a row is bit-identical to that product and to the reference, `formats.int8`, in
any batch. Each row of x is quantized once for all experts that read it.

Shapes: P pairs of a token and an expert, E experts, I inputs, N outputs. Called by `formats.int8`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.quantize import INT8_GROUP
from quire.kernels.triton.linear.group_plan import GroupPlan, places_of_tile, tile_at
from quire.kernels.triton.linear.grouped_matmul import (
    GroupedWeights,
    group_weights,
    multiply_tiles,
    outputs_of_program,
    pointer_at,
)
from quire.kernels.triton.linear.int8_matmul import (
    add_group,
    check_sums,
    quantize,
    scaled,
    start_sums,
)
from quire.kernels.triton.linear.matmul import load_rows, load_weight, store_transposed

_BLOCK_OUTPUTS = 64


@dataclass(frozen=True, slots=True)
class GroupedInt8Weights:
    """The weights of E experts."""

    #: Levels [N, I] int8 of each expert, and the biases.
    levels: GroupedWeights
    #: One scale for each output of each expert, [E, N] fp32.
    scales: torch.Tensor
    #: Whether the weights were rotated before they were rounded, as in `Int8Weight`.
    is_rotated: bool


def group_int8_weights(
    levels: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    *,
    is_rotated: bool = True,
) -> GroupedInt8Weights:
    """Group the experts' weights. Raises ValueError if they differ in shape or dtype, or if sums
    might not fit 32 bits."""
    check_sums(levels[0].shape[1], is_rotated=is_rotated)
    return GroupedInt8Weights(group_weights(levels, biases), torch.stack(tuple(scales)), is_rotated)


def grouped_int8_matmul(
    x: torch.Tensor, weights: GroupedInt8Weights, plan: GroupPlan, *, pairs_per_row: int
) -> torch.Tensor:
    """Like `grouped_matmul`, for x of any floating dtype; the result has x's dtype."""
    levels = weights.levels
    if x.shape[-1] != levels.num_inputs:
        raise ValueError(f"x is {tuple(x.shape)}, but must be [any, {levels.num_inputs}]")
    rows = quantize(x, INT8_GROUP, is_rotated=weights.is_rotated)
    return multiply_tiles(
        grouped_int8_matmul_kernel,
        torch.empty(len(plan.order), levels.num_outputs, dtype=x.dtype, device=x.device),
        plan,
        pairs_per_row,
        (rows.q, rows.scales, levels.addresses, weights.scales, levels.biases),
        (len(rows.q), levels.num_inputs, rows.q.stride(0)),
        HAS_GROUPS=weights.is_rotated,
        IS_EVEN=levels.num_inputs % INT8_GROUP == 0,
        BLOCK_N=_BLOCK_OUTPUTS,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def grouped_int8_matmul_kernel(  # type: ignore[no-untyped-def]
    order_ptr,  # [P]: each place's pair; PAIRS_PER_ROW pairs read a row; None: place p reads row p
    tiles_ptr,  # [tiles, 3]: expert, first place, end
    x_ptr,  # [rows of x, x_stride] int8, x_stride a multiple of 256
    x_scales_ptr,  # [x_stride / 256, rows of x], or [rows of x] without HAS_GROUPS
    addresses_ptr,  # [E] int64, of levels [N, I] int8
    scales_ptr,  # [E, N]
    biases_ptr,  # [E, N], or None
    out_ptr,  # [P, N]
    num_outputs,
    num_rows,  # of x
    num_inputs,
    x_stride,
    PAIRS_PER_ROW: tl.constexpr,
    HAS_GROUPS: tl.constexpr,  # x has a scale for each 256 inputs, not one for each row
    IS_EVEN: tl.constexpr,  # I is a multiple of 256
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # First, find the tile's expert and rows; a tile without places ends at once.
    expert, first, end = tile_at(tiles_ptr, tl.program_id(1))
    if first >= end:
        return
    places, is_there, rows = places_of_tile(first, end, order_ptr, PAIRS_PER_ROW, BLOCK_M)
    outputs, near = outputs_of_program(num_outputs, BLOCK_N)
    inputs = tl.arange(0, 128)
    weight_ptrs = pointer_at(addresses_ptr + expert, tl.int8) + near[:, None] * num_inputs
    weight_ptrs += inputs[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    x_scales_ptrs = x_scales_ptr + rows

    # Then sum over the inputs, 256 at a time.
    sums = start_sums(BLOCK_N, BLOCK_M, HAS_GROUPS)
    for k in range(0, num_inputs, 256):
        x_scales = tl.load(x_scales_ptrs, is_there, other=0.0) if HAS_GROUPS else None
        x_scales_ptrs += num_rows
        low_x = tl.trans(load_rows(x_ptrs + k, is_there[:, None], inputs, 0, True))
        high_x = tl.trans(load_rows(x_ptrs + k + 128, is_there[:, None], inputs, 0, True))
        low = load_weight(weight_ptrs + k, inputs, num_inputs - k, IS_EVEN)
        high = load_weight(weight_ptrs + k + 128, inputs, num_inputs - k - 128, IS_EVEN)
        sums = add_group(sums, low, low_x, high, high_x, x_scales, HAS_GROUPS)

    # Last, multiply by the scales, add the bias, and store.
    x_scales = None if HAS_GROUPS else tl.load(x_scales_ptr + rows, is_there, other=0.0)
    own = expert.to(tl.int64) * num_outputs + near
    result = scaled(sums, x_scales, scales_ptr, biases_ptr, own)
    store_transposed(out_ptr, result, places, is_there, outputs, num_outputs)
