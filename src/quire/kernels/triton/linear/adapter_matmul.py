"""Triton products of adapters (LoRA): y[t] += B[s(t)] h[t], h[t] = round(scale A[s(t)] x[t]).

Rows of a step are sorted by the slot s that they use, and cut into tiles of one slot each. Rows
without an adapter are in no tile, and are not touched. The host knows the rows' slots and makes the
list of tiles. The list and the slots' weights are tensors with fixed addresses, so a step captured
as a CUDA graph serves any rows.

- A x: a program computes 16 inner columns of one part of the linear for a tile, over one or all
slices of K.
  Since A has few rows, slices are needed to fill the device when there are few tiles.
- B h: a program has a tile and some outputs of one part. It adds the slices, multiplies them by the
  scale and by B, and adds the product to the linear's result, rounded once.

Each element is summed in the same order in every batch: tiles have one size, the slices of K depend
only on K, and both kernels add them in order. Sums are in fp32; h is rounded once, to the dtype of
A and B.

Shapes: T rows of a step, S slots, P parts of a linear, R the largest rank, C = P R inner columns, K
inputs and N outputs of a linear. dtypes: bf16, fp16, fp32. Called by `adapters.triton_slots`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels.triton.linear.group_plan import tile_at
from quire.kernels.triton.linear.matmul import load_rows, load_weight
from quire.kernels.triton.support import as_rows

#: Inner columns of a program, all of one part; R is a multiple of it.
COLUMNS = 16
_BLOCK_ROWS = 16
_BLOCK_OUTPUTS = 64
_ENOUGH_PROGRAMS = 128
_SMALLEST_SLICE = 512
_MOST_SLICES = 8
_SLICE_UNIT = 128


class AdapterTiles:
    """The tiles of a step, on the device: lists of rows that use the same slot."""

    def __init__(self, device: torch.device, max_num_tokens: int, num_slots: int) -> None:
        #: Whether any row uses a slot.
        self.has_rows = False
        #: The number of rows of the step.
        self.num_tokens = 0
        self._num_slots = num_slots
        self._most = self.most_tiles(max_num_tokens)
        self._host = np.zeros(max_num_tokens + 3 * self._most, np.int32)
        self._device = torch.zeros(len(self._host), dtype=torch.int32, device=device)
        #: The rows that use a slot, sorted by slot.
        self.order = self._device[:max_num_tokens]
        #: The slot of each tile, and its first place and end in the order, [tiles, 3]; an empty
        #: tile has no places.
        self.of_slots = self._device[max_num_tokens:].view(-1, 3)

    def most_tiles(self, num_tokens: int) -> int:
        """An upper bound of the number of tiles for this number of rows: one for each row, or all
        full tiles and one partial tile for each slot."""
        return min(num_tokens, self._num_slots + num_tokens // _BLOCK_ROWS)

    def set(self, row_slots: torch.Tensor) -> None:
        """Make the tiles for row_slots [T] int32, on the host: slots below S, or -1 for no adapter.
        The copy to the device is queued. Raises ValueError for more rows than there is room for."""
        if len(row_slots) > len(self.order):
            raise ValueError(f"{len(row_slots)} rows, but tiles were made for {len(self.order)}")
        row_slots_array = row_slots.numpy()
        used = np.flatnonzero(row_slots_array >= 0)
        had_rows, self.has_rows = self.has_rows, len(used) > 0
        self.num_tokens = len(row_slots_array)
        # If no row used a slot before, and none does now, the device's tiles are empty already.
        if not (self.has_rows or had_rows):
            return
        order = used[np.argsort(row_slots_array[used], kind="stable")]
        num_rows = len(self._host) - 3 * self._most
        tiles = self._host[num_rows:].reshape(self._most, 3)
        tiles[:] = 0
        self._host[: len(order)] = order
        tile = 0
        found, counts = np.unique(row_slots_array[used], return_counts=True)
        end = 0
        for slot, count in zip(found, counts, strict=True):
            first, end = end, end + int(count)
            for start in range(first, end, _BLOCK_ROWS):
                tiles[tile] = slot, start, min(start + _BLOCK_ROWS, end)
                tile += 1
        self._device.copy_(torch.from_numpy(self._host))


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The slots of one linear, on the device."""

    #: A of each slot, [S, C, K].
    a: torch.Tensor
    #: B of each slot, [S, N, R].
    b: torch.Tensor
    #: The rank of each part of each slot's adapter, [S, P] int32; 0 adds nothing.
    ranks: torch.Tensor
    #: The factor `scale` of each part of each slot's adapter, [S, P] fp32.
    scales: torch.Tensor
    #: The part, first output and end of each block of outputs, [3, blocks] int32.
    blocks: torch.Tensor


