"""Cuts pairs of tokens and experts into tiles of one expert, in one Triton launch.

Pairs p = t K + k of a token t and its k-th expert are sorted by expert, stably, and each expert's
pairs are cut into tiles. A place is an index into the sorted pairs. One program an expert counts
the pairs of all experts, from which the places and tiles of its own follow, and then numbers its
pairs. So programs share nothing, and the host never waits for the device. A program reads all
pairs twice, 64 KiB of ids from L2 for 1,024 tokens of 8 experts.

Shapes: T tokens, K experts of a token, P = T K pairs. Called by `formats.grouped`, for the kernels
of `grouped_matmul.py` and other files, which read the plan with `tile_at` and `places_of_tile`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import next_power_of_two

#: The rows of a tile that is not wide. A decode step gives most experts a pair or two.
NARROW_ROWS = 16
#: The mean number of an expert's pairs from which tiles have 64 rows, or 128.
_WIDE_FROM = {64: 32, 128: 128}
#: The largest number of pairs that a program reads at once.
_MOST_PAIRS = 4096


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Pairs sorted by expert, and their tiles. All tensors are int32 on the device."""

    #: The pair at each place, [P].
    order: torch.Tensor
    #: The places of each token's pairs, ascending, so in ascending order of experts, [T, K].
    places: torch.Tensor
    #: The expert, first place and end of the expert's places, for each tile, [tiles, 3]. A missing
    #: tile has a first place that is not before the end.
    tiles: torch.Tensor
    #: The largest number of places of a tile.
    block_rows: int


def wide_rows(num_pairs: int, num_experts: int) -> int:
    """The number of rows of tiles where a row's bits may depend on the batch: more for prompts, so
    that weights are read less often."""
    wide = [rows for rows, least in _WIDE_FROM.items() if num_pairs >= least * num_experts]
    return max(wide, default=NARROW_ROWS)


def plan_groups(ids: torch.Tensor, num_experts: int, block_rows: int = NARROW_ROWS) -> GroupPlan:
    """The plan for experts `ids` [T, K], integers below num_experts. The call doesn't wait for the
    device."""
    num_pairs = ids.numel()
    # Two bounds limit the number of tiles: the number of pairs, and the number of full tiles plus
    # one partial tile for each expert.
    num_tiles = min(num_pairs, num_experts + num_pairs // block_rows)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    places = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=ids.device)
    if num_pairs:
        block = min(_MOST_PAIRS, max(16, next_power_of_two(num_pairs)))
        plan_groups_kernel[(num_experts,)](
            ids.contiguous(),
            order,
            places,
            tiles,
            num_pairs,
            num_tiles,
            TOP_K=ids.shape[1],
            BINS=max(16, next_power_of_two(num_experts)),
            BLOCK=block,
            BLOCK_M=block_rows,
            num_warps=8 if block > 1024 else 4,
            enable_fp_fusion=False,
        )
    return GroupPlan(order, places, tiles, block_rows)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])  # type: ignore[untyped-decorator]
def plan_groups_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [P]
    order_ptr,  # [P]
    places_ptr,  # [P]
    tiles_ptr,  # [num_tiles, 3]
    num_pairs,
    num_tiles,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,  # at least the number of experts, a power of two
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    expert = tl.program_id(0)
    # First, count all experts' pairs. The program's places and tiles come after those of experts
    # with smaller ids.
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_pair = pairs < num_pairs
        ids = tl.load(ids_ptr + pairs, is_pair, other=0).to(tl.int32)
        counts += tl.histogram(ids, BINS, is_pair)
    experts = tl.arange(0, BINS)
    first_place = tl.sum(tl.where(experts < expert, counts, 0))
    end = first_place + tl.sum(tl.where(experts == expert, counts, 0))
    first_tile = tl.sum(tl.where(experts < expert, tl.cdiv(counts, BLOCK_M), 0))

    # Then cut its places into tiles. The last expert also has the missing tiles.
    is_last = expert == tl.num_programs(0) - 1
    last_tile = tl.where(is_last, num_tiles, first_tile + tl.cdiv(end - first_place, BLOCK_M))
    for start in range(first_tile, last_tile, 32):
        tiles = start + tl.arange(0, 32)
        is_tile = tiles < last_tile
        firsts = first_place + (tiles - first_tile) * BLOCK_M
        tl.store(tiles_ptr + 3 * tiles, expert, is_tile)
        tl.store(tiles_ptr + 3 * tiles + 1, firsts, is_tile)
        tl.store(tiles_ptr + 3 * tiles + 2, end, is_tile)

    # Last, give its pairs their places, and the tokens of these pairs.
    place = first_place
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, pairs < num_pairs, other=BINS).to(tl.int32)
        is_own = ids == expert
        places = place + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order_ptr + places, pairs, is_own)
        first_pairs = pairs // TOP_K * TOP_K
        rank = tl.zeros((BLOCK,), tl.int32)
        for k in tl.static_range(TOP_K):
            other = tl.load(ids_ptr + first_pairs + k, is_own, other=0).to(tl.int32)
            is_before = (other < expert) | ((other == expert) & (first_pairs + k < pairs))
            rank += is_before.to(tl.int32)
        tl.store(places_ptr + first_pairs + rank, places, is_own)
        place += tl.sum(is_own.to(tl.int32))


@triton.jit
def tile_at(tiles_ptr, tile):  # type: ignore[no-untyped-def]
    """(the tile's expert, its first place, the end of its places)."""
    tile_ptr = tiles_ptr + 3 * tile
    return tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)


@triton.jit  # type: ignore[untyped-decorator]
def places_of_tile(  # type: ignore[no-untyped-def]
    first, end, order_ptr, PAIRS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(the places of a tile, whether each is before `end`, its row of x), each [BLOCK_M]."""
    places = first + tl.arange(0, BLOCK_M)
    is_there = places < end
    rows = places
    if order_ptr is not None:
        rows = tl.load(order_ptr + places, is_there, other=0) // PAIRS_PER_ROW
    return places, is_there, rows
