"""Log-probabilities and ranks of tokens, and the best tokens, in Triton.

All are computed from raw logits.

    logprob[t] = (logit[t] - largest) - log(sum of exp(logit - largest))
    rank[t]    = 1 + the number of larger logits

Definition and reference: `sampling/host/logprobs.py`; the two differ by rounding in the logarithms,
while ranks, tokens and their order are equal. Exponentials are summed in fp32 within tiles of a
fixed size, and the tiles' sums in a fixed tree; the last logarithm is taken in fp64. An entry
depends only on its line, and is never above zero.

The best tokens are picked one by one from the maxima of groups of 64 (see `scan_logits.py`). Each
time, the first group with the largest maximum yields its first token with that logit. Then the
group's maximum is computed from its remaining tokens. So tokens come in order, ties by token id, at
about 1 us each (an estimate).

Shapes: n entries, R lines of logits [R, V] fp32, K best tokens at most. Called by
`sampling/device/sampler.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.sampling.scan_logits import (
    GROUP,
    NO_ID,
    NO_KEY,
    TILE,
    Scan,
    check_logits,
    load_logits,
    ordered,
    unordered,
)
from quire.kernels.triton.support import next_power_of_two

#: int32 numbers of an entry before its best tokens: the bits of the log-probability, and the rank.
HEADER = 2


@dataclass(frozen=True, slots=True)
class LogprobQueries:
    """The n tokens to compute log-probabilities for; all tensors are [n] int32."""

    #: Each entry's line of the logits.
    line: torch.Tensor
    #: Each entry's place in `token_ids`, which holds the token's id.
    token: torch.Tensor
    #: The number of best tokens to return with each entry.
    num_top: torch.Tensor


def token_logprobs(
    logits: torch.Tensor,
    scan: Scan,
    queries: LogprobQueries,
    token_ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fill in out [n, HEADER + 2 K] int32: header, K token ids, bits of K log-probabilities.

    Only the first num_top ids and log-probabilities are set; num_top is at most K and at most V.
    `scan` is the scan of these logits [R, V], and `token_ids` holds int32 ids below V.
    """
    check_logits(logits)
    vocab_size, (num_entries, width) = logits.shape[1], out.shape
    num_tiles = scan.tile_largest.shape[1]
    sums = torch.empty((num_entries, num_tiles), dtype=torch.float32, device=logits.device)
    above = torch.empty((num_entries, num_tiles), dtype=torch.int32, device=logits.device)
    of_line = (logits, logits.stride(0), scan.tile_largest, queries.line, queries.token, token_ids)
    sizes = {
        **{"V": vocab_size, "NUM_TILES": num_tiles},
        "BLOCK_TILES": next_power_of_two(num_tiles),
    }
    sum_tiles_kernel[(num_tiles, num_entries)](
        *(*of_line, sums, above), **sizes, TILE=TILE, num_warps=4, enable_fp_fusion=True
    )
    num_groups = scan.group_largest.shape[1]
    pick_best_kernel[(num_entries,)](
        *(*of_line, scan.group_largest, sums, above, queries.num_top, out, width),
        **sizes,
        NUM_GROUPS=num_groups,
        BLOCK_GROUPS=next_power_of_two(num_groups),
        GROUP=GROUP,
        num_warps=8,
        enable_fp_fusion=True,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _entry_line(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr, line_ptr, token_ptr, token_ids_ptr, entry,
    NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """A pointer to an entry's line, its largest logit (NaN if not finite) and the token's logit."""
    line = tl.load(line_ptr + entry).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    of_tiles = tl.load(
        tile_largest_ptr + line * NUM_TILES + tiles, tiles < NUM_TILES, other=float("-inf")
    )
    at = logits_ptr + line * stride
    own = tl.load(at + tl.load(token_ids_ptr + tl.load(token_ptr + entry)))
    largest = tl.max(of_tiles, axis=0)
    is_finite = (largest < float("inf")) & (largest > float("-inf"))
    return at, tl.where(is_finite, largest, float("nan")), own


@triton.jit  # type: ignore[untyped-decorator]
def sum_tiles_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr, line_ptr, token_ptr, token_ids_ptr,
    sums_ptr,  # [n, T]: the sum of exp(logit - largest) over a tile
    above_ptr,  # [n, T]: the number of its logits that are larger than the token's
    V: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, entry = tl.program_id(0), tl.program_id(1)
    at, largest, own = _entry_line(
        logits_ptr, stride, tile_largest_ptr, line_ptr, token_ptr, token_ids_ptr, entry,
        NUM_TILES, BLOCK_TILES,
    )  # fmt: skip
    token_ids = tile * TILE + tl.arange(0, TILE)
    values = load_logits(at, token_ids, V)
    weights = tl.where(token_ids < V, tl.exp(values - largest), 0.0)
    place = entry * NUM_TILES + tile
    tl.store(sums_ptr + place, tl.sum(weights, axis=0))
    tl.store(above_ptr + place, tl.sum((values > own).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def pick_best_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr, line_ptr, token_ptr, token_ids_ptr,
    group_largest_ptr, sums_ptr, above_ptr, num_top_ptr,
    out_ptr,  # [n, width]
    width,
    V: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
    NUM_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # First, add up the tiles' sums and store the token's log-probability and rank.
    entry = tl.program_id(0)
    at, largest, own = _entry_line(
        logits_ptr, stride, tile_largest_ptr, line_ptr, token_ptr, token_ids_ptr, entry,
        NUM_TILES, BLOCK_TILES,
    )  # fmt: skip
    tiles = tl.arange(0, BLOCK_TILES)
    in_line = tiles < NUM_TILES
    places = entry * NUM_TILES + tiles
    sum_of_all = tl.sum(tl.load(sums_ptr + places, in_line, other=0.0), axis=0)
    rank = 1 + tl.sum(tl.load(above_ptr + places, in_line, other=0), axis=0)
    log_sum = tl.log(sum_of_all.to(tl.float64)).to(tl.float32)
    out_line = out_ptr + entry.to(tl.int64) * width
    tl.store(out_line, (own - largest - log_sum).to(tl.int32, bitcast=True))
    tl.store(out_line + 1, rank)
    # Then pick the best tokens one by one from the groups' maxima.
    num_best = (width - 2) // 2
    groups = tl.arange(0, BLOCK_GROUPS)
    line = tl.load(line_ptr + entry).to(tl.int64)
    of_groups = tl.load(
        group_largest_ptr + line * NUM_GROUPS + groups, groups < NUM_GROUPS, other=0.0
    )
    # Groups that don't exist, or have no tokens left, rank below all values, infinities too.
    keys = tl.where(groups < NUM_GROUPS, ordered(of_groups), NO_KEY)
    index, num_top = rank * 0, tl.load(num_top_ptr + entry)
    last_key, last_token = index + NO_KEY, index - 1
    while index < num_top:
        best = tl.max(keys, axis=0)
        group = tl.min(tl.where(keys == best, groups, NO_ID), axis=0)
        members = group * GROUP + tl.arange(0, GROUP)
        values = ordered(load_logits(at, members, V))
        # Tokens with equal logits are picked in the order of ids: skip those picked before.
        is_next = (values == best) & (members < V)
        is_next = is_next & (members > tl.where(best == last_key, last_token, -1))
        token = tl.min(tl.where(is_next, members, NO_ID), axis=0)
        tl.store(out_line + 2 + index, token)
        logprob = unordered(best) - largest - log_sum
        tl.store(out_line + 2 + num_best + index, logprob.to(tl.int32, bitcast=True))
        is_left = (members < V) & ((values < best) | ((values == best) & (members > token)))
        rest = tl.max(tl.where(is_left, values, NO_KEY), axis=0)
        keys = tl.where(groups == group, rest, keys)
        last_key, last_token = best, token
        index += 1