def make_weights(
    num_inputs: int,
    part_sizes: Sequence[int],
    num_slots: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AdapterWeights:
    """Empty slots. `max_rank` is R, a multiple of COLUMNS."""
    assert max_rank % COLUMNS == 0, max_rank
    num_parts, num_outputs = len(part_sizes), sum(part_sizes)
    blocks, start = [], 0
    for part, size in enumerate(part_sizes):
        firsts = range(start, start + size, _BLOCK_OUTPUTS)
        blocks += [(part, first, min(first + _BLOCK_OUTPUTS, start + size)) for first in firsts]
        start += size
    shape = (num_slots, num_parts * max_rank, num_inputs)
    return AdapterWeights(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(num_slots, num_outputs, max_rank, dtype=dtype, device=device),
        torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device),
        torch.zeros(num_slots, num_parts, dtype=torch.float32, device=device),
        torch.tensor(blocks, dtype=torch.int32).T.contiguous().to(device),
    )


def slices_of(num_inputs: int) -> int:
    """The number of slices that K is cut into."""
    return max(1, min(_MOST_SLICES, num_inputs // _SMALLEST_SLICE))


def add_adapters(
    x: torch.Tensor, out: torch.Tensor, weights: AdapterWeights, tiles: AdapterTiles
) -> None:
    """Add the adapters' products with x [..., K] to out [..., N], contiguous. x and out have the T
    rows of `tiles`. Raises ValueError for other shapes or dtypes."""
    rows, num_columns = as_rows(x), weights.a.shape[1]
    if rows.dtype != weights.a.dtype or rows.shape[1] != weights.a.shape[2]:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, but must be [any, {weights.a.shape[2]}] "
            f"{weights.a.dtype}"
        )
    if len(rows) != tiles.num_tokens:
        raise ValueError(f"x has {len(rows)} rows, but adapters were set for {tiles.num_tokens}")
    results = out.view(-1, weights.b.shape[1])
    num_tiles = tiles.most_tiles(len(rows))
    if not num_tiles:
        return
    # First, A x: each slice by a program of its own if there are too few programs otherwise.
    num_slices = slices_of(rows.shape[1])
    is_split = num_slices > 1 and num_tiles * (num_columns // COLUMNS) < _ENOUGH_PROGRAMS
    inner = torch.empty(
        num_slices if is_split else 1, len(rows), num_columns, dtype=torch.float32, device=x.device
    )
    _launch_inner(rows, weights, tiles, inner, num_tiles, num_slices)
    # Then B h, which adds the slices.
    outer_adapter_kernel[(num_tiles, weights.blocks.shape[1])](
        inner,
        tiles.order,
        tiles.of_slots,
        weights.b,
        weights.ranks,
        weights.scales,
        weights.blocks,
        results,
        len(rows),
        results.shape[1],
        num_columns,
        weights.blocks.shape[1],
        NUM_SLICES=len(inner),
        NUM_PARTS=weights.ranks.shape[1],
        MAX_RANK=weights.b.shape[2],
        BLOCK_M=_BLOCK_ROWS,
        BLOCK_N=_BLOCK_OUTPUTS,
        BLOCK_C=COLUMNS,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _launch_inner(
    rows: torch.Tensor,
    weights: AdapterWeights,
    tiles: AdapterTiles,
    inner: torch.Tensor,
    num_tiles: int,
    num_slices: int,
) -> None:
    num_inputs, num_columns = rows.shape[1], weights.a.shape[1]
    block_inputs = 32 if rows.dtype == torch.float32 else 128
    slice_size = triton.cdiv(num_inputs, num_slices * _SLICE_UNIT) * _SLICE_UNIT
    is_split = len(inner) > 1
    inner_adapter_kernel[(num_tiles, num_columns // COLUMNS, len(inner))](
        rows,
        tiles.order,
        tiles.of_slots,
        weights.a,
        weights.ranks,
        inner,
        len(rows),
        num_inputs,
        num_columns,
        rows.stride(0),
        slice_size,
        NUM_SLICES=1 if is_split else num_slices,
        NUM_PARTS=weights.ranks.shape[1],
        MAX_RANK=weights.b.shape[2],
        IS_EVEN=num_inputs % block_inputs == 0,
        BLOCK_M=_BLOCK_ROWS,
        BLOCK_C=COLUMNS,
        BLOCK_K=block_inputs,
        num_warps=2,
        num_stages=4,
        enable_fp_fusion=True,
    )


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_tile(  # type: ignore[no-untyped-def]
    order_ptr, first, end, num_rows, BLOCK_M: tl.constexpr
):
    """(the places of a tile in the order, whether each has a row, the rows), all [BLOCK_M]."""
    places = first + tl.arange(0, BLOCK_M)
    is_there = places < end
    rows = tl.load(order_ptr + places, is_there, other=0)
    return places, is_there & (rows < num_rows), rows


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def inner_adapter_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, K], rows x_stride apart
    order_ptr,  # [T]
    tiles_ptr,  # [tiles, 3]: slot, first place, end
    a_ptr,  # [S, C, K]
    ranks_ptr,  # [S, P]
    out_ptr,  # [programs along axis 2, T, C] fp32
    num_rows,
    num_inputs,
    num_columns,
    x_stride,
    slice_size,  # a multiple of BLOCK_K
    NUM_SLICES: tl.constexpr,  # slices in this program; if 1, it has slice tl.program_id(2)
    NUM_PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    IS_EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # First, find the tile's rows and the columns of A; the slot's rank may not reach them.
    slot, first, end = tile_at(tiles_ptr, tl.program_id(0))
    if first >= end:
        return
    first_column = tl.program_id(1) * BLOCK_C
    part = first_column // MAX_RANK
    if first_column - part * MAX_RANK >= tl.load(ranks_ptr + slot * NUM_PARTS + part):
        return
    places, is_there, rows = rows_of_tile(order_ptr, first, end, num_rows, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_C)
    inputs = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    lines = slot.to(tl.int64) * num_columns + columns
    a_ptrs = a_ptr + lines[:, None] * num_inputs + inputs[None, :]
    first_slice = tl.program_id(2)

    # Then sum slice by slice.
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for index in range(NUM_SLICES):
        start = (first_slice + index) * slice_size
        stop = tl.minimum(start + slice_size, num_inputs)
        sums = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        for k in range(start, stop, BLOCK_K):
            x = load_rows(x_ptrs + k, is_there[:, None], inputs, num_inputs - k, IS_EVEN)
            a = load_weight(a_ptrs + k, inputs, num_inputs - k, IS_EVEN)
            sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
        total += sums

    out_rows = first_slice.to(tl.int64) * num_rows + places
    out_ptrs = out_ptr + out_rows[:, None] * num_columns + columns[None, :]
    tl.store(out_ptrs, total, is_there[:, None])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def outer_adapter_kernel(  # type: ignore[no-untyped-def]
    inner_ptr,  # [NUM_SLICES, T, C] fp32
    order_ptr,  # [T]
    tiles_ptr,  # [tiles, 3]: slot, first place, end
    b_ptr,  # [S, N, R]
    ranks_ptr,  # [S, P]
    scales_ptr,  # [S, P]
    blocks_ptr,  # [3, blocks]: part, first output, end
    out_ptr,  # [T, N]
    num_rows,
    num_outputs,
    num_columns,
    num_blocks,
    NUM_SLICES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # First, find the tile's rows and the block of outputs.
    slot, first, end = tile_at(tiles_ptr, tl.program_id(0))
    if first >= end:
        return
    block = tl.program_id(1)
    part = tl.load(blocks_ptr + block)
    rank = tl.load(ranks_ptr + slot * NUM_PARTS + part)
    if rank == 0:
        return
    scale = tl.load(scales_ptr + slot * NUM_PARTS + part)
    places, is_there, rows = rows_of_tile(order_ptr, first, end, num_rows, BLOCK_M)
    outputs = tl.load(blocks_ptr + num_blocks + block) + tl.arange(0, BLOCK_N)
    are_ours = outputs < tl.load(blocks_ptr + 2 * num_blocks + block)
    inner_ptrs = inner_ptr + places.to(tl.int64)[:, None] * num_columns + part * MAX_RANK
    b_ptrs = b_ptr + (slot.to(tl.int64) * num_outputs + outputs)[:, None] * MAX_RANK

    # Then add the slices of h, and multiply them by B, some columns at a time.
    delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for column in range(0, rank, BLOCK_C):
        columns = column + tl.arange(0, BLOCK_C)
        inner_mask = is_there[:, None] & (columns[None, :] < rank)
        inner = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        for index in range(NUM_SLICES):
            slice_ptrs = inner_ptrs + tl.cast(index, tl.int64) * num_rows * num_columns
            inner += tl.load(slice_ptrs + columns[None, :], inner_mask, other=0.0)
        b_mask = are_ours[:, None] & (columns[None, :] < rank)
        b = tl.load(b_ptrs + columns[None, :], b_mask, other=0.0)
        delta = tl.dot((inner * scale).to(b.dtype), tl.trans(b), delta, input_precision="ieee")

    # Last, add the product to the linear's result.
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    out_mask = is_there[:, None] & are_ours[None, :]
    result = tl.load(out_ptrs, out_mask, other=0.0).to(tl.float32) + delta
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), out_mask)
