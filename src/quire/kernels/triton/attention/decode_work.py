"""Makes the attention kernel's work list for decode-only steps, on the device.

Lengths are known to the device alone when a captured step is replayed, so the attention kernel
finds there which keys of which sequences to attend; its grid never changes. The context of a
sequence is cut into chunks at multiples of a power of two. Where it may, that grows with what the
sequence sees, so that a token has less than P parts and a short context still keeps many programs
busy; it never depends on the other sequences.

One program: it sums up the numbers of chunks and writes them sequence by sequence. Reads and writes
some kilobytes, once a step for all layers with the same window. Reference:
`attention/triton_plan.py::host_work`, which cuts the same on the host.

Shapes: S sequences, P parts a token at most. Called by `attention/triton_paged.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.attention.merge_parts import MERGE_FIELDS
from quire.kernels.triton.attention.paged_attention import ITEM_FIELDS
from quire.kernels.triton.support import next_power_of_two

MIN_CHUNK_TOKENS = 64
"""The smallest chunk for up to 4 query heads a KV head: its part is 6% of the bytes of its K and
V. A program takes about a microsecond for it, after several for what it reads first."""

TOKENS_PER_PART = 16
"""A context is cut into no more parts than this many are in a chunk: a part is read by one program
as well, so parts are to be few where a chunk is read soon."""

_PER_PART = tl.constexpr(TOKENS_PER_PART)


@dataclass(frozen=True)
class ChunkRule:
    """How contexts are cut.

    parts_per_token: P. chunk_tokens: the size of all chunks, a power of two; 0: chosen for each
    token by what it sees, from least_tokens on. tile: of keys. window: None: none.
    """

    parts_per_token: int
    chunk_tokens: int
    tile: int
    window: int | None
    least_tokens: int = 0


def decode_work(
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    rows: torch.Tensor,
    rule: ChunkRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_start [S + 1] int32, context_lens [S] int32 (0: padding), rows [S] int64 -> the items
    [S * P, ITEM_FIELDS] int32, their number [1], the tokens to merge [S, MERGE_FIELDS] int32."""
    num_sequences, device = context_lens.shape[0], context_lens.device
    num_items = num_sequences * rule.parts_per_token
    items = torch.empty((num_items, ITEM_FIELDS), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    merges = torch.empty((num_sequences, MERGE_FIELDS), dtype=torch.int32, device=device)
    decode_work_kernel[(1,)](
        query_start,
        context_lens,
        rows,
        items,
        count,
        merges,
        num_sequences,
        rule=rule,
        BLOCK_S=next_power_of_two(num_sequences),
        num_warps=4,
    )
    return items, count, merges


@triton.jit(do_not_specialize=["num_sequences"])  # type: ignore[untyped-decorator]
def decode_work_kernel(  # type: ignore[no-untyped-def]
    query_start_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    rows_ptr,  # [S] int64
    items_ptr,  # [S * P, ITEM_FIELDS] int32
    count_ptr,  # [1] int32
    merges_ptr,  # [S, MERGE_FIELDS] int32
    num_sequences,
    rule: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    sequences = tl.arange(0, BLOCK_S)
    mask = sequences < num_sequences
    context = tl.load(context_lens_ptr + sequences, mask, other=0)
    token = tl.load(query_start_ptr + sequences, mask, other=0)
    row = tl.load(rows_ptr + sequences, mask, other=0).to(tl.int32)
    low = tl.zeros_like(context)
    if rule.window is not None:
        low = tl.maximum(context - rule.window, 0)
    if rule.chunk_tokens:
        chunk = tl.full([BLOCK_S], rule.chunk_tokens, tl.int32)
    else:
        chunk = tl.full([BLOCK_S], rule.least_tokens, tl.int32)
        for _ in tl.static_range(14):
            most_parts = tl.minimum(chunk // _PER_PART, rule.parts_per_token - 1)
            is_small = chunk * most_parts < context - low
            chunk = tl.where(is_small, 2 * chunk, chunk)
    first_chunk = low // chunk
    count = (context + chunk - 1) // chunk - first_chunk
    if not rule.chunk_tokens:
        # A short window is not cut where it lies over a boundary.
        count = tl.where(context - low <= chunk, tl.minimum(count, 1), count)
    first_item = tl.cumsum(count, axis=0) - count
    tl.store(count_ptr, tl.sum(count))
    first_part = sequences * rule.parts_per_token
    is_direct = count == 1
    for number in range(0, tl.max(count)):
        is_item = mask & (number < count)
        item = items_ptr + (first_item + number) * 8
        begin = (first_chunk + number) * chunk
        first_key = tl.maximum(begin, low // rule.tile * rule.tile)
        tl.store(item, row, is_item)
        tl.store(item + 1, token, is_item)
        tl.store(item + 2, tl.full([BLOCK_S], 1, tl.int32), is_item)
        tl.store(item + 3, context - 1, is_item)
        tl.store(item + 4, first_key, is_item)
        tl.store(item + 5, tl.where(number + 1 < count, begin + chunk, context), is_item)
        tl.store(item + 6, tl.where(is_direct, -1, first_part + number), is_item)
        tl.store(item + 7, context, is_item)
    entry = merges_ptr + sequences * 4
    tl.store(entry, token, mask)
    tl.store(entry + 1, first_part, mask)
    tl.store(entry + 2, tl.where(is_direct, -1, count), mask)
