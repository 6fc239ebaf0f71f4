"""Repetition, frequency and presence penalties and their counts, in Triton.

    logit / r where positive, logit * r elsewhere     repetition: tokens of prompt and output
    logit - f * count                                 frequency: how often a token was generated
    logit - p                                         presence: if it was generated

in this order, each step rounded to fp32, so multiply and add are not fused. Definition and
reference: `sampling/host/processors.py`.

    table[slot, token] = 2 * (how often the token was generated) + (1 if it was seen at all)

New tokens are counted with atomic operations, whose order doesn't matter. Applying penalties reads
the table's line, 4 V bytes, and only the logits that change.

Shapes: S slots, V tokens, n lines that are penalized. Called by `sampling/device/processors.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.sampling.scan_logits import check_logits

_BLOCK = 1024


def count_tokens(table: torch.Tensor, spans: torch.Tensor, token_ids: torch.Tensor,
                 longest: int) -> None:  # fmt: skip
    """Add tokens of some rows to the counts of the rows' slots, which are all different.

    `table` is [S, V] int32, and `token_ids` [N, max_len] int32. `spans` is [n, 5] int64: each has a
    row of token_ids, a slot, the first position, the end, and the number of prompt tokens.
    `longest` is an upper bound of the number of tokens in a span.
    """
    if longest == 0:
        return
    count_tokens_kernel[(triton.cdiv(longest, _BLOCK), len(spans))](
        *(table, spans, token_ids, token_ids.stride(0)),
        V=table.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )


def penalize(
    logits: torch.Tensor, table: torch.Tensor, places: torch.Tensor, factors: torch.Tensor
) -> None:
    """Apply the penalties to logits [R, V], in place.

    `places` is [n, 2] int32: a line and its slot. `factors` is [n, 3] fp32: the penalties for
    repetition, frequency and presence.
    """
    check_logits(logits)
    vocab_size = logits.shape[1]
    penalize_kernel[(triton.cdiv(vocab_size, _BLOCK), len(places))](
        *(logits, logits.stride(0), table, places, factors),
        V=vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit  # type: ignore[untyped-decorator]
def count_tokens_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # [S, V]
    spans_ptr,  # [n, 5]
    token_ids_ptr,  # [N, max_len]
    ids_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span_ptr = spans_ptr + tl.program_id(1) * 5
    row_ptr = token_ids_ptr + tl.load(span_ptr) * ids_stride
    line_ptr = table_ptr + tl.load(span_ptr + 1) * V
    start, end = tl.load(span_ptr + 2), tl.load(span_ptr + 3)
    positions = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(row_ptr + positions, positions < end, other=-1)
    counts = (token_id >= 0) & (token_id < V)
    at = line_ptr + tl.maximum(token_id, 0)
    ones = tl.full((BLOCK,), 1, tl.int32)
    tl.atomic_or(at, ones, counts)
    is_generated = positions >= tl.load(span_ptr + 4)
    tl.atomic_add(at, ones + 1, counts & is_generated)


@triton.jit  # type: ignore[untyped-decorator]
def penalize_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    stride,
    table_ptr,  # [S, V]
    places_ptr,  # [n, 2]
    factors_ptr,  # [n, 3]
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(1)
    line = tl.load(places_ptr + index * 2).to(tl.int64)
    slot = tl.load(places_ptr + index * 2 + 1).to(tl.int64)
    repetition = tl.load(factors_ptr + index * 3)
    frequency = tl.load(factors_ptr + index * 3 + 1)
    presence = tl.load(factors_ptr + index * 3 + 2)
    token_ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(table_ptr + slot * V + token_ids, token_ids < V, other=0)
    is_seen = entry != 0
    count = (entry >> 1).to(tl.float32)
    at = logits_ptr + line * stride + token_ids
    value = tl.load(at, is_seen, other=0.0)
    value = tl.where(value > 0, tl.math.div_rn(value, repetition), value * repetition)
    value = value - frequency * count
    value = value - tl.where(count > 0, presence, 0.0)
    tl.store(at, value, is_seen)
