"""Triton products of many experts at once with int8 weights and int8 activations.

As `grouped_matmul.py`, whose plan says who computes what; weights and activations have scales as in
`int8_matmul.py`: dots are exact integers, so a row has the bits of that product in any batch, and
those of `formats.int8`, the reference. Each row of x is quantized once, however many experts read
it.

Shapes: P pairs of a token and an expert, E experts, I inputs, N outputs. Called by `formats.int8`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.grouped_matmul import (
    GroupedWeights,
    GroupPlan,
    group_weights,
    places_of_tile,
    pointer_at,
    store_places,
)
from quire.kernels.triton.linear.int8_matmul import MAX_INPUTS
from quire.kernels.triton.linear.matmul import load_rows, load_weight
from quire.kernels.triton.linear.quantize_rows import quantize_rows

_BLOCK_ROWS = 16
_BLOCK_OUTPUTS = 64
_BLOCK_INPUTS = 128


@dataclass(frozen=True, slots=True)
class GroupedInt8Weights:
    """levels: of E linears [N, I] int8, whose biases count. scales: [E, N] fp32."""

    levels: GroupedWeights
    scales: torch.Tensor


def group_int8_weights(
    levels: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
) -> GroupedInt8Weights:
    """Raises ValueError for weights that are not alike."""
    if levels[0].shape[1] > MAX_INPUTS:
        raise ValueError(f"a weight has {levels[0].shape[1]} inputs, more than {MAX_INPUTS}")
    return GroupedInt8Weights(group_weights(levels, biases), torch.stack(tuple(scales)))


def grouped_int8_matmul(
    x: torch.Tensor, weights: GroupedInt8Weights, plan: GroupPlan, *, pairs_per_row: int
) -> torch.Tensor:
    """As `grouped_matmul`; x of any floating dtype, in which the result is. Raises ValueError."""
    levels = weights.levels
    if x.shape[-1] != levels.num_inputs:
        raise ValueError(f"x is {tuple(x.shape)}, but must be [any, {levels.num_inputs}]")
    out = torch.empty(len(plan.order), levels.num_outputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = quantize_rows(x)
    grid = (triton.cdiv(levels.num_outputs, _BLOCK_OUTPUTS), len(plan.experts))
    grouped_int8_matmul_kernel[grid](
        rows.q,
        rows.scales,
        plan.order if pairs_per_row else None,
        levels.addresses,
        weights.scales,
        levels.biases,
        plan.experts,
        plan.firsts,
        plan.ends,
        out,
        levels.num_outputs,
        levels.num_inputs,
        rows.q.stride(0),
        PAIRS_PER_ROW=max(1, pairs_per_row),
        IS_EVEN=levels.num_inputs % _BLOCK_INPUTS == 0,
        BLOCK_M=_BLOCK_ROWS,
        BLOCK_N=_BLOCK_OUTPUTS,
        BLOCK_K=_BLOCK_INPUTS,
        num_warps=4,
        num_stages=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def grouped_int8_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # rows of I int8, x_stride apart
    x_scales_ptr,  # of each row
    order_ptr,  # [P] of which pair's row a place reads, PAIRS_PER_ROW to a row; None: its own
    addresses_ptr,  # [E] int64, of levels [N, I] int8
    scales_ptr,  # [E, N]
    biases_ptr,  # [E, N], or None
    experts_ptr,  # [tiles]
    firsts_ptr,  # [tiles]
    ends_ptr,  # [tiles]
    out_ptr,  # [P, N]
    num_outputs,
    num_inputs,
    x_stride,
    PAIRS_PER_ROW: tl.constexpr,
    IS_EVEN: tl.constexpr,  # I is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(1)
    first = tl.load(firsts_ptr + tile)
    end = tl.load(ends_ptr + tile)
    if first >= end:
        return
    expert = tl.load(experts_ptr + tile)
    places, is_there, rows = places_of_tile(first, end, order_ptr, PAIRS_PER_ROW, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    near = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    weight_ptrs = pointer_at(addresses_ptr + expert, tl.int8) + near[:, None] * num_inputs
    weight_ptrs += inputs[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]

    dots = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for k in range(0, num_inputs, BLOCK_K):
        x = load_rows(x_ptrs + k, is_there[:, None], inputs, num_inputs - k, IS_EVEN)
        weight = load_weight(weight_ptrs + k, inputs, num_inputs - k, IS_EVEN)
        dots = tl.dot(weight, tl.trans(x), dots, out_dtype=tl.int32)

    x_scales = tl.load(x_scales_ptr + rows, is_there, other=0.0)
    own = expert.to(tl.int64) * num_outputs + near
    result = dots.to(tl.float32) * x_scales[None, :] * tl.load(scales_ptr + own)[:, None]
    if biases_ptr is not None:
        result += tl.load(biases_ptr + own)[:, None].to(tl.float32)
    store_places(out_ptr, result, places, is_there, outputs, num_outputs)
