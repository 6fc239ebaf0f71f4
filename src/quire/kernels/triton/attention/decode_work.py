"""Makes the attention kernel's work list for decode-only steps, on the device.

When a captured step is replayed, only the device knows the lengths, and the grid can't change. So
the attention kernel reads a work list in device memory. Each item of the list names a sequence and
a range of its keys. The context of a sequence is cut into chunks at multiples of a power of two.
Unless the rule fixes the chunk size, it grows with the number of keys that the sequence sees. So a
token has at most P parts, and a short context still keeps many programs busy. The size never
depends on other sequences.

One program counts the chunks of all sequences and writes the items. It reads and writes some
kilobytes, once a step for all layers with the same window. The reference is
`attention/triton_plan.py::host_work`, which cuts contexts in the same way on the host.

Shapes: S sequences, P parts a token at most. Called by `attention/triton_paged.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.attention.merge_parts import MERGE_FIELDS
from quire.kernels.triton.attention.paged_attention import ITEM_FIELDS
from quire.kernels.triton.support import next_power_of_two

#: The number of tokens in the smallest chunk, for up to 4 query heads for each KV head. The partial
#: result (part) of such a chunk has 6% of the bytes of its K and V. A program attends the chunk in
#: about a microsecond, after several microseconds of set-up.
MIN_CHUNK_TOKENS = 64

#: Chunks double in size until the keys that a sequence sees fit (size / TOKENS_PER_PART) chunks.
#: One program merges all parts of a token, so there must be few small chunks.
TOKENS_PER_PART = 16

_PER_PART = tl.constexpr(TOKENS_PER_PART)


@dataclass(frozen=True)
class ChunkRule:
    """The rule that cuts contexts into chunks."""

    #: P, the upper bound of the number of a token's parts.
    parts_per_token: int
    #: The number of tokens in every chunk, a power of two; 0 if the size of chunks depends on the
    #: context of the token that attends them.
    chunk_tokens: int
    #: The number of keys in a tile of the attention kernel. Items begin at multiples of it.
    tile: int
    #: The number of keys that a token sees; None means all.
    window: int | None
    #: The smallest size of chunks, in tokens, if chunk_tokens is 0.
    least_tokens: int = 0


def decode_work(
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    rows: torch.Tensor,
    rule: ChunkRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_start [S + 1] int32, context_lens [S] int32 (0: padding), rows [S] int64 -> the items
    [S * P, ITEM_FIELDS], their number [1] and the tokens to merge [S, MERGE_FIELDS], all int32."""
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
        enable_fp_fusion=True,
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
    # First, find the keys [low, context) that each sequence sees.
    sequences = tl.arange(0, BLOCK_S)
    mask = sequences < num_sequences
    context = tl.load(context_lens_ptr + sequences, mask, other=0)
    token = tl.load(query_start_ptr + sequences, mask, other=0)
    row = tl.load(rows_ptr + sequences, mask, other=0).to(tl.int32)
    low = tl.zeros_like(context)
    if rule.window is not None:
        low = tl.maximum(context - rule.window, 0)
    # Then choose each sequence's size of chunks, and count its chunks.
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
        # If all keys seen fit one chunk, they are not cut at a boundary between two chunks.
        count = tl.where(context - low <= chunk, tl.minimum(count, 1), count)
    # Padding gets an item without keys, which makes its output zero.
    num_parts = count
    count = tl.where(mask, tl.maximum(count, 1), 0)
    # Then write the items of all sequences, one chunk of each at a time.
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
    # Last, write the tokens to merge; -1 means that the output is already written.
    entry = merges_ptr + sequences * 4
    tl.store(entry, token, mask)
    tl.store(entry + 1, first_part, mask)
    tl.store(entry + 2, tl.where(num_parts == 1, -1, num_parts), mask)
