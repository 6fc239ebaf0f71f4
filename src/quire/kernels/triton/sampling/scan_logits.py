"""Finds the largest logits of each line, in Triton.

A line is a row of the logits [R, V]. `scan_logits` finds the largest logit of each group of 64
tokens and of each tile of 4096; `kth_largest` finds the k-th largest logit of a line.

    group_largest[r, g] = max of tokens [64 g, 64 g + 64)
    tile_largest[r, t]  = max of tokens [4096 t, 4096 t + 4096); tile_token: its lowest token id

A NaN counts as infinity, since either makes the line invalid. Each kernel that needs a line's
largest logit reduces `tile_largest` itself, so the programs of a scan need not wait for each other.

`kth_largest` is exact, ties included, and sorts nothing. The k-th largest of the groups' maxima is
a lower bound of the k-th largest logit. Only groups whose maximum reaches it can hold the k best;
there are seldom more than k of them. Among their tokens a bisection over the bit patterns of
floats, ordered as integers, finds the value. It takes at most 32 rounds of counting, and mostly
half of that or less, since each round moves a bound to the nearest logit of these tokens. Its cost
grows with k, from about 20 us a line for k <= 64 (an estimate: 8 to 16 rounds over 16 KiB in the L1
cache).

Shapes: R lines, V tokens, T tiles, G groups. Logits are fp32, lines `stride` elements apart.
Reference: torch's max and topk. Called by `gumbel_sample.py` and `token_logprobs.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import next_power_of_two

TILE = 4096
GROUP = 64

# The neutral element of tl.min for token ids and for results of `ordered`.
NO_ID = tl.constexpr(0x7FFFFFFF)

# Stands for a missing token; lower than every result of `ordered`.
NO_KEY = tl.constexpr(-0x80000000)

# The number of groups whose tokens `kth_largest` counts at a time.
_GROUPS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Scan:
    """The largest logits of R lines, and their tokens; see the module."""

    #: The largest logit of each tile, [R, T] fp32.
    tile_largest: torch.Tensor
    #: The lowest token id with the tile's largest logit, [R, T] int32.
    tile_token: torch.Tensor
    #: The largest logit of each group, [R, G] fp32.
    group_largest: torch.Tensor

    @staticmethod
    def empty(shape: tuple[int, int] | torch.Size, device: torch.device) -> "Scan":
        """An uninitialised scan for logits of this shape."""
        num_lines, vocab_size = shape
        num_tiles, num_groups = triton.cdiv(vocab_size, TILE), triton.cdiv(vocab_size, GROUP)
        return Scan(
            torch.empty((num_lines, num_tiles), dtype=torch.float32, device=device),
            torch.empty((num_lines, num_tiles), dtype=torch.int32, device=device),
            torch.empty((num_lines, num_groups), dtype=torch.float32, device=device),
        )


def check_logits(logits: torch.Tensor) -> None:
    """Raises ValueError unless logits are [R, V] fp32 with contiguous tokens."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {tuple(logits.shape)} {logits.dtype} with strides {logits.stride()}, but "
            "must be [R, V] float32 with tokens side by side"
        )


def scan_logits(logits: torch.Tensor, scan: Scan) -> None:
    """Compute `scan` from the logits."""
    check_logits(logits)
    num_lines, vocab_size = logits.shape
    scan_logits_kernel[(scan.tile_largest.shape[1], num_lines)](
        logits,
        logits.stride(0),
        scan.tile_largest,
        scan.tile_token,
        scan.group_largest,
        V=vocab_size,
        NUM_GROUPS=scan.group_largest.shape[1],
        TILE=TILE,
        GROUP=GROUP,
        num_warps=4,
        enable_fp_fusion=True,
    )


def kth_largest(logits: torch.Tensor, scan: Scan, k: torch.Tensor, out: torch.Tensor) -> None:
    """Write the k[r]-th largest logit of each line r to `out` [R] fp32.

    `k` is [R] int32. Numbers above V count as V; for k[r] <= 0 the result is -inf.
    """
    num_lines, vocab_size = logits.shape
    num_groups = scan.group_largest.shape[1]
    chosen = torch.empty((num_lines, num_groups), dtype=torch.int32, device=logits.device)
    kth_largest_kernel[(num_lines,)](
        logits,
        logits.stride(0),
        scan.group_largest,
        chosen,
        k,
        out,
        V=vocab_size,
        NUM_GROUPS=num_groups,
        BLOCK_GROUPS=next_power_of_two(num_groups),
        GROUP=GROUP,
        AT_ONCE=_GROUPS_AT_ONCE,
        num_warps=8,
        enable_fp_fusion=True,
    )


