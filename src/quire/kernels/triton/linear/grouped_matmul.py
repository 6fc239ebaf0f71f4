"""Triton products of all experts of a layer: y[p] = x[row(p)] W[e(p)]^T + b[e(p)].

Pairs p of a token and one of its experts e are sorted by expert, and cut into tiles of one expert
each (`group_plan.py`). A program computes a block of outputs for one tile. The plan is made on the
device, and the grid has programs for the largest possible number of tiles; programs without a tile
end at once. So the host never waits for the device, and a CUDA graph can capture the step. Weights
may lie anywhere, since the kernel takes their addresses.

An output element is summed in the same order and with the same instruction in every batch, as long
as tiles have 16 rows. They are small, since a decode step gives most experts a token or two. In
tiles of 64 and 128 rows, a prompt reads each weight from L2 a quarter or an eighth as often; tensor
cores then use other instructions, so bits depend on the batch.

Weights may be codes with scales, as in `matmul.py`.

`add_experts` is the weighted sum of each token's results, in ascending order of experts, with the
roundings of `kernels.experts`, which is the reference of the whole layer.

Shapes: T tokens, K experts of a token, P = T K pairs, E experts, I inputs, N outputs. dtypes: bf16,
fp16, fp32. Called by `formats.dense` and `formats.block_quantized.float8_method`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.group_plan import GroupPlan, places_of_tile, tile_at
from quire.kernels.triton.linear.matmul import (
    add_product,
    check_scales,
    inputs_of_scale,
    inputs_of_tile,
    load_rows,
    load_weight,
    scale_and_add,
    store_transposed,
)
from quire.kernels.triton.support import as_rows, next_power_of_two

#: The number of a token's outputs that one program of `add_experts` adds.
_ADDED_OUTPUTS = 1024
#: Addresses of weights are multiples of this number of bytes, so that the kernel loads vectors.
_ADDRESS_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class _ExpertTile:
    """The sizes of a program's tile, except its number of rows."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


#: The tiles of bf16 and fp16 by the rows of the plan's tiles.
_TILES = {
    16: _ExpertTile(64, 128, 4, 3),
    64: _ExpertTile(128, 64, 4, 4),
    128: _ExpertTile(128, 64, 8, 3),
}
_FP32_TILE = _ExpertTile(64, 32, 4, 3)


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """The weights of E linears of one shape, at any addresses."""

    #: The address of each expert's contiguous weight [N, I]: [E] int64 on the device.
    addresses: torch.Tensor
    #: The address of each expert's contiguous scales [G, N], if weights are codes; otherwise None.
    scale_addresses: torch.Tensor | None
    #: The biases, [E, N]; None adds nothing.
    biases: torch.Tensor | None
    num_outputs: int
    num_inputs: int
    #: The number of inputs that share a scale; 0 if all do, or if there are no scales.
    group_size: int
    #: The weights' dtype, uint8 for codes.
    dtype: torch.dtype
    #: Keeps the tensors at the addresses alive.
    kept: object


