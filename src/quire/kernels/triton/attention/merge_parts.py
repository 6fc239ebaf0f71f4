"""Merges attention results over parts of a token's keys, in Triton.

    the parts of a token, in the order of their keys, folded one after the other; then the sink

The attention kernel merges its parts itself (`paged_attention.py`), by `fold_parts`. The kernel of
this file merges those of latent layers.

Partial results of attention are merged by their log-sum-exp (arXiv:2311.01282) with the functions
of `online_softmax.py`, which is also the reference. A token's result depends only on its own parts.

Each part of a token and query head has (D + 2) fp32 numbers: 1 % to 6 % of the bytes of its K and
V. One warp merges a token and query head; the loads of UNROLL parts run at the same time.

Shapes: M tokens, Hq query heads, D head size. Called by `attention/triton_paged.py` after
`latent_attention.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.attention.online_softmax import finish, fold
from quire.kernels.triton.dependent_launch import await_inputs, launch_options
from quire.kernels.triton.support import next_power_of_two

#: int32 fields of a token in the list: the token; its first part; its number of parts (0: the
#: output is zero, -1: it is already written); an unused field.
MERGE_FIELDS = 4

_UNROLL = 8


def merge_parts(
    tokens: torch.Tensor,
    parts: torch.Tensor,
    scales: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    count: torch.Tensor | None = None,
    num_programs: int | None = None,
) -> None:
    """Write out [T, Hq, D] and lse [T, Hq] fp32, both contiguous, for the tokens in the list.

    `tokens` is [M, MERGE_FIELDS] int32; parts [any, Hq, D] and scales [any, Hq, 2] are fp32; sinks
    are [Hq]. If the list is longer than the step needs, `count` [1] int32 is the number of entries
    that are set; `num_programs` programs for each head take them in turn.
    """
    num_heads, head_dim = out.shape[1:]
    merge_parts_kernel[(num_programs or tokens.shape[0], num_heads)](
        tokens,
        count,
        parts,
        scales,
        sinks,
        out,
        lse,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_two(head_dim),
        UNROLL=_UNROLL,
        num_warps=1,
        **launch_options(out.device),
        enable_fp_fusion=True,
    )


@triton.jit  # type: ignore[untyped-decorator]
def merge_parts_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,  # [M, MERGE_FIELDS] int32
    count_ptr,  # [1] int32, the number of entries that are set; None if each program has one
    parts_ptr,  # [parts, Hq, D] fp32
    scales_ptr,  # [parts, Hq, 2] fp32: m and sums
    sinks_ptr,  # [Hq], or None
    out_ptr,  # [T, Hq, D], contiguous
    lse_ptr,  # [T, Hq] fp32, or None
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
    IS_EARLY: tl.constexpr = False,  # see dependent_launch.py
):
    await_inputs(IS_EARLY)
    memory = (parts_ptr, scales_ptr, sinks_ptr, out_ptr, lse_ptr)
    if count_ptr is None:
        _merge(tokens_ptr, tl.program_id(0), memory, NUM_HEADS, HEAD_DIM, PADDED_DIM, UNROLL)
    else:
        for place in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
            _merge(tokens_ptr, place, memory, NUM_HEADS, HEAD_DIM, PADDED_DIM, UNROLL)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    tokens_ptr,
    place,
    memory,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge one token's parts for the program's head."""
    parts_ptr, scales_ptr, sinks_ptr, out_ptr, lse_ptr = memory
    # First, read the token's entry; nothing is done if its output is already written.
    entry = tokens_ptr + place * 4
    token, first = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64)
    num_parts = tl.load(entry + 2)
    if num_parts >= 0:
        head = tl.program_id(1)
        one = tl.arange(0, 1)
        dims = tl.arange(0, PADDED_DIM)
        mask = (dims < HEAD_DIM)[None, :]
        # Then fold its parts.
        rows = first * NUM_HEADS + head + one
        partial = parts_ptr, scales_ptr
        m, sums, acc = fold_parts(
            partial, rows, one == 0, num_parts, dims, NUM_HEADS, HEAD_DIM, UNROLL
        )
        # Last, add the sink and store the result.
        sinks = None
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + head + one).to(tl.float32)
        out, lse = finish(m, sums, acc, sinks)
        row = token * NUM_HEADS + head + one
        places = row[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + row, lse)


@triton.jit  # type: ignore[untyped-decorator]
def fold_parts(  # type: ignore[no-untyped-def]
    memory,  # (parts, m and sums), with a row for each part and head
    rows,  # [n] int64, the rows of the first parts
    is_row,  # [n], false for rows without parts
    num_parts,
    dims,  # [d], the columns of the parts to fold
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The parts of each row, folded in the order of their keys: (m, sums, acc [n, d]). Loads of
    UNROLL parts run at the same time; those after the last part change nothing."""
    parts_ptr, scales_ptr = memory
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full(rows.shape, float("-inf"), tl.float32)
    sums = tl.full(rows.shape, 0.0, tl.float32)
    acc = tl.full(mask.shape, 0.0, tl.float32)
    for start in range(0, num_parts, UNROLL):
        for step in tl.static_range(UNROLL):
            is_part = start + step < num_parts
            row = rows + (start + step) * NUM_HEADS
            other_m = tl.load(scales_ptr + 2 * row, is_row & is_part, other=float("-inf"))
            other_sums = tl.load(scales_ptr + 2 * row + 1, is_row & is_part, other=0.0)
            places = row[:, None] * HEAD_DIM + dims[None, :]
            other = tl.load(parts_ptr + places, mask & is_part, other=0.0)
            m, sums, acc = fold(m, sums, acc, other_m, other_sums, other)
    return m, sums, acc
