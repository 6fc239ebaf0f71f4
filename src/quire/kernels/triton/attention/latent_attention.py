"""The Triton kernel of attention over the pages of latent layers, in absorbed form.

A latent layer (multi-head latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1) stores one
vector for each token. All query heads share it: the vector is the key, and its first Dv elements
are the value:

    out = softmax(scale q C^T) C[:, :Dv] over the tokens that each query sees

Work lists, tiles of queries, masks and the online softmax are the same as in `paged_attention.py`,
but only its `uniform` arithmetic exists here. A row gets the same bits in decode and in a prompt,
for all chunks and batches. All tiles have one shape and are masked, and keys are folded in chunks
of `chunk_tokens` at absolute positions, here or by `merge_parts.py`.

A tile of the latents is loaded once and is operand of both products. The vectors' Dv value elements
and the rest (64 rotated elements) are loaded and multiplied separately, each padded to a power of
two. The heads are rows of the tile of queries, side by side. If there are more heads than rows,
several programs attend them, and find the latents in the L2 cache.

Two outputs of 512 elements for 64 rows would fill the registers of a processor. So a chunk's
partial result (part) is written to the program's own rows of `parts`, which stay in the L2 cache,
and folded there into the part of the chunks before it. An item that is one of several for its
queries writes its part for `merge_parts.py`. Scores are used inside a branch, which also skips
masks that hide nothing. Without the branch, each half of the warps would compute all scores (Triton
3.7, sm_90).

Cost: 2 Hq (D + Dv) operations a token for 2 D bytes (bf16). With 128 heads of 576 and 512 elements
these are 242 operations a byte, so the tensor cores bound decoding there, as they always bound
prompts. With 16 heads, a quarter of the 64 rows is used, but all cost time: 121 operations a byte.

Shapes: T tokens, Hq query heads, D elements of a stored vector, Dv of them the value, N blocks, B
block size, R rows of the block tables. A page is [B, D].
Reference: `attention/reference.py`. Called by `attention/triton_paged.py`, after `latent_write.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.attention.key_tiles import cap_scores, hide_unseen
from quire.kernels.triton.attention.online_softmax import (
    finish,
    finite_or_zero,
    fold_outputs,
    fold_scales,
)
from quire.kernels.triton.attention.paged_attention import AttendShape, AttendWork


def latent_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    work: AttendWork,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    shape: AttendShape,
) -> None:
    """Write out [T, Hq, Dv], contiguous, or parts, for the tokens of the items.

    q is [T, Hq, D] of any token stride, pages [N, B, D] of any page stride, tables [R, most blocks]
    int32, and sinks [Hq]. `shape` has a value_dim. work.parts and work.scales end with
    2 * num_programs * rows rows, of one head each, for the kernel's own use.
    """
    # First, check the tensors.
    heads = (shape.num_heads, shape.head_dim)
    if q.shape[1:] != heads or q.stride()[1:] != (shape.head_dim, 1):
        raise ValueError(
            f"q is {tuple(q.shape)}, strides {q.stride()}, but must be [T, {heads[0]}, {heads[1]}] "
            "with each token's heads side by side"
        )
    page = (shape.block_size, shape.head_dim)
    if pages.shape[1:] != page or not pages[0].is_contiguous():
        raise ValueError(
            f"pages are {tuple(pages.shape)}, strides {pages.stride()}, but each must be {page}, "
            "contiguous"
        )
    # Then launch, with the programs' own rows at the end of the parts.
    num_scratch_rows = 2 * work.num_programs * shape.rows
    scratch_row = work.scales.numel() // 2 - num_scratch_rows
    latent_attention_kernel[(work.num_programs,)](
        q,
        pages,
        tables,
        work.items,
        work.count,
        sinks,
        out,
        work.parts,
        work.scales,
        scratch_row,
        q.stride(0),
        pages.stride(0),
        tables.stride(0),
        work.parts_per_token,
        work.chunk_tokens,
        S=shape,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_values(places, is_row, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of vectors that begin at `places` [n]; zeros where `is_row` [n] is false."""
    dims = tl.arange(0, S.padded_output)
    mask = is_row[:, None] & (dims < S.output_dim)[None, :]
    return tl.load(places[:, None] + dims[None, :], mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _load_rest(places, is_row, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements after the values, loaded like `_load_values`."""
    dims = tl.arange(0, S.padded_rest)
    mask = is_row[:, None] & (dims < S.key_rest)[None, :]
    return tl.load(places[:, None] + S.output_dim + dims[None, :], mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile_blocks(table, start, seen, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks of a tile of keys, as a tuple of scalars. Blocks without keys in `seen` are 0."""
    NUM: tl.constexpr = S.tile_blocks
    blocks = ()
    for number in tl.static_range(NUM):
        key = start + number * S.block_size
        is_read = (key < seen[1]) & (key + S.block_size > seen[0])
        loaded = tl.load(table + key // S.block_size, is_read, other=0)
        # Triton has no starred elements.
        blocks = blocks + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit  # type: ignore[untyped-decorator]
def _places(pages, blocks, start, page_stride, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers [tile] to the vectors of a tile."""
    NUM: tl.constexpr = S.tile_blocks
    columns = tl.arange(0, S.tile)
    offsets = columns % S.block_size
    if S.block_size > S.tile:
        offsets = start % S.block_size + columns
    begins = tl.broadcast_to(blocks[0].to(tl.int64) * page_stride, columns.shape)
    for number in tl.static_range(1, NUM):
        begin = blocks[number].to(tl.int64) * page_stride
        begins = tl.where(columns >= number * S.block_size, begin, begins)
    return pages + (begins + offsets * S.head_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(item, head_tile, opaque, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The head and token offset of each row of a tile of queries, and whether the row is used.

    `opaque` is a 0 that the compiler doesn't recognize. Results that depend on it are computed
    again where they are needed, instead of staying in registers through the loops.
    """
    rows = tl.arange(0, S.rows) + opaque
    offsets, heads = rows // S.group, head_tile * S.rows + rows % S.group
    is_row = offsets < tl.load(item + 2)
    if S.num_head_tiles * S.rows % S.group:
        is_row = is_row & (heads < S.num_heads)
    return heads, offsets, is_row


@triton.jit  # type: ignore[untyped-decorator]
def _attend_chunk(q, item, chunk_first, chunk_tokens, memory, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The part (m, sums, acc) over the keys of an item that lie in one chunk."""
    pages, page_stride, table = memory
    first = tl.maximum(chunk_first, tl.load(item + 4))
    keys_range = (first, tl.minimum(chunk_first + chunk_tokens, tl.load(item + 5)))
    position = tl.load(item + 3)
    last, context = position + tl.load(item + 2) - 1, tl.load(item + 7)
    # First, find the range of keys visible to any row, and the range visible to all rows.
    seen_first, seen_end, full_first, full_end = 0, context, 0, context
    if S.causal:
        seen_end, full_end = last + 1, position + 1
    if S.window is not None:
        seen_first, full_first = tl.maximum(position + 1 - S.window, 0), last + 1 - S.window
        if not S.causal:
            seen_end = tl.minimum(context, last + S.window)
            full_end = tl.minimum(context, position + S.window)
    seen, full = (seen_first, seen_end), (full_first, full_end)
    positions = position + tl.arange(0, S.rows) // S.group
    TILE: tl.constexpr = S.tile
    columns = tl.arange(0, TILE)
    m = tl.full([S.rows], float("-inf"), tl.float32)
    sums = tl.full([S.rows], 0.0, tl.float32)
    acc = tl.full([S.rows, S.padded_output], 0.0, tl.float32)
    # Then attend tile by tile. The table is read a tile ahead, so that latents never wait for it.
    blocks = _load_tile_blocks(table, keys_range[0], seen, S)
    for start in range(keys_range[0], keys_range[1], TILE):
        start = tl.multiple_of(start, TILE)
        keys = start + columns
        is_seen = (keys >= seen[0]) & (keys < seen[1])
        places = _places(pages, blocks, start, page_stride, S)
        blocks = _load_tile_blocks(table, start + TILE, (seen[0], keys_range[1]), S)
        values = _load_values(places, is_seen, S)
        scores = tl.dot(q[0], tl.trans(values), input_precision="ieee")
        rest_scores = None
        if S.key_rest:
            rest = _load_rest(places, is_seen, S)
            rest_scores = tl.dot(q[1], tl.trans(rest), input_precision="ieee")
        # An fma, because Triton could merge a plain addition into the product, as its first
        # summand.
        if S.key_rest:
            scores = tl.fma(rest_scores, tl.full(scores.shape, 1.0, tl.float32), scores)
        scores = cap_scores(scores, S)
        if (start < full[0]) | (start + TILE > full[1]):
            scores = hide_unseen(scores, keys, is_seen, positions, positions, S)
        new_m = tl.maximum(m, tl.max(scores, axis=1) * S.to_log2)
        base = finite_or_zero(new_m)
        probs = tl.exp2(scores * S.to_log2 - base[:, None])
        scale = tl.exp2(m - base)
        sums = sums * scale + tl.sum(probs, axis=1)
        acc = tl.dot(probs.to(values.dtype), values, acc * scale[:, None], input_precision="ieee")
        m = new_m
    return m, sums, acc


@triton.jit  # type: ignore[untyped-decorator]
def _fold_chunk(memory, is_first, is_last, target, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fold a chunk's part into the part of the chunks before it, both in the program's scratch
    rows. After the last chunk, write the output instead."""
    parts_ptr, scales_ptr, scratch_row, out_ptr, sinks_ptr = memory
    heads, out_rows, is_row = target
    # First, fold m and sums. The rows after those of the chunk's part hold the earlier chunks.
    rows = scratch_row + tl.arange(0, S.rows)
    is_later = is_row & (is_first == 0)
    part_m = tl.load(scales_ptr + 2 * rows, is_row, other=0.0)
    part_sums = tl.load(scales_ptr + 2 * rows + 1, is_row, other=0.0)
    m = tl.load(scales_ptr + 2 * (rows + S.rows), is_later, other=float("-inf"))
    sums = tl.load(scales_ptr + 2 * (rows + S.rows) + 1, is_later, other=0.0)
    m, sums, scale, part_scale = fold_scales(m, sums, part_m, part_sums)
    if is_last == 0:
        tl.debug_barrier()
        tl.store(scales_ptr + 2 * (rows + S.rows), m, is_row)
        tl.store(scales_ptr + 2 * (rows + S.rows) + 1, sums, is_row)
    sinks = None
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, is_row, other=0.0).to(tl.float32)
    # Then fold the outputs, some columns at a time.
    for first in range(0, S.padded_output, S.piece):
        dims = first + tl.arange(0, S.piece)
        mask = is_row[:, None] & (dims < S.output_dim)[None, :]
        places = parts_ptr + rows[:, None] * S.output_dim + dims[None, :]
        acc = tl.load(places, mask, other=0.0)
        folded_places = places + S.rows * S.output_dim
        before = tl.load(folded_places, mask & (is_first == 0), other=0.0)
        acc = fold_outputs(before, scale, acc, part_scale)
        if is_last == 0:
            tl.store(folded_places, acc, mask)
        else:
            out, _ = finish(m, sums, acc, sinks)
            out_places = out_ptr + out_rows[:, None] * S.output_dim + dims[None, :]
            tl.store(out_places, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit  # type: ignore[untyped-decorator]
def latent_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D], tokens q_stride apart
    pages_ptr,  # [N, B, D], pages page_stride apart
    tables_ptr,  # [R, most blocks] int32, rows table_stride apart
    items_ptr,  # [items, ITEM_FIELDS] int32
    num_items_ptr,  # [1] int32
    sinks_ptr,  # [Hq], or None
    out_ptr,  # [T, Hq, Dv], contiguous
    parts_ptr,  # [rows, Dv] fp32
    scales_ptr,  # [rows, 2] fp32: m and sums
    scratch_row,  # the first row that belongs to a program
    q_stride,
    page_stride,
    table_stride,
    parts_per_token,
    chunk_tokens,
    S: tl.constexpr,
):
    scratch_row += tl.program_id(0).to(tl.int64) * (2 * S.rows)
    num_works = tl.load(num_items_ptr) * S.num_head_tiles
    for work in tl.range(tl.program_id(0), num_works, tl.num_programs(0), num_stages=1):
        # First, load the queries of the item and the program's heads.
        item = items_ptr + work // S.num_head_tiles * 8
        heads, offsets, is_row = _rows(item, work % S.num_head_tiles, 0, S)
        tokens = (tl.load(item + 1) + offsets).to(tl.int64)
        q_rows = q_ptr + (tokens * q_stride + heads * S.head_dim)
        q_rest = None
        if S.key_rest:
            q_rest = _load_rest(q_rows, is_row, S)
        q = (_load_values(q_rows, is_row, S), q_rest)
        first_chunk = tl.load(item + 4) // chunk_tokens
        end_chunk = tl.cdiv(tl.load(item + 5), chunk_tokens)
        for chunk in range(first_chunk, end_chunk):
            table = tables_ptr + tl.load(item).to(tl.int64) * table_stride
            part_m, part_sums, acc = _attend_chunk(
                q, item, chunk * chunk_tokens, chunk_tokens, (pages_ptr, page_stride, table), S
            )
            # Then store the chunk's part: for `merge_parts.py`, or in the program's own rows.
            opaque = tl.load(item + 4) // chunk_tokens - first_chunk
            heads, offsets, is_row = _rows(item, work % S.num_head_tiles, opaque, S)
            part = tl.load(item + 6)
            part_rows = (part + offsets * parts_per_token).to(tl.int64) * S.num_heads + heads
            own_rows = scratch_row + (tl.arange(0, S.rows) + opaque)
            part_rows = tl.where(part < 0, own_rows, part_rows)
            dims = tl.arange(0, S.padded_output)
            mask = is_row[:, None] & (dims < S.output_dim)[None, :]
            tl.store(parts_ptr + part_rows[:, None] * S.output_dim + dims[None, :], acc, mask)
            tl.store(scales_ptr + 2 * part_rows, part_m, is_row)
            tl.store(scales_ptr + 2 * part_rows + 1, part_sums, is_row)
            if part < 0:
                # Last, fold it. Barriers make the stores of other threads visible before and after.
                tl.debug_barrier()
                out_rows = (tl.load(item + 1) + offsets).to(tl.int64) * S.num_heads + heads
                scratch = (parts_ptr, scales_ptr, scratch_row, out_ptr, sinks_ptr)
                is_first, is_last = chunk == first_chunk, chunk + 1 == end_chunk
                _fold_chunk(scratch, is_first, is_last, (heads, out_rows, is_row), S)
                tl.debug_barrier()
