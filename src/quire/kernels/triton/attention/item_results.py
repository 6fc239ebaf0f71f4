"""Writes the results of the attention kernel's items, and merges those of one token's parts.

`paged_attention.py` explains items, parts, tiles of queries and the shape S, and calls these
functions.
"""

import triton
import triton.language as tl

from quire.kernels.triton.attention.merge_parts import fold_parts
from quire.kernels.triton.attention.online_softmax import finish


@triton.jit  # type: ignore[untyped-decorator]
def store_result(  # type: ignore[no-untyped-def]
    item, first_head, head_tile, result, sinks_ptr, outputs, part_memory, S: tl.constexpr
):
    """Write the output of an item's rows, or a part; after the last part, merge all. The item's
    fields are loaded again, since keeping them through the loops would take registers."""
    parts_ptr, scales_ptr, merges_ptr, counters_ptr, parts_per_token = part_memory
    offsets, heads = place_rows(first_head, S)
    is_row = offsets < tl.load(item + 2)
    part = tl.load(item + 6)
    dims = tl.arange(0, S.padded_dim)
    if part < 0:
        _store_output(item, first_head, result, dims, sinks_ptr, outputs, S)
    else:
        # First, store the part.
        mask = is_row[:, None] & (dims < S.head_dim)[None, :]
        parts = (part + offsets * parts_per_token).to(tl.int64) * S.num_heads + heads
        tl.store(parts_ptr + parts[:, None] * S.head_dim + dims[None, :], result[2], mask)
        tl.store(scales_ptr + 2 * parts, result[0], is_row)
        tl.store(scales_ptr + 2 * parts + 1, result[1], is_row)
        if counters_ptr is not None:
            # Then count it. The barrier completes the stores of all threads before that.
            slot = part // parts_per_token
            num_parts = tl.load(merges_ptr + slot * 4 + 2)
            counter = counters_ptr + slot * S.num_head_tiles + head_tile
            tl.debug_barrier()
            num_before = tl.atomic_add(counter, 1, sem="acq_rel")
            if num_before == num_parts - 1:
                # All parts are stored: merge them, some columns at a time.
                tl.store(counter, 0)
                first = (slot + offsets).to(tl.int64) * parts_per_token * S.num_heads + heads
                for column in range(0, S.padded_dim, S.piece):
                    columns = column + tl.arange(0, S.piece)
                    merged = fold_parts(
                        (parts_ptr, scales_ptr), first, is_row, num_parts, columns,
                        S.num_heads, S.head_dim, S.merged_at_once,
                    )  # fmt: skip
                    _store_output(item, first_head, merged, columns, sinks_ptr, outputs, S)


@triton.jit  # type: ignore[untyped-decorator]
def _store_output(item, first_head, result, dims, sinks_ptr, outputs, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write columns `dims` of the output of an item's rows, from the part over all their keys."""
    m, sums, acc = result
    out_ptr, lse_ptr = outputs
    offsets, heads = place_rows(first_head, S)
    is_row = offsets < tl.load(item + 2)
    sinks = None
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, is_row, other=0.0).to(tl.float32)
    out, lse = finish(m, sums, acc, sinks)
    out_rows = (tl.load(item + 1) + offsets).to(tl.int64) * S.num_heads + heads
    out_places = out_ptr + out_rows[:, None] * S.head_dim + dims[None, :]
    mask = is_row[:, None] & (dims < S.head_dim)[None, :]
    tl.store(out_places, out.to(out_ptr.dtype.element_ty), mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + out_rows, lse, is_row)


@triton.jit  # type: ignore[untyped-decorator]
def place_rows(first_head, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The query of each row, as an index in the tile, and its head. `first_head` is the first head
    of the tile."""
    rows = tl.arange(0, S.rows)
    if S.rows < S.group:
        within = first_head % S.group + rows
        # Rows after the last head of the group get a query number that the item doesn't have.
        offsets, heads = within // S.group, first_head + rows
    else:
        offsets, heads = rows // S.group, first_head + rows % S.group
    return offsets, heads
