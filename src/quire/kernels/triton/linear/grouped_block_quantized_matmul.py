"""Triton products of all experts of a layer, with block-quantized weights and int8 activations.

The tiles follow from the plan of `group_plan.py`. Weights are laid out, and products summed, as
in `block_quantized_matmul.py`, so a row is bit-identical to that product, in any batch. All experts
have the same block format.

Shapes: P pairs of a token and an expert, E experts, I inputs, N outputs. Called by
`formats.block_quantized.triton_method`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.block_quantized_layout import (
    CHUNK_INPUTS,
    STRETCH,
    BlockQuantizedLayout,
    BlockQuantizedWeight,
    num_stretches,
)
from quire.kernels.triton.linear.block_quantized_matmul import multiply_stretches
from quire.kernels.triton.linear.group_plan import GroupPlan, places_of_tile, tile_at
from quire.kernels.triton.linear.grouped_matmul import (
    addresses_of,
    multiply_tiles,
    outputs_of_program,
    pointer_at,
)
from quire.kernels.triton.linear.matmul import store_transposed
from quire.kernels.triton.linear.quantize_groups import quantize_groups

_BLOCK_OUTPUTS = 32


@dataclass(frozen=True, slots=True)
class GroupedBlockQuantizedWeights:
    """The weights of E experts, at any addresses."""

    layout: BlockQuantizedLayout
    #: The addresses of each expert's levels and words, [2, E] int64.
    addresses: torch.Tensor
    #: The biases, [E, N]; None adds nothing.
    biases: torch.Tensor | None
    num_outputs: int
    num_stretches: int
    #: Keeps the tensors at the addresses alive.
    kept: object


def group_block_quantized_weights(
    weights: Sequence[BlockQuantizedWeight],
) -> GroupedBlockQuantizedWeights:
    """Group the experts' weights. Raises ValueError if they differ in layout or shape, or if their
    addresses don't allow vector loads."""
    first = weights[0]
    for weight in weights:
        if weight.layout != first.layout or weight.levels.shape != first.levels.shape:
            raise ValueError(
                f"a weight is {weight.layout} {tuple(weight.levels.shape)}, but all must be "
                f"like the first one, {first.layout} {tuple(first.levels.shape)}"
            )
    biases = [each.bias for each in weights if each.bias is not None]
    return GroupedBlockQuantizedWeights(
        first.layout,
        torch.stack(
            [
                addresses_of([each.levels for each in weights]),
                addresses_of([each.words for each in weights]),
            ]
        ),
        torch.stack(biases) if biases else None,
        first.levels.shape[1],
        first.levels.shape[0],
        tuple(weights),
    )


def grouped_block_quantized_matmul(
    x: torch.Tensor, weights: GroupedBlockQuantizedWeights, plan: GroupPlan, *, pairs_per_row: int
) -> torch.Tensor:
    """Like `grouped_matmul`, for x of any floating dtype; the result has x's dtype."""
    if num_stretches(x.shape[-1]) != weights.num_stretches:
        raise ValueError(
            f"x is {tuple(x.shape)}, but the weights have {weights.num_stretches} stretches of "
            f"{STRETCH} inputs"
        )
    addresses = weights.addresses
    rows = quantize_groups(x, CHUNK_INPUTS, STRETCH)
    return multiply_tiles(
        grouped_block_quantized_matmul_kernel,
        torch.empty(len(plan.order), weights.num_outputs, dtype=x.dtype, device=x.device),
        plan,
        pairs_per_row,
        (rows.q, rows.scales, addresses, weights.biases),
        (addresses.shape[1], weights.num_stretches),
        LAYOUT=weights.layout,
        BLOCK_N=_BLOCK_OUTPUTS,
        num_warps=_BLOCK_OUTPUTS // 16,
        num_stages=4,
        enable_fp_fusion=False,
    )


@triton.jit  # type: ignore[untyped-decorator]
def grouped_block_quantized_matmul_kernel(  # type: ignore[no-untyped-def]
    order_ptr,  # [P]: each place's pair; PAIRS_PER_ROW pairs read a row; None: place p reads row p
    tiles_ptr,  # [tiles, 3]: expert, first place, end
    x_ptr,  # [rows, 256 stretches] int8
    x_scales_ptr,  # [rows, 8 stretches]
    addresses_ptr,  # [2, E] int64
    biases_ptr,  # [E, N], or None
    out_ptr,  # [P, N]
    num_outputs,
    num_experts,
    num_stretches,
    LAYOUT: tl.constexpr,  # a BlockQuantizedLayout
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
    levels = pointer_at(addresses_ptr + expert, tl.uint8 if LAYOUT.width == 4 else tl.int8)
    words = pointer_at(addresses_ptr + num_experts + expert, tl.int32)
    # Then multiply, add the bias, and store.
    result = multiply_stretches(
        x_ptr + rows.to(tl.int64)[:, None] * (num_stretches * 256),
        x_scales_ptr + rows.to(tl.int64) * (num_stretches * 8),
        is_there,
        levels + near[:, None] * LAYOUT.level_bytes,
        words + near,
        num_outputs,
        num_stretches,
        LAYOUT,
        BLOCK_M,
        BLOCK_N,
    )
    if biases_ptr is not None:
        bias = tl.load(biases_ptr + expert.to(tl.int64) * num_outputs + near)
        result += bias[:, None].to(tl.float32)
    store_transposed(out_ptr, result, places, is_there, outputs, num_outputs)
