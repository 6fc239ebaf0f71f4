"""The Triton kernel of attention over the paged KV cache.

It serves decode rows, prefill chunks and any mix of both.

    out = softmax(scale q K^T) V over the keys that each query sees, in scattered blocks

A program takes items of a work list, which `decode_work.py` makes on the device and
`attention/triton_plan.py` on the host. An item is a tile of queries of one sequence and a range of
its keys, attended once for each KV head. The query heads of a KV head are rows of the tile, side by
side, so that each K and V is read once for all of them:

    row of the tile    0        1        ...  G-1      G        ...
    query token        0        0             0        1
    query head         hG       hG+1          hG+G-1   hG

Keys are read in tiles of TILE at multiples of TILE, straight from the blocks, and folded into an
online softmax (arXiv:2205.14135, arXiv:2307.08691). Tiles that every row sees entirely are attended
without a mask; tiles at the edge of the window, at the diagonal and at the end are masked. An item
writes its rows' output; if it is one of several items for the same queries, it writes a partial
result (part) and counts it. The program that writes the last part of some queries and heads merges
their parts in the order of the keys, whichever came last, and sets the count back to zero.

In a `uniform` shape, each row gets the same bits in every tile of queries and every batch. All
tiles are masked, so every row is computed by the same operations. Keys are folded in chunks of
`chunk_tokens` at absolute positions, whether they are parts or not, in the same order by the same
function. A tile or chunk that a row doesn't see changes none of its bits.

Keys that no query of the tile sees are not read, nor are table entries of blocks without seen keys.

In a layer that sees ahead, `visible_ends` says where the keys of each query end: behind its own
token, or behind the content that its token belongs to. Tiles without a mask end at the first
query's token in any case.

If a KV head has more query heads than a tile has rows, they are divided among several tiles, each
with heads of one query only.

Codes in quantized pages (`quantized_kv.py`) are widened just before they are multiplied: K to the
dtype of the queries, bf16 or fp16, and V to bf16. The scale of a key multiplies its scores, and the
scale of a value multiplies its probabilities: out = sum_j (p_j scale_j) code_j.

Cost of a tile of 64 keys of 128 bf16 numbers, K and V together 32 KiB, as compiled for sm_90
without spills:

- 16 rows, for decoding, take 361 instructions for each of four warps, and 146 registers. So three
  programs share a multiprocessor, with 192 KiB of loads in flight. Reading a tile on each of 132
  multiprocessors at 4.3 TB/s takes 1750 clocks, so memory is the bound.
- 128 rows, for prompts, take 392 instructions for each of eight warps. 12 of them are HGMMA, which
  take 1024 clocks; the softmax takes about as long again. Triton starts Q K^T during P V of the
  previous tile, and waits for both before the softmax.
- With codes, a tile of 128 keys has the same bytes. For 16 rows it takes 986 instructions, a third
  of them for widening, with two programs on a processor. They use a third of the issue slots in the
  time that memory needs.

Shapes: T tokens, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, N blocks, B block size,
R rows of the block tables, at most P parts of a token. A page is [2, Hkv, B, D], K then V.
Reference: `attention/reference.py`. Called by `attention/triton_paged.py`.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.attention.item_results import place_rows, store_result
from quire.kernels.triton.attention.key_tiles import cap_scores, hide_unseen, load_blocks
from quire.kernels.triton.attention.online_softmax import finite_or_zero, fold
from quire.kernels.triton.attention.quantized_kv import KVPages, check_scales, unpack_scales
from quire.kernels.triton.dependent_launch import await_inputs, launch_options
from quire.kernels.triton.support import next_power_of_two
from quire.kernels.triton.widening import widen

#: Number of int32 fields of an item. First come those of its tokens: row of the block tables, first
#: token in q, number of tokens, position of the first token. Then those of its keys: first key (a
#: multiple of the tile), end of the keys, first part, end of the sequence's keys. The first part is
#: -1 if the item writes the output.
ITEM_FIELDS = 8


@dataclass(frozen=True)
class AttendShape:
    """The constants that an attention kernel is compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: The number of tokens in a block of the cache.
    block_size: int
    #: The factor by which q·k is multiplied.
    scale: float
    #: The number of keys that a token sees up to and including its own, and at most as many after
    #: it if the layer is not causal; None means all keys.
    window: int | None
    #: The bound c in the soft cap of scores, c * tanh(score / c); None means no cap.
    soft_cap: float | None
    causal: bool
    #: Whether a row's bits must not depend on its tile of queries; see the module.
    uniform: bool
    #: The number of rows in a tile of queries, a power of two >= 16.
    rows: int
    #: The number of keys in a tile, a power of two >= 16.
    tile: int
    num_warps: int
    num_stages: int
    #: The number of elements of a latent layer's value (`latent_attention.py`); None for other
    #: layers.
    value_dim: int | None = None

    @property
    def group(self) -> int:
        """The number of query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def queries(self) -> int:
        """The number of tokens that fit a tile of queries."""
        return max(1, self.rows // self.group)

    @property
    def num_head_tiles(self) -> int:
        """The number of tiles that the query heads of an item need; each is a separate unit of
        work."""
        return self.num_kv_heads * -(-self.group // self.rows)

    @property
    def output_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def padded_output(self) -> int:
        return max(16, next_power_of_two(self.output_dim))

    @property
    def piece(self) -> int:
        """The number of columns of the output for which parts are folded at a time."""
        most = 64 if self.value_dim is not None else max(16, 2048 // self.rows)
        return min(most, self.padded_output)

    @property
    def merged_at_once(self) -> int:
        """The number of parts of a token that are loaded at the same time to be merged."""
        return 2 if self.rows == 16 else 1

    @property
    def tile_blocks(self) -> int:
        """The number of blocks that hold the keys of a tile."""
        return max(1, self.tile // self.block_size)

    @property
    def key_rest(self) -> int:
        """The number of elements of a key that follow its value; 0 except in latent layers."""
        return self.head_dim - self.output_dim

    @property
    def padded_rest(self) -> int:
        return max(16, next_power_of_two(max(1, self.key_rest)))

    @property
    def to_log2(self) -> float:
        """The factor that converts a result of `cap_scores` (q·k, or tanh with a soft cap) to an
        exponent of two in the softmax."""
        return (self.scale if self.soft_cap is None else self.soft_cap) * math.log2(math.e)

    @property
    def padded_dim(self) -> int:
        return max(16, next_power_of_two(self.head_dim))


@dataclass(frozen=True)
class AttendWork:
    """The work list of a launch, and the memory for its parts."""

    #: [items, ITEM_FIELDS] int32.
    items: torch.Tensor
    #: The number of items that are set, [1] int32.
    count: torch.Tensor
    num_programs: int
    #: The parts' acc, [parts, Hq, D] fp32.
    parts: torch.Tensor
    #: The parts' m and sums, [parts, Hq, 2] fp32.
    scales: torch.Tensor
    #: The tokens with parts, [slots, MERGE_FIELDS] int32. Only the number of parts is read. The
    #: parts of slot s begin at s * parts_per_token.
    merges: torch.Tensor
    #: [slots, num_head_tiles] int32 zeros, and zeros again after the launch: how many parts of a
    #: slot's first token are written. None if `merge_parts.py` merges, as in latent layers.
    counters: torch.Tensor | None
    #: The distance, in parts, from one token of an item to the next.
    parts_per_token: int
    #: The number of tokens in each chunk of a uniform shape, a multiple of the tile.
    chunk_tokens: int
    #: `AttentionBatch.visible_ends`, in causal layers that see ahead; None in others.
    visible_ends: torch.Tensor | None = None


def paged_attention(
    q: torch.Tensor,
    pages: KVPages,
    tables: torch.Tensor,
    work: AttendWork,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    shape: AttendShape,
) -> None:
    """Write `out` and `lse` of the items' tokens. Without counters, parts are not merged.

    out is [T, Hq, D], and lse is [T, Hq] fp32 or None; both are contiguous. q is [T, Hq, D] of
    any token stride, and bf16 or fp16 if the pages have codes. `tables` is [R, most blocks] int32;
    `sinks` is [Hq], or None.
    """
    # First, check the tensors.
    heads = (shape.num_heads, shape.head_dim)
    if q.shape[1:] != heads or q.stride()[1:] != (shape.head_dim, 1):
        raise ValueError(
            f"q is {tuple(q.shape)}, strides {q.stride()}, but must be [T, {heads[0]}, {heads[1]}] "
            "with each token's heads side by side"
        )
    page = (2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    numbers, kv_scales = pages.numbers, pages.scales
    if numbers.shape[1:] != page or not numbers[0].is_contiguous():
        raise ValueError(
            f"pages are {tuple(numbers.shape)}, strides {numbers.stride()}, but each must be "
            f"{page}, contiguous"
        )
    check_scales(numbers, kv_scales)
    if kv_scales is not None and q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q.dtype}, but over codes must be torch.bfloat16 or torch.float16")
    if work.visible_ends is not None and not shape.causal:
        raise ValueError("visible_ends are given, but the layer is not causal")
    # Then launch; programs take items in turn until the list ends.
    paged_attention_kernel[(work.num_programs,)](
        q,
        numbers,
        kv_scales,
        tables,
        work.items,
        work.count,
        sinks,
        work.visible_ends,
        out,
        lse,
        work.parts,
        work.scales,
        work.merges,
        work.counters,
        q.stride(0),
        numbers.stride(0),
        0 if kv_scales is None else kv_scales.stride(0),
        tables.stride(0),
        work.parts_per_token,
        work.chunk_tokens,
        S=shape,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        maxnreg=most_registers(shape, over_codes=kv_scales is not None),
        **launch_options(q.device),
        enable_fp_fusion=True,
    )


def most_registers(shape: AttendShape, *, over_codes: bool) -> int | None:
    """The limit of a thread's registers; None lets ptxas choose. It is set for small tiles, because
    ptxas would spill registers to fit more programs on a processor."""
    if shape.rows < 64 and (over_codes or shape.padded_dim > 128):
        return 255
    return 128 if shape.rows == 16 and shape.tile * shape.padded_dim == 4096 else None


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tiles(  # type: ignore[no-untyped-def]
    part,  # (m, sums, acc) so far
    q,  # [rows, D]
    sights,  # (positions [rows], visible_ends or None, first token - its position, last position)
    memory,  # (pages at the KV head, elements from page to page, the sequence's row of the table,
    # scales or None, the KV head, scales from page to page)
    keys_range,  # (first key, end) of this loop
    seen,  # (first, end) of the keys that some row sees
    MASKED: tl.constexpr,
    S: tl.constexpr,
):
    """Returns `part` after folding in the keys of a range, tile by tile."""
    m, sums, acc = part
    pages, page_stride, table, scales, kv_head, scale_stride = memory
    TILE: tl.constexpr = S.tile
    columns = tl.arange(0, TILE)
    dims = tl.arange(0, S.padded_dim)
    # The table is read a tile ahead, so that K and V never wait for it.
    blocks = load_blocks(table, keys_range[0], seen, S)
    for start in range(keys_range[0], keys_range[1], TILE):
        start = tl.multiple_of(start, TILE)
        keys = start + columns
        is_seen = (keys >= seen[0]) & (keys < seen[1])
        offsets = (
            (start % S.block_size + columns) if S.block_size >= TILE else columns % S.block_size
        )
        places = blocks.to(tl.int64) * page_stride + offsets * S.head_dim
        # First, load K, V and their scales.
        k_scales, v_scales = None, None
        if scales is not None:
            pair_places = scales + (blocks.to(tl.int64) * scale_stride + offsets)
            pair_places += kv_head * S.block_size
            pairs = _load_pairs(pair_places, is_seen, MASKED, S)
            k_scales, v_scales = unpack_scales(pairs)
        blocks = load_blocks(table, start + TILE, (seen[0], keys_range[1]), S)
        k_places = pages + places[:, None] + dims[None, :]
        v_places = k_places + S.num_kv_heads * S.block_size * S.head_dim
        if MASKED or S.padded_dim != S.head_dim:
            loaded = (dims < S.head_dim)[None, :]
            if MASKED:
                loaded = loaded & is_seen[:, None]
            k = tl.load(k_places, loaded, other=0.0)
            v = tl.load(v_places, loaded, other=0.0)
        else:
            k = tl.load(k_places)
            v = tl.load(v_places)
        # Then compute the scores. V is widened to bf16: probabilities times scales need its range.
        k, v = widen(k, q.dtype), widen(v, tl.bfloat16)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if k_scales is not None:
            scores = scores * k_scales[None, :]
        scores = cap_scores(scores, S)
        if MASKED:
            scores = hide_unseen(scores, keys, is_seen, sights[0], _last_keys(sights), S)
        # Last, fold the tile into the online softmax.
        new_m = tl.maximum(m, tl.max(scores, axis=1) * S.to_log2)
        base = new_m
        if MASKED:
            base = finite_or_zero(new_m)
        probs = tl.exp2(scores * S.to_log2 - base[:, None])
        scale = tl.exp2(m - base)
        sums = sums * scale + tl.sum(probs, axis=1)
        acc = acc * scale[:, None]
        if v_scales is not None:
            probs = probs * v_scales[None, :]
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
        m = new_m
    return m, sums, acc


@triton.jit
def _last_keys(sights):  # type: ignore[no-untyped-def]
    """The position of the last key that each row of a causal layer sees, [rows]. It is loaded for
    each tile, since keeping it would take registers from the tiles without a mask."""
    positions, visible_ends_ptr, shift, last_position = sights
    lasts = positions
    if visible_ends_ptr is not None:
        # Rows behind the tile's last token have its end; they are not stored.
        lasts = tl.load(visible_ends_ptr + shift + tl.minimum(positions, last_position)) - 1
    return lasts


@triton.jit  # type: ignore[untyped-decorator]
def _load_pairs(places, is_seen, MASKED: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The packed scales of a tile of keys; if MASKED, unseen keys have 0.

    COPIES threads load each scale, so that the loaded tensor has an element for each thread; then
    the copies are reduced to one. From a tensor with fewer elements than threads, Triton makes each
    thread load all scales that it multiplies by: 16 for 128 rows, half of a tile's instructions.
    """
    COPIES: tl.constexpr = max(1, S.num_warps * 32 // S.tile)
    if COPIES > 1:
        places = places[:, None] + tl.zeros([1, COPIES], tl.int32)
        pairs = tl.load(places, is_seen[:, None], other=0) if MASKED else tl.load(places)
        pairs = tl.max(pairs, axis=1)
    else:
        pairs = tl.load(places, is_seen, other=0) if MASKED else tl.load(places)
    return pairs


@triton.jit  # type: ignore[untyped-decorator]
def _attend_keys(q, sights, memory, first, end, seen, tokens, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The part over keys [first, end).

    `tokens` are the positions of the first and the last token. The tiles without a mask lie between
    the start of the last token's window and the last key that the first token sees.
    """
    m = tl.full([S.rows], float("-inf"), tl.float32)
    sums = tl.full([S.rows], 0.0, tl.float32)
    part = (m, sums, tl.full([S.rows, S.padded_dim], 0.0, tl.float32))
    full_end = seen[1]
    if S.causal:
        full_end = tokens[0] + 1
    full_begin = first
    if S.window is not None:
        full_begin = tl.maximum(first, (tokens[1] + S.tile - S.window) // S.tile * S.tile)
        if not S.causal:
            full_end = tl.minimum(full_end, tokens[0] + S.window)
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.minimum(full_end, end) // S.tile * S.tile
    full_end = tl.maximum(full_end, full_begin)
    # A uniform shape attends all tiles with masks, by the last of the three loops below.
    if S.uniform:
        full_begin, full_end = first, first
    if S.window is not None and not S.uniform:
        part = _attend_tiles(part, q, sights, memory, (first, full_begin), seen, True, S)
    if not S.uniform:
        part = _attend_tiles(part, q, sights, memory, (full_begin, full_end), seen, False, S)
    return _attend_tiles(part, q, sights, memory, (full_end, end), seen, True, S)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_chunks(q, sights, memory, keys, seen, tokens, chunk_tokens, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The part over keys [keys[0], keys[1]); a uniform shape folds it chunk by chunk."""
    if S.uniform:
        m = tl.full([S.rows], float("-inf"), tl.float32)
        sums = tl.full([S.rows], 0.0, tl.float32)
        acc = tl.full([S.rows, S.padded_dim], 0.0, tl.float32)
        for chunk in range(keys[0] // chunk_tokens, tl.cdiv(keys[1], chunk_tokens)):
            first = tl.maximum(chunk * chunk_tokens, keys[0])
            end = tl.minimum((chunk + 1) * chunk_tokens, keys[1])
            part = _attend_keys(q, sights, memory, first, end, seen, tokens, S)
            m, sums, acc = fold(m, sums, acc, part[0], part[1], part[2])
    else:
        m, sums, acc = _attend_keys(q, sights, memory, keys[0], keys[1], seen, tokens, S)
    return m, sums, acc


@triton.jit  # type: ignore[untyped-decorator]
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D], tokens q_stride apart
    pages_ptr,  # [N, 2, Hkv, B, D], pages page_stride apart
    kv_scales_ptr,  # [N, Hkv, B] int32, pages kv_scale_stride apart; None if pages have no codes
    tables_ptr,  # [R, most blocks] int32, rows table_stride apart
    items_ptr,  # [items, ITEM_FIELDS] int32
    num_items_ptr,  # [1] int32
    sinks_ptr,  # [Hq], or None
    visible_ends_ptr,  # [T] int32, or None: the position behind the last key that each token sees
    out_ptr,  # [T, Hq, D], contiguous
    lse_ptr,  # [T, Hq] fp32, or None
    parts_ptr,  # [parts, Hq, D] fp32
    scales_ptr,  # [parts, Hq, 2] fp32: m and sums
    merges_ptr,  # [slots, MERGE_FIELDS] int32
    counters_ptr,  # [slots, head tiles] int32 zeros, or None
    q_stride,
    page_stride,
    kv_scale_stride,
    table_stride,
    parts_per_token,
    chunk_tokens,
    S: tl.constexpr,
    IS_EARLY: tl.constexpr = False,  # see dependent_launch.py
):
    await_inputs(IS_EARLY)
    dims = tl.arange(0, S.padded_dim)
    tiles: tl.constexpr = S.num_head_tiles // S.num_kv_heads  # for each KV head
    outputs = (out_ptr, lse_ptr)
    part_memory = (parts_ptr, scales_ptr, merges_ptr, counters_ptr, parts_per_token)
    num_works = tl.load(num_items_ptr) * S.num_head_tiles
    for work in tl.range(tl.program_id(0), num_works, tl.num_programs(0), num_stages=1):
        # First, read the item, and find the keys that some row sees.
        kv_head = work % S.num_head_tiles // tiles
        first_head = kv_head * S.group + work % tiles * S.rows
        item = items_ptr + work // S.num_head_tiles * 8
        table = tables_ptr + tl.load(item).to(tl.int64) * table_stride
        token, num_tokens = tl.load(item + 1), tl.load(item + 2)
        position = tl.load(item + 3)
        first, end = tl.load(item + 4), tl.load(item + 5)
        context = tl.load(item + 7)
        last = position + num_tokens - 1
        seen_first, seen_end = 0, context
        if S.window is not None:
            seen_first = tl.maximum(position + 1 - S.window, 0)
        if visible_ends_ptr is not None:
            seen_end = tl.load(visible_ends_ptr + token + num_tokens - 1)
        elif S.causal:
            seen_end = last + 1
        elif S.window is not None:
            seen_end = tl.minimum(context, last + S.window)

        # Then load the queries, attend the keys, and store the result.
        offsets, heads = place_rows(first_head, S)
        is_row = offsets < num_tokens
        mask = is_row[:, None] & (dims < S.head_dim)[None, :]
        tokens = (token + offsets).to(tl.int64)
        q_places = tokens[:, None] * q_stride + heads[:, None] * S.head_dim + dims[None, :]
        pages = pages_ptr + kv_head * (S.block_size * S.head_dim)
        q = tl.load(q_ptr + q_places, mask, other=0.0)
        if kv_scales_ptr is None:
            q = q.to(pages_ptr.dtype.element_ty)
        # kv_scales_ptr is passed unchanged: Triton allows None in a tuple only if it is an
        # argument.
        memory = (pages, page_stride, table, kv_scales_ptr, kv_head, kv_scale_stride)
        seen, ends = (seen_first, seen_end), (position, last)
        sights = (position + offsets, visible_ends_ptr, token - position, last)
        m, sums, acc = _attend_chunks(q, sights, memory, (first, end), seen, ends, chunk_tokens, S)
        head_tile, result = work % S.num_head_tiles, (m, sums, acc)
        store_result(item, first_head, head_tile, result, sinks_ptr, outputs, part_memory, S)
