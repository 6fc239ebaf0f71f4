"""Triton products of all experts of a layer: y[p] = x[row(p)] W[e(p)]^T + b[e(p)].

Pairs p of a token and one of its experts e are sorted by expert, and cut into tiles of one expert
each. A program computes a block of outputs for one tile. `plan_groups` makes the tiles on the
device, and the grid has programs for the largest possible number of tiles; programs without a tile
end at once. So the host never waits for the device, and a CUDA graph can capture the step. Weights
may lie anywhere, since the kernel takes their addresses.

An output element is summed in the same order and with the same instruction in every batch, because
tiles have one size. Tiles are small, since a decode step gives most experts a token or two. A
prompt of thousands of tokens reads each weight from L2 once for every `_BLOCK_ROWS` tokens.

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

_BLOCK_ROWS = 16
_BLOCK_OUTPUTS = 64
_NUM_STAGES = 3
#: The number of a token's outputs that one program of `add_experts` adds.
_ADDED_OUTPUTS = 1024
#: Addresses of weights are multiples of this number of bytes, so that the kernel loads vectors.
_ADDRESS_MULTIPLE = 16


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


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Pairs sorted by expert, and their tiles. A place is an index into the sorted pairs.

    All tensors are int32 on the device.
    """

    #: The pair at each place, numbered t K + k for token t, [P].
    order: torch.Tensor
    #: The places of each token's pairs, ascending, so in ascending order of experts, [T, K].
    places: torch.Tensor
    #: The expert, first place and end of each tile, [tiles, 3]; a missing tile has no places.
    tiles: torch.Tensor


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
            raise ValueError(f"experts have {sorted(counts)} groups, but must have equally many")
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


def plan_groups(ids: torch.Tensor, num_experts: int) -> GroupPlan:
    """The plan for experts `ids` [T, K], each below num_experts. The call doesn't wait for the
    device."""
    # First, sort the pairs by expert, and count each expert's tiles.
    num_tokens, top_k = ids.shape
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device)
    starts = torch.searchsorted(sorted_ids, experts)
    num_tiles = -((starts[:-1] - starts[1:]) // _BLOCK_ROWS)
    last_tiles = num_tiles.cumsum(0)
    # Then find each tile's expert and places. Two bounds limit the number of tiles: the number of
    # pairs, and the number of full tiles plus one partial tile for each expert.
    num_pairs = num_tokens * top_k
    most = min(num_pairs, num_experts + num_pairs // _BLOCK_ROWS)
    tiles = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(last_tiles, tiles, right=True)
    near = expert.clamp(max=num_experts - 1)
    firsts = starts[near] + (tiles - last_tiles[near] + num_tiles[near]) * _BLOCK_ROWS
    ends = torch.where(expert < num_experts, starts[near + 1], firsts)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(num_pairs, device=ids.device))
    ordered = places.view(num_tokens, top_k).sort(dim=1).values
    of_tiles = torch.stack((near, firsts, ends), 1)
    return GroupPlan(*(each.int() for each in (order, ordered, of_tiles)))


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
    block_inputs = inputs_of_tile(32 if x.dtype == torch.float32 else 128, weights.group_size)
    out = torch.empty(len(plan.order), weights.num_outputs, dtype=x.dtype, device=x.device)
    return multiply_tiles(
        grouped_matmul_kernel,
        out,
        plan,
        pairs_per_row,
        (rows, weights.addresses, weights.scale_addresses, weights.biases),
        (weights.num_inputs, rows.stride(0)),
        GROUP=weights.group_size,
        NUM_STAGES=_NUM_STAGES,
        IS_EVEN=weights.num_inputs % block_inputs == 0,
        BLOCK_N=_BLOCK_OUTPUTS,
        BLOCK_K=block_inputs,
        num_warps=4,
        num_stages=_NUM_STAGES,
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
            BLOCK_M=_BLOCK_ROWS,
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


@triton.jit
def tile_at(tiles_ptr, tile):  # type: ignore[no-untyped-def]
    """(the tile's expert, its first place, the end of its places)."""
    tile_ptr = tiles_ptr + 3 * tile
    return tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)


@triton.jit  # type: ignore[untyped-decorator]
def outputs_of_program(num_outputs, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """(indices [BLOCK_N] of the program's outputs, the same as int64 and clamped to the last
    output, for reading weights)."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    return outputs, tl.minimum(outputs, num_outputs - 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def places_of_tile(  # type: ignore[no-untyped-def]
    first, end, order_ptr, PAIRS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(the places of a tile, whether each is before `end`, its row of x), each [BLOCK_M]."""
    places = first + tl.arange(0, BLOCK_M)
    is_there = places < end
    rows = places
    if order_ptr is not None:
        rows = tl.load(order_ptr + places, is_there, other=0) // PAIRS_PER_ROW
    return places, is_there, rows


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
