"""Plans a step of the Triton backend: tile shapes and work list.

It uses only lengths and windows, and launches nothing. Called by `triton_paged.py`. If all
sequences decode, a kernel makes the work list on the device by the `ChunkRule` made here
(`kernels/triton/attention/decode_work.py`). The lists of other steps are made here, on the host,
where the lengths are known; `triton_plan_words.py` lays them out for steps that are captured.

An item of the list is a tile of queries with the range of keys that it attends to; see
`kernels/triton/attention/paged_attention.py`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionBatch, AttentionSpec
from quire.kernels.triton.attention.decode_work import (
    MIN_CHUNK_TOKENS,
    TOKENS_PER_PART,
    ChunkRule,
)
from quire.kernels.triton.attention.paged_attention import ITEM_FIELDS, AttendShape
from quire.kernels.triton.support import next_power_of_two

Ints = npt.NDArray[np.int64]

MIN_UNIFORM_CHUNK_TOKENS = 512
"""The smallest chunk of uniform attention, whose chunks all have one size."""

MIN_LATENT_CHUNK_TOKENS = 1024
"""The smallest chunk of latent layers. Their partial results are larger: [Hq, Dv] per token."""

MAX_LATENT_PARTS = 1024
"""The largest number of a token's partial results (parts) in a latent layer, over all query
heads."""

MAX_PROGRAM_PARTS = 128
"""The largest number of a token's partial results (parts), summed over the KV heads. A single long
sequence then has about a program for each processor of the largest GPUs."""

MAX_PART_BYTES = 64 << 20
"""The bytes that the parts of a step with prompts may take. When they are used up, the keys of
further tiles are not split."""

OTHER_SHARED_BYTES = 12 << 10
"""The bytes of shared memory that a program takes in addition to queries, K and V: for reductions
and changes of layout."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a device that bound tile shapes."""

    num_processors: int
    #: The bytes of shared memory of one streaming multiprocessor, in this file "processor".
    shared_bytes: int
    #: The bytes of shared memory that one program (thread block) may use.
    program_shared_bytes: int
    #: Whether tiles are as large as matrix instructions allow that take their operands from shared
    #: memory (sm_90). Otherwise operands take registers, which limit the tile sizes; the compiler
    #: spills larger tiles on sm_100, too.
    is_wide: bool
    #: The number of warps of tiles of 64 rows, unless `is_wide`. On sm_89 and from sm_100 on, the
    #: compiler spills registers of eight warps, but none of four.
    num_narrow_warps: int = 8

    @staticmethod
    def of(device: torch.device) -> "DeviceLimits":
        if device.type == "cpu":
            # Triton's interpreter gets few programs, with the largest shapes.
            return DeviceLimits(1, 233_472, 232_448, is_wide=True)
        properties = torch.cuda.get_device_properties(device)
        return DeviceLimits(
            properties.multi_processor_count,
            properties.shared_memory_per_multiprocessor,
            properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            is_wide=properties.major == 9,
            num_narrow_warps=8 if (properties.major, properties.minor) < (8, 9) else 4,
        )


