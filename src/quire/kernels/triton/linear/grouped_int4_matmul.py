"""Triton products of all experts of a layer, with int4 weights and int8 activations.

The tiles follow from the plan of `group_plan.py`. Weights are packed, and products summed, as
in `int4_matmul.py`. So in any batch a row has the same bits as from `int4_matmul.py` and from the
reference, `formats.int4`.

Shapes: P pairs of a token and an expert, E experts, I inputs, N outputs. Called by `formats.int4`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.group_plan import GroupPlan, places_of_tile, tile_at
from quire.kernels.triton.linear.grouped_matmul import (
    addresses_of,
    multiply_tiles,
    outputs_of_program,
    pointer_at,
)
from quire.kernels.triton.linear.int4_matmul import (
    STRETCH,
    Int4Weight,
    in_units,
    multiply_stretches,
    num_stretches,
)
from quire.kernels.triton.linear.matmul import store_transposed
from quire.kernels.triton.linear.quantize_groups import quantize_groups

_BLOCK_OUTPUTS = 32


@dataclass(frozen=True, slots=True)
class GroupedInt4Weights:
    """The weights of E experts, each in its own tensors, which are given by their addresses."""

    #: The addresses of each expert's levels, scales and offsets, [3, E] int64.
    addresses: torch.Tensor
    #: S and O of `int4_matmul.py`, [E, N].
    scale_factors: torch.Tensor
    offset_factors: torch.Tensor
    #: The biases, [E, N]; None adds nothing.
    biases: torch.Tensor | None
    num_stretches: int
    #: Keeps the tensors at the addresses alive.
    kept: object


def group_int4_weights(weights: Sequence[Int4Weight]) -> GroupedInt4Weights:
    """Group the experts' weights. Raises ValueError if they differ in shape, or if their addresses
    don't allow vector loads."""
    shape = weights[0].levels.shape
    if any(weight.levels.shape != shape for weight in weights):
        raise ValueError(f"a weight's levels are not {tuple(shape)}, like the first one's")
    parts = zip(*((each.levels, each.scales, each.offsets) for each in weights), strict=True)
    biases = [each.bias for each in weights if each.bias is not None]
    return GroupedInt4Weights(
        torch.stack([addresses_of(each) for each in parts]),
        torch.stack([each.scale_factors for each in weights]),
        torch.stack([each.offset_factors for each in weights]),
        torch.stack(biases) if biases else None,
        shape[0],
        tuple(weights),
    )


def grouped_int4_matmul(
    x: torch.Tensor, weights: GroupedInt4Weights, plan: GroupPlan, *, pairs_per_row: int
) -> torch.Tensor:
    """Like `grouped_matmul`, for x of any floating dtype; the result has x's dtype."""
    if num_stretches(x.shape[-1]) != weights.num_stretches:
        raise ValueError(
            f"x is {tuple(x.shape)}, but the weights have {weights.num_stretches} stretches of "
            f"{STRETCH} inputs"
        )
    num_experts, num_outputs = weights.scale_factors.shape
    rows = quantize_groups(x, STRETCH, STRETCH, by_group=True)
    factors = weights.scale_factors, weights.offset_factors
    return multiply_tiles(
        grouped_int4_matmul_kernel,
        torch.empty(len(plan.order), num_outputs, dtype=x.dtype, device=x.device),
        plan,
        pairs_per_row,
        (rows.q, rows.scales, weights.addresses, *factors, weights.biases),
        (len(rows.q), num_experts, weights.num_stretches),
        BLOCK_N=_BLOCK_OUTPUTS,
        num_warps=_BLOCK_OUTPUTS // 16,
        num_stages=6,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def grouped_int4_matmul_kernel(  # type: ignore[no-untyped-def]
    order_ptr,  # [P]: each place's pair; PAIRS_PER_ROW pairs read a row; None: place p reads row p
    tiles_ptr,  # [tiles, 3]: expert, first place, end
    x_ptr,  # [rows of x, 128 stretches] int8
    x_scales_ptr,  # [stretches, rows of x]
    addresses_ptr,  # [3, E] int64
    scale_factors_ptr,  # [E, N]
    offset_factors_ptr,  # [E, N]
    biases_ptr,  # [E, N], or None
    out_ptr,  # [P, N]
    num_outputs,
    num_rows,  # of x
    num_experts,
    num_stretches,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # First, find the tile's expert and rows; a tile without places ends at once.
    expert, first, end = tile_at(tiles_ptr, tl.program_id(1))
    if first >= end:
        return
    places, is_there, rows = places_of_tile(first, end, order_ptr, PAIRS_PER_ROW, BLOCK_M)
    outputs, near = outputs_of_program(num_outputs, BLOCK_N)
    inputs = tl.arange(0, 32)
    levels = pointer_at(addresses_ptr + expert, tl.uint8)
    scales = pointer_at(addresses_ptr + num_experts + expert, tl.int32)
    offsets = pointer_at(addresses_ptr + 2 * num_experts + expert, tl.int32)
    # Then sum over the expert's stretches.
    scaled, below = multiply_stretches(
        x_ptr + rows.to(tl.int64)[:, None] * (num_stretches * 128) + inputs[None, :],
        x_scales_ptr + rows,
        num_rows,
        is_there,
        levels + near[:, None] * 64 + inputs[None, :],
        scales + near,
        offsets + near,
        num_outputs,
        num_stretches,
        BLOCK_M,
        BLOCK_N,
    )

    # Last, multiply by the factors of each output, add the bias, and store.
    own = expert.to(tl.int64) * num_outputs + near
    result = in_units(scaled, below, scale_factors_ptr + own, offset_factors_ptr + own)
    if biases_ptr is not None:
        result += tl.load(biases_ptr + own)[:, None].to(tl.float32)
    store_transposed(out_ptr, result, places, is_there, outputs, num_outputs)