def group_weights(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    scales: Sequence[torch.Tensor] | None = None,
) -> GroupedWeights:
    """Group the experts' weights. `scales` are those of codes, [G, N] fp32 for each expert. Raises
    ValueError if weights differ in shape or dtype, are not contiguous, or have addresses that don't
    allow vector loads."""
    first = weights[0]
    for weight in weights:
        if (weight.shape, weight.dtype) != (first.shape, first.dtype) or not weight.is_contiguous():
            raise ValueError(
                f"a weight is {tuple(weight.shape)} {weight.dtype}, but all must be "
                f"{tuple(first.shape)} {first.dtype} and contiguous"
            )
    group_size, scale_addresses = 0, None
    if scales is not None:
        for codes, of_groups in zip(weights, scales, strict=True):
            check_scales(codes, of_groups)
        counts = {len(of_groups) for of_groups in scales}
        if len(counts) > 1:
            raise ValueError(f"experts have {sorted(counts)} groups, but must have the same number")
        group_size = inputs_of_scale(first.shape[1], scales[0])
        scale_addresses = addresses_of(scales)
    return GroupedWeights(
        addresses_of(weights),
        scale_addresses,
        None if biases is None else torch.stack(tuple(biases)),
        first.shape[0],
        first.shape[1],
        group_size,
        first.dtype,
        (tuple(weights), scales),
    )


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses [len(tensors)] int64, on the tensors' device. Raises ValueError if an address does
    not allow vector loads."""
    addresses = [each.data_ptr() for each in tensors]
    if any(address % _ADDRESS_MULTIPLE for address in addresses):
        raise ValueError(f"a weight's address is no multiple of {_ADDRESS_MULTIPLE} bytes")
    return torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)


def grouped_matmul(
    x: torch.Tensor, weights: GroupedWeights, plan: GroupPlan, *, pairs_per_row: int
) -> torch.Tensor:
    """x -> the product [P, N] in the plan's order. Either x is [T, I] and pairs_per_row is K, or x
    is [P, I] in the plan's order and pairs_per_row is 0. Raises ValueError for other shapes or
    dtypes."""
    rows = as_rows(x)
    is_same = rows.dtype == weights.dtype or weights.scale_addresses is not None
    if not is_same or rows.shape[1] != weights.num_inputs:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, but must be [any, {weights.num_inputs}] "
            f"{weights.dtype}"
        )
    tile = _FP32_TILE if x.dtype == torch.float32 else _TILES[plan.block_rows]
    block_inputs = inputs_of_tile(tile.inputs, weights.group_size)
    out = torch.empty(len(plan.order), weights.num_outputs, dtype=x.dtype, device=x.device)
    return multiply_tiles(
        grouped_matmul_kernel,
        out,
        plan,
        pairs_per_row,
        (rows, weights.addresses, weights.scale_addresses, weights.biases),
        (weights.num_inputs, rows.stride(0)),
        GROUP=weights.group_size,
        NUM_STAGES=tile.num_stages,
        IS_EVEN=weights.num_inputs % block_inputs == 0,
        BLOCK_N=tile.outputs,
        BLOCK_K=block_inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )


def multiply_tiles(
    kernel: Any,
    out: torch.Tensor,
    plan: GroupPlan,
    pairs_per_row: int,
    tensors: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, ...],
    **options: Any,
) -> torch.Tensor:
    """Launch `kernel` for all tiles of the plan. It writes `out` [P, N], which is returned.

    `tensors` are the kernel's arguments between the plan and `out`; `sizes` are its arguments
    after N. `options` are the kernel's constants, such as BLOCK_N, and Triton's launch options.
    """
    num_outputs = out.shape[1]
    if out.numel():
        kernel[(triton.cdiv(num_outputs, options["BLOCK_N"]), len(plan.tiles))](
            plan.order if pairs_per_row else None,
            plan.tiles,
            *tensors,
            out,
            num_outputs,
            *sizes,
            PAIRS_PER_ROW=max(1, pairs_per_row),
            BLOCK_M=plan.block_rows,
            **options,
        )
    return out


def add_experts(outputs: torch.Tensor, weights: torch.Tensor, plan: GroupPlan) -> torch.Tensor:
    """outputs [P, N] in the plan's order, weights [T, K] fp32 -> [T, N]."""
    num_tokens, top_k = plan.places.shape
    num_outputs = outputs.shape[1]
    out = torch.empty(num_tokens, num_outputs, dtype=outputs.dtype, device=outputs.device)
    if not out.numel():
        return out
    block = min(_ADDED_OUTPUTS, next_power_of_two(num_outputs))
    add_experts_kernel[(num_tokens, triton.cdiv(num_outputs, block))](
        outputs,
        weights.contiguous(),
        plan.order,
        plan.places,
        out,
        num_outputs,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def grouped_matmul_kernel(  # type: ignore[no-untyped-def]
    order_ptr,  # [P]: each place's pair; PAIRS_PER_ROW pairs read a row; None: place p reads row p
    tiles_ptr,  # [tiles, 3]: expert, first place, end
    x_ptr,  # rows of I elements, x_stride apart
    addresses_ptr,  # [E] int64, of weights [N, I], of x's dtype or of codes
    scale_addresses_ptr,  # [E] int64, of scales [G, N] of codes, or None
    biases_ptr,  # [E, N], or None
    out_ptr,  # [P, N]
    num_outputs,
    num_inputs,
    x_stride,
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of BLOCK_K; 0: all, or no scales
    NUM_STAGES: tl.constexpr,  # as of the launch; with it, scales are fetched ahead, too
    PAIRS_PER_ROW: tl.constexpr,
    IS_EVEN: tl.constexpr,  # I is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # First, find the tile's expert and rows; a tile without places ends at once.
    expert, first, end = tile_at(tiles_ptr, tl.program_id(1))
    if first >= end:
        return
    places, is_there, rows = places_of_tile(first, end, order_ptr, PAIRS_PER_ROW, BLOCK_M)
    outputs, near = outputs_of_program(num_outputs, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    scales_ptrs = None
    if scale_addresses_ptr is None:
        weight_ptr = pointer_at(addresses_ptr + expert, x_ptr.dtype.element_ty)
    else:
        weight_ptr = pointer_at(addresses_ptr + expert, tl.uint8)
        scales_ptrs = pointer_at(scale_addresses_ptr + expert, tl.float32) + near
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    weight_ptrs = weight_ptr + near[:, None] * num_inputs + inputs[None, :]

    # Then sum over the inputs.
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, num_inputs, BLOCK_K, num_stages=NUM_STAGES):
        x = load_rows(x_ptrs + k, is_there[:, None], inputs, num_inputs - k, IS_EVEN)
        weight = load_weight(weight_ptrs + k, inputs, num_inputs - k, IS_EVEN)
        sums = add_product(
            sums, weight, tl.trans(x), scales_ptrs, k, num_inputs, num_outputs, GROUP
        )

    IS_SCALED: tl.constexpr = scale_addresses_ptr is not None and GROUP == 0
    scales = tl.load(scales_ptrs)[:, None] if IS_SCALED else None
    bias = None
    if biases_ptr is not None:
        bias = tl.load(biases_ptr + expert.to(tl.int64) * num_outputs + near)
        bias = bias[:, None].to(tl.float32)
    sums = scale_and_add(sums, scales, bias)
    store_transposed(out_ptr, sums, places, is_there, outputs, num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def pointer_at(address_ptr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stored address as a pointer to KIND, marked as aligned so that loads are vectorized."""
    # Triton 3.7 forgets the alignment of an integer that becomes a pointer.
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(KIND)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def outputs_of_program(num_outputs, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """(indices [BLOCK_N] of the program's outputs, the same as int64 and clamped to the last
    output, for reading weights)."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    return outputs, tl.minimum(outputs, num_outputs - 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def add_experts_kernel(  # type: ignore[no-untyped-def]
    outputs_ptr,  # [P, N]
    weights_ptr,  # [P] fp32, by pair
    order_ptr,  # [P]
    places_ptr,  # [T, TOP_K]
    out_ptr,  # [T, N]
    num_outputs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_outputs
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + k)
        weight = tl.load(weights_ptr + tl.load(order_ptr + place))
        y = tl.load(outputs_ptr + place.to(tl.int64) * num_outputs + columns, mask, other=0.0)
        weighted = (y.to(tl.float32) * weight).to(dtype).to(tl.float32)
        total = (total + weighted).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * num_outputs + columns, total.to(dtype), mask)