def decode_shape(
    spec: AttentionSpec, block_size: int, dtype: torch.dtype, limits: DeviceLimits
) -> AttendShape:
    """The shape for sequences that decode: one token per tile, bound by memory.

    A stage of K and V is 32 KiB, and two are loading while one is computed. So the three programs
    of a processor have 192 KiB of loads in flight at any time. An H200 needs only latency times
    bandwidth in flight: 0.8 us x 4.3 TB/s / 132 = 26 KiB per processor. Without `is_wide`, and for
    fp32 and int8 codes, tiles have half as many keys, to save registers.
    """
    row_bytes = max(16, next_power_of_two(spec.head_dim)) * max(2, dtype.itemsize)
    tile = max(16, min(128, 16_384 // row_bytes))
    if dtype.itemsize == 1 and limits.is_wide:
        return _shape(spec, block_size, dtype, limits, _quantized_decode_tiles(spec))
    if dtype == torch.float32 or not limits.is_wide:
        tile = max(16, tile // 2)
    return _shape(spec, block_size, dtype, limits, _TileSizes(16, tile, 4))


def _quantized_decode_tiles(spec: AttentionSpec) -> "_TileSizes":
    """Tile sizes for decoding over int8 codes, on devices with `is_wide`.

    The main cost of a tile of codes is a dozen barriers, so tiles have as many keys as the
    registers allow for two programs per processor. A tile of 128 keys of 128 codes takes 32 KiB,
    and 64 KiB more for its widened copy.
    """
    if spec.head_dim <= 128 and spec.num_heads // spec.num_kv_heads <= 16:
        return _TileSizes(16, 128, 4, most_stages=2 if spec.head_dim > 64 else 3)
    return _TileSizes(16, 32, 8) if spec.head_dim > 64 else _TileSizes(16, 64, 4)


def mixed_shapes(
    spec: AttentionSpec, block_size: int, dtype: torch.dtype, limits: DeviceLimits
) -> tuple[AttendShape, ...]:
    """The shapes for other sequences, by the number of rows of their tiles, ascending.

    Tiles of 128 rows are bound by the tensor cores: 64 keys of 128 elements take 4 MFLOP for 32
    KiB, which is 128 FLOP per byte from L2. A device of 400 TFLOP/s with 5.5 TB/s of L2 needs 73.
    """
    tile = 64 if spec.head_dim <= 128 else 32
    if dtype == torch.float32:
        tiles = [_TileSizes(32, 16, 8)]
    elif dtype.itemsize == 1:
        tiles = _quantized_tiles(spec, tile, limits)
    elif limits.is_wide:
        # Four warps spill 32 to 48 bytes with 64 rows of more than 128 elements.
        tiles = [_TileSizes(64, tile, 4 if tile == 64 else 8), _TileSizes(128, tile, 8)]
    else:
        num_warps = limits.num_narrow_warps if tile == 64 else 8
        tiles = [_TileSizes(64, tile // 2, num_warps)]
    return tuple(_shape(spec, block_size, dtype, limits, t) for t in tiles)


def _quantized_tiles(spec: AttentionSpec, tile: int, limits: DeviceLimits) -> list["_TileSizes"]:
    """Tile sizes for int8 codes, which take registers as codes and again as widened floats."""
    if not limits.is_wide:
        return [_TileSizes(16 if _is_tight(spec) else 32, tile // 2, 4 if tile == 64 else 8)]
    if tile < 64:
        return [_TileSizes(32 if _is_tight(spec) else 64, 16, 8)]
    return [_TileSizes(64, 32, 4), _TileSizes(128, 64, 8)]


def uniform_shape(
    spec: AttentionSpec, block_size: int, dtype: torch.dtype, limits: DeviceLimits
) -> AttendShape:
    """The shape for all steps if a row's bits must not depend on the step.

    64 rows keep decoding bound by memory: 2 MFLOP for 32 KiB are half of what the tensor cores can
    do during the read. Registers limit the tile size; half of them hold the outputs of the current
    chunk and of the chunks before it.
    """
    is_large = spec.head_dim > 128
    if is_large and dtype.itemsize == 1:
        tiles = _TileSizes(32 if limits.is_wide and not _is_tight(spec) else 16, 16, 8)
    elif dtype == torch.float32:
        tiles = _TileSizes(16, 16, 4)
    elif limits.is_wide and spec.head_dim <= 64:
        tiles = _TileSizes(64, 64, 4)
    else:
        rows, num_warps = (64, 4) if limits.is_wide else (32, 8)
        tiles = _TileSizes(rows, 16, 8) if is_large else _TileSizes(rows, 32, num_warps)
    return _shape(spec, block_size, dtype, limits, tiles, uniform=True)


def latent_shape(
    spec: AttentionSpec, block_size: int, dtype: torch.dtype, limits: DeviceLimits
) -> AttendShape:
    """The shape for all steps of a latent layer (`kernels/triton/attention/latent_attention.py`).

    A tile of 64 keys of 576 elements in bf16 is 72 KiB, and two are in flight; GPUs that give a
    program 99 KiB (sm_86, sm_89, sm_120) get tiles of half as many keys. In fp32 only the smallest
    tiles fit registers and shared memory.
    """
    rows, tile, num_stages = 64 if limits.is_wide else 32, 64, 2
    if dtype == torch.float32:
        rows, tile, num_stages = 16, 16, 1
    room = limits.program_shared_bytes - OTHER_SHARED_BYTES
    while tile > 16 and num_stages * tile * spec.head_dim * dtype.itemsize > room:
        tile //= 2
    return _of_layer(
        spec, block_size, uniform=True, rows=rows, tile=tile, num_warps=8, num_stages=num_stages
    )


@dataclass(frozen=True, slots=True)
class _TileSizes:
    """Tile sizes: the largest that don't spill registers when compiled for sm_90 (`is_wide`), or
    for sm_80, 86, 89, 100 and 120."""

    rows: int
    keys: int
    num_warps: int
    most_stages: int = 3


def _shape(
    spec: AttentionSpec,
    block_size: int,
    dtype: torch.dtype,
    limits: DeviceLimits,
    tiles: _TileSizes,
    *,
    uniform: bool = False,
) -> AttendShape:
    rows = max(tiles.rows, next_power_of_two(spec.num_heads // spec.num_kv_heads))
    if dtype.itemsize == 1:  # if a KV head has more query heads, they take several tiles
        rows = min(rows, max(tiles.rows, _most_quantized_rows(spec, limits)))
    # Codes are widened to 16 bits in shared memory.
    row_bytes = max(16, next_power_of_two(spec.head_dim)) * max(2, dtype.itemsize)
    queries_bytes = rows * row_bytes if rows >= 64 else 0
    room = limits.program_shared_bytes - queries_bytes - OTHER_SHARED_BYTES
    return _of_layer(
        spec,
        block_size,
        uniform=uniform,
        rows=rows,
        tile=tiles.keys,
        num_warps=8 if dtype == torch.float32 and rows >= 64 else tiles.num_warps,
        num_stages=max(1, min(tiles.most_stages, room // (2 * tiles.keys * row_bytes))),
    )


def _of_layer(
    spec: AttentionSpec,
    block_size: int,
    *,
    uniform: bool,
    rows: int,
    tile: int,
    num_warps: int,
    num_stages: int,
) -> AttendShape:
    assert spec.scale > 0, "the greatest product is to be the greatest score"
    return AttendShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        causal=spec.causal,
        uniform=uniform,
        rows=rows,
        tile=tile,
        num_warps=num_warps,
        num_stages=num_stages,
        value_dim=spec.value_dim,
    )


def _is_tight(spec: AttentionSpec) -> bool:
    """Whether heads are so large that masks or many query heads exhaust the registers."""
    is_padded = spec.head_dim != next_power_of_two(spec.head_dim)
    return spec.head_dim > 128 and (is_padded or spec.num_heads // spec.num_kv_heads > 16)


def _most_quantized_rows(spec: AttentionSpec, limits: DeviceLimits) -> int:
    if spec.head_dim > 128:
        return 16
    return 64 if limits.is_wide else 32


def num_resident(shape: AttendShape, dtype: torch.dtype, limits: DeviceLimits) -> int:
    """The number of programs of a shape that run at the same time on the whole device.

    Shared memory and the 64 Ki registers of a processor bound their number. A thread takes 146
    registers for 16 rows of 128 elements, and up to 255 for other shapes. A processor runs one
    program of a latent layer.
    """
    if shape.value_dim is not None:
        return limits.num_processors
    stage_bytes = 2 * shape.tile * shape.padded_dim * dtype.itemsize
    used = max(1, shape.num_stages - 1) * stage_bytes + OTHER_SHARED_BYTES // 2
    if dtype.itemsize == 1:
        used += 2 * stage_bytes  # the tile that is multiplied, widened
    if shape.rows >= 64:
        used += stage_bytes + shape.rows * shape.padded_dim * dtype.itemsize
    is_small = shape.rows == 16 and shape.padded_dim <= 128
    is_small &= dtype.itemsize > 1 or shape.tile < 128
    by_registers = (3 if is_small else 2) * 4 // shape.num_warps
    return limits.num_processors * max(1, min(by_registers, limits.shared_bytes // used))


def chunk_rule(shape: AttendShape, max_context: int) -> ChunkRule:
    """The rule that splits a tile's keys into chunks.

    max_context is the number of tokens of the longest sequence that the block tables have room for.
    """
    least, max_parts = MIN_UNIFORM_CHUNK_TOKENS, max(8, MAX_PROGRAM_PARTS // shape.num_kv_heads)
    if shape.value_dim is not None:
        least, max_parts = MIN_LATENT_CHUNK_TOKENS, max(8, MAX_LATENT_PARTS // shape.num_heads)
    most = max_context
    # A tile sees the windows of all its queries.
    if shape.window is not None:
        most = min(most, shape.window + shape.queries)
    if not shape.uniform:
        least = max(MIN_CHUNK_TOKENS, shape.tile, min(256, 16 * next_power_of_two(shape.group)))
        parts = min(max_parts, -(-most // least)) + 1
        return ChunkRule(parts, 0, shape.tile, shape.window, least)
    chunk = max(least, next_power_of_two(-(-most // max_parts)))
    return ChunkRule(-(-most // chunk) + 1, chunk, shape.tile, shape.window)


@dataclass(frozen=True, slots=True)
class HostWork:
    """A work list made on the host."""

    #: [*, ITEM_FIELDS], one row per item; items with the most keys come first.
    items: npt.NDArray[np.int32]
    #: [*, MERGE_FIELDS], one row for each token with several partial results (parts).
    merges: npt.NDArray[np.int32]
    #: The number of parts that items may write.
    num_parts: int


def host_work(
    batch: AttentionBatch,
    shape: AttendShape,
    rule: ChunkRule,
    sequences: slice = slice(None),
    *,
    sees_ahead: bool = False,
) -> HostWork:
    """The work list of any step, or of some of its sequences. With `sees_ahead`, it is for layers
    that see ahead.

    Decoding sequences and short chunks of prompts, which fit one tile of queries, may have their
    keys split into several items.
    """
    # First, the tiles of queries, and the keys [low, end) that each sees.
    all_lens = np.array(batch.query_lens_list, np.int64)
    starts = (np.cumsum(all_lens) - all_lens)[sequences]
    query_lens = all_lens[sequences]
    context = np.array(batch.context_lens_list, np.int64)[sequences]
    num_tiles = -(-query_lens // shape.queries)
    sequence = np.repeat(np.arange(len(query_lens)), num_tiles)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    offset = number * shape.queries
    first_token = starts[sequence] + offset
    num_tokens = np.minimum(query_lens[sequence] - offset, shape.queries)
    position = (context - query_lens)[sequence] + offset
    low, end = _seen_keys(shape, position, num_tokens, context[sequence])
    if sees_ahead and batch.visible_ends_list is not None:
        end = np.array(batch.visible_ends_list, np.int64)[first_token + num_tokens - 1]

    # Then split the keys of long tiles, until the buffer of parts is full.
    chunk = _chunk_tokens(rule, end - low)
    count = -(-end // chunk) - low // chunk
    # A tile that sees a whole content may have more chunks than other tiles with a window.
    may_split = (num_tiles[sequence] == 1) & (count > 1) & (count <= rule.parts_per_token)
    if not rule.chunk_tokens:
        may_split &= end - low > chunk
    slots = np.cumsum(np.where(may_split, num_tokens, 0))
    is_split = may_split & (slots <= part_room(shape, rule))
    first_part = (slots - num_tokens) * rule.parts_per_token

    # Last, the items of each tile.
    count = np.where(is_split, count, 1)
    tile = np.repeat(np.arange(len(sequence)), count)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.where(is_split[tile], (low[tile] // chunk[tile] + piece) * chunk[tile], 0)
    first_key = np.maximum(begin, low[tile] // shape.tile * shape.tile)
    end_key = np.where(piece + 1 < count[tile], begin + chunk[tile], end[tile])
    part = np.where(is_split[tile], first_part[tile] + piece, -1)
    rows = np.array(batch.rows_list, np.int64)[sequences][sequence[tile]]
    tokens, lens = first_token[tile], num_tokens[tile]
    contexts = context[sequence[tile]]
    fields = (rows, tokens, lens, position[tile], first_key, end_key, part, contexts)
    items = np.stack(fields, axis=1).astype(np.int32)
    longest = np.argsort(first_key - end_key, kind="stable")
    merges = _merges(first_token, num_tokens, first_part, count, is_split, rule.parts_per_token)
    num_parts = int(slots[is_split].max(initial=0)) * rule.parts_per_token
    return HostWork(items[longest], merges, num_parts)


def padding_items(shape: AttendShape, first: int, end: int) -> npt.NDArray[np.int32]:
    """Items without keys, which make the outputs of the tokens [first, end) zero."""
    tokens = np.arange(first, end, shape.queries, dtype=np.int32)
    items = np.zeros((len(tokens), ITEM_FIELDS), np.int32)
    items[:, 1], items[:, 2] = tokens, np.minimum(end - tokens, shape.queries)
    # So the last token's position is -1, and no key is seen.
    items[:, 3], items[:, 6] = -items[:, 2], -1
    return items


def part_room(shape: AttendShape, rule: ChunkRule) -> int:
    """The most tokens of a step whose keys may be split into parts."""
    token_bytes = shape.num_heads * (shape.output_dim + 2) * 4 * rule.parts_per_token
    return MAX_PART_BYTES // token_bytes


def _seen_keys(
    shape: AttendShape, position: Ints, num_tokens: Ints, context: Ints
) -> tuple[Ints, Ints]:
    """For each tile, the range [first, end) of keys that its tokens see."""
    low, end = np.zeros_like(position), context
    if shape.window is not None:
        low = np.maximum(position + 1 - shape.window, 0)
        end = np.minimum(end, position + num_tokens - 1 + shape.window)
    if shape.causal:
        end = position + num_tokens
    return low, end


def _chunk_tokens(rule: ChunkRule, num_seen: Ints) -> Ints:
    """The chunk size of each tile, given the number of keys that it sees."""
    if rule.chunk_tokens:
        return np.full_like(num_seen, rule.chunk_tokens)
    chunk = np.full_like(num_seen, rule.least_tokens)
    most_parts = rule.parts_per_token - 1
    while (is_small := chunk * np.minimum(chunk // TOKENS_PER_PART, most_parts) < num_seen).any():
        chunk[is_small] *= 2
    return chunk


def _merges(
    first_token: Ints,
    num_tokens: Ints,
    first_part: Ints,
    count: Ints,
    is_split: npt.NDArray[np.bool_],
    parts_per_token: int,
) -> npt.NDArray[np.int32]:
    lens = num_tokens[is_split]
    tile = np.repeat(np.flatnonzero(is_split), lens)
    offset = np.arange(len(tile)) - np.repeat(np.cumsum(lens) - lens, lens)
    fields = (
        first_token[tile] + offset,
        first_part[tile] + offset * parts_per_token,
        count[tile],
        np.zeros_like(tile),
    )
    return np.stack(fields, axis=1).astype(np.int32)