@triton.jit  # type: ignore[untyped-decorator]
def load_logits(line_ptr, token_ids, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits of tokens: -inf beyond the vocabulary, +inf for a NaN."""
    values = tl.load(line_ptr + token_ids, mask=token_ids < V, other=float("-inf"))
    return tl.where(values != values, float("inf"), values)


@triton.jit
def ordered(values):  # type: ignore[no-untyped-def]
    """The floats as int32 in the same order, all above NO_KEY; both zeros become 0."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(values == 0.0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(keys):  # type: ignore[no-untyped-def]
    """The inverse of `ordered`: the floats of its int32 numbers."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def upper_middle(low, high):  # type: ignore[no-untyped-def]
    """ceil((low + high) / 2) of int32, which does not overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit  # type: ignore[untyped-decorator]
def scan_logits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    stride,
    tile_largest_ptr,  # [R, T]
    tile_token_ptr,  # [R, T]
    group_largest_ptr,  # [R, G]
    V: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    token_ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = load_logits(logits_ptr + line * stride, token_ids, V)
    largest_of = tl.max(values, axis=1)
    tl.store(group_largest_ptr + line * NUM_GROUPS + groups, largest_of, groups < NUM_GROUPS)
    largest = tl.max(largest_of, axis=0)
    at = tl.where(values == largest, token_ids, NO_ID)
    place = line * tl.num_programs(0) + tile
    tl.store(tile_largest_ptr + place, largest)
    tl.store(tile_token_ptr + place, tl.min(tl.min(at, axis=1), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def kth_largest_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    stride,
    group_largest_ptr,  # [R, G]
    chosen_ptr,  # [R, G], scratch for the groups that can hold the k best tokens
    k_ptr,  # [R]
    out_ptr,  # [R]
    V: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    k = tl.load(k_ptr + line)
    if k <= 0:
        tl.store(out_ptr + line, float("-inf"))
        return
    k = tl.minimum(k, V)
    # First, find the k-th largest of the groups' maxima: a lower bound of the result.
    groups = tl.arange(0, BLOCK_GROUPS)
    in_line = groups < NUM_GROUPS
    largest_of = tl.load(group_largest_ptr + line * NUM_GROUPS + groups, in_line, other=0.0)
    keys = tl.where(in_line, ordered(largest_of), NO_KEY)
    high = tl.max(keys, axis=0)
    low = tl.minimum(high, NO_KEY + 1)
    if k <= NUM_GROUPS:
        top = high
        while low < top:
            middle = upper_middle(low, top)
            reaches = keys >= middle
            is_reached = tl.sum(reaches.to(tl.int32), axis=0) >= k
            low = tl.where(is_reached, tl.min(tl.where(reaches, keys, NO_ID), axis=0), low)
            top = tl.where(is_reached, top, tl.max(tl.where(reaches, NO_KEY, keys), axis=0))
    # Then list the groups whose maxima reach the bound.
    can_hold = keys >= low
    num_chosen = tl.sum(can_hold.to(tl.int32), axis=0)
    place = tl.cumsum(can_hold.to(tl.int32), axis=0) - 1
    tl.store(chosen_ptr + line * NUM_GROUPS + place, groups, can_hold)
    tl.debug_barrier()  # other threads of the program load what a thread stored
    # Last, bisect between the bounds, and count the tokens of those groups that reach the middle.
    within = tl.arange(0, GROUP)[None, :]
    while low < high:
        middle = upper_middle(low, high)
        count, start = num_chosen * 0, num_chosen * 0
        least_above, most_below = count + NO_ID, count + NO_KEY
        while start < num_chosen:  # the interpreter has no range over a tensor
            index = start + tl.arange(0, AT_ONCE)
            is_chosen = index < num_chosen
            group = tl.load(chosen_ptr + line * NUM_GROUPS + index, is_chosen, other=0)
            values = load_logits(logits_ptr + line * stride, group[:, None] * GROUP + within, V)
            counted = ordered(values)
            reaches = (counted >= middle) & is_chosen[:, None]
            count += tl.sum(tl.sum(reaches.to(tl.int32), axis=1), axis=0)
            above = tl.where(reaches, counted, NO_ID)
            least_above = tl.minimum(least_above, tl.min(tl.min(above, axis=1), axis=0))
            below = tl.where(counted < middle, counted, NO_KEY)
            most_below = tl.maximum(most_below, tl.max(tl.max(below, axis=1), axis=0))
            start += AT_ONCE
        low = tl.where(count >= k, least_above, low)
        high = tl.where(count >= k, high, most_below)
    tl.store(out_ptr + line, unordered(low))
