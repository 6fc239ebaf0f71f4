"""Greedy choice and sampling from logits without sorting, in Triton.

Serves temperature, top_k, min_p and top_p. What is left of a line's tokens, and the noise, are
defined in `sampling/host/choice.py`, which is the reference. With x = (logit - largest) /
temperature, rounded as there, these kernels follow a scan:

    race    each tile's two best coarse scores x + gumbel, in fp32, of tokens that top_k and min_p
            leave
    settle  the best of the tiles' scores wins; if a second is as close as the coarse scores may
            err, which befalls two lines in ten thousand, those in question are computed exactly
    weigh   top_p: what all tokens weigh and what those above the winner weigh, in whole units, so
            that sums are exact
    finish  top_p: is the winner outside of the nucleus, so are all tokens not above it: the others
            race again, one program a line, until the winner is inside

No number that the host would have to know decides what is launched: `settle` and `finish` loop on
the device. Each time a winner falls outside, half of the weight outside leaves on average.

Bound by instructions: the race has about 140 a token as compiled for sm_90, half of them the hash
and the two logarithms; tiles with nothing left are skipped. An estimate for R = 256, V = 152k on an
H200 (132 SMs of 128 lanes, 4.3 TB/s): the race 0.2 ms, each other pass over the logits 0.04 ms.

Shapes: R lines, V tokens, T tiles; logits fp32. A line's result depends on that line alone, to the
bit. Called by `sampling/device/sampler.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.sampling.gumbel_noise import (
    COARSE_ERROR,
    coarse_gumbel,
    exact_score,
    row_key,
)
from quire.kernels.triton.sampling.scan_logits import (
    NO_ID,
    TILE,
    Scan,
    check_logits,
    kth_largest,
    load_logits,
)
from quire.kernels.triton.support import next_power_of_two

SAMPLED, BROKEN, EMPTY = 0, 1, 2
"""A line's outcome: a token; logits that are no numbers; no token left by what edited them."""

# Further below the most likely token no noise can win: it lies between -3.7 and 36.8.
_LOWEST_X = tl.constexpr(-41.0)
# Of the weights in `choice.py`.
_WEIGHT_UNITS = tl.constexpr(2.0**32)
# Tokens below weigh less than half a unit, however the exponential is rounded.
_WEIGHTLESS_X = tl.constexpr(-22.9)
_NEVER = tl.constexpr(float("-inf"))

TOO_CLOSE = 2 * COARSE_ERROR
"""Coarse scores that are no further apart may stand in the wrong order."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How each of R lines is sampled, on the device; see `choice.Draw`.

    stream: int64, the noise of its row, without the position. temperature: fp32, 0 for the largest
    logit. log_min_p: fp32. top_k: int32, 0 for none. top_p: fp64. Flags: whether any line uses it.
    """

    stream: torch.Tensor
    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was chosen for R lines.

    token: [R] int32, 0 where nothing could be. state: [R] int32, SAMPLED, BROKEN or EMPTY.
    token_ids: [N, L] int32, the tokens of all rows; line r's token is also written to
        token_ids[row[r], position[r]], but not beyond L. row, position: [R] int64.
    """

    token: torch.Tensor
    state: torch.Tensor
    token_ids: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor


class Workspace:
    """What the kernels leave each other, for up to so many lines; nothing outlives a call."""

    def __init__(self, num_lines: int, vocab_size: int, device: torch.device) -> None:
        num_tiles = triton.cdiv(vocab_size, TILE)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.scores = empty((num_lines, num_tiles, 2), torch.float32)
        self.leaders = empty((num_lines, num_tiles), torch.int32)
        self.masses = empty((num_lines, num_tiles, 2), torch.int64)
        self.cutoff = torch.full((num_lines,), float("-inf"), dtype=torch.float32, device=device)


def gumbel_sample(
    logits: torch.Tensor,
    scan: Scan,
    raw_scan: Scan,
    draws: Draws,
    workspace: Workspace,
    outcome: Outcome,
    *,
    too_close: float = TOO_CLOSE,
) -> None:
    """Choose a token for each line of logits [R, V] and write it down in `outcome`.

    scan: of these logits. raw_scan: of what they were before options edited them.
    """
    check_logits(logits)
    (num_lines, vocab_size), num_tiles = logits.shape, scan.tile_largest.shape[1]
    if draws.any_top_k:
        kth_largest(logits, scan, draws.top_k, workspace.cutoff)
    line = (logits, logits.stride(0), scan.tile_largest)
    options = (
        *(draws.stream, outcome.position, draws.temperature, draws.log_min_p, workspace.cutoff),
    )
    sizes = {
        **{"V": vocab_size, "TILE": TILE},
        **{"NUM_TILES": num_tiles, "BLOCK_TILES": next_power_of_two(num_tiles)},
    }
    written = (outcome.token, outcome.token_ids, outcome.row)
    lengths = (outcome.token_ids.stride(0), outcome.token_ids.shape[1])
    if draws.any_sampled:
        race_kernel[(num_tiles, num_lines)](
            *line, *options, workspace.scores, workspace.leaders, **sizes, num_warps=8
        )
    settle_kernel[(num_lines,)](
        *(*line, scan.tile_token, raw_scan.tile_largest, *options),
        *(workspace.scores, workspace.leaders, *written, outcome.state, *lengths),
        too_close,
        **sizes,
        num_warps=8,
    )
    if draws.any_top_p:
        weigh_kernel[(num_tiles, num_lines)](
            *(*line, *options, draws.top_p, outcome.token, outcome.state, workspace.masses),
            **sizes,
            num_warps=4,
        )
        finish_kernel[(num_lines,)](
            *(*line, *options, draws.top_p, workspace.masses, *written, outcome.state, *lengths),
            too_close,
            **sizes,
            num_warps=16,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _largest_of_line(tile_largest_ptr, line, NUM_TILES, BLOCK_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    tiles = tl.arange(0, BLOCK_TILES)
    at = tile_largest_ptr + line * NUM_TILES + tiles
    return tl.max(tl.load(at, tiles < NUM_TILES, other=float("-inf")), axis=0)


@triton.jit
def _is_finite(value):  # type: ignore[no-untyped-def]
    return (value < float("inf")) & (value > float("-inf"))


@triton.jit
def _scaled(logit, largest, temperature):  # type: ignore[no-untyped-def]
    return tl.math.div_rn(logit - largest, temperature)


@triton.jit
def _lowest_left(line, log_min_p_ptr, cutoff_ptr, largest, temperature):  # type: ignore[no-untyped-def]
    """The lowest x that min_p and top_k leave."""
    last = _scaled(tl.load(cutoff_ptr + line), largest, temperature)
    return tl.maximum(last, tl.load(log_min_p_ptr + line))


@triton.jit  # type: ignore[untyped-decorator]
def _coarse_scores(line_ptr, token_ids, key, largest, temperature, left, won, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """-inf where a token is not left, or not above x = `won`."""
    x = _scaled(load_logits(line_ptr, token_ids, V), largest, temperature)
    return tl.where((x >= left) & (x > won), x + coarse_gumbel(key, token_ids), _NEVER)


@triton.jit  # type: ignore[untyped-decorator]
def _exact_winner(  # type: ignore[no-untyped-def]
    line_ptr, tiles_ptr, key, largest, temperature, left, beaten, floor,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """The token with the best exact score, the lowest of equal ones, of those with x above that of
    the logit `beaten` whose coarse score is at least `floor`. tiles_ptr: of the line."""
    won = _scaled(beaten, largest, temperature)
    best_score = floor.to(tl.float64) * 0.0 - float("inf")
    best_token = tl.program_id(0) * 0
    for tile in range(NUM_TILES):
        if tl.load(tiles_ptr + tile) > beaten:
            token_ids = tile * TILE + tl.arange(0, TILE)
            scores = _coarse_scores(line_ptr, token_ids, key, largest, temperature, left, won, V)
            is_close = scores >= floor
            num_close = tl.sum(is_close.to(tl.int32), axis=0)
            while num_close > 0:
                token = tl.min(tl.where(is_close, token_ids, NO_ID), axis=0)
                x = _scaled(tl.load(line_ptr + token), largest, temperature)
                score = exact_score(x, key, token)
                best_token = tl.where(score > best_score, token, best_token)
                best_score = tl.maximum(score, best_score)
                is_close = is_close & (token_ids != token)
                num_close -= 1
    return best_token


@triton.jit
def _write_token(line, token, token_ptr, token_ids_ptr, row_ptr, position_ptr, ids_stride, max_len):  # type: ignore[no-untyped-def]
    tl.store(token_ptr + line, token)
    position = tl.load(position_ptr + line)
    at = token_ids_ptr + tl.load(row_ptr + line) * ids_stride + position
    tl.store(at, token, mask=position < max_len)


@triton.jit  # type: ignore[untyped-decorator]
def race_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr,
    stream_ptr, position_ptr, temperature_ptr, log_min_p_ptr, cutoff_ptr,
    scores_ptr,  # [R, T, 2]: the best coarse score of a tile and the second
    leaders_ptr,  # [R, T]: the token that has the best, the lowest of equal ones
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + line)
    if temperature == 0.0:
        return
    largest = _largest_of_line(tile_largest_ptr, line, NUM_TILES, BLOCK_TILES)
    if not _is_finite(largest):
        return
    place = line * NUM_TILES + tile
    left = _lowest_left(line, log_min_p_ptr, cutoff_ptr, largest, temperature)
    left = tl.maximum(left, _LOWEST_X)
    if _scaled(tl.load(tile_largest_ptr + place), largest, temperature) < left:
        tl.store(scores_ptr + place * 2, _NEVER)
        tl.store(scores_ptr + place * 2 + 1, _NEVER)
        return
    key = row_key(tl.load(stream_ptr + line), tl.load(position_ptr + line))
    token_ids = tile * TILE + tl.arange(0, TILE)
    scores = _coarse_scores(
        logits_ptr + line * stride, token_ids, key, largest, temperature, left, _NEVER, V
    )
    best = tl.max(scores, axis=0)
    leader = tl.min(tl.where(scores == best, token_ids, NO_ID), axis=0)
    tl.store(scores_ptr + place * 2, best)
    second = tl.max(tl.where(token_ids == leader, _NEVER, scores), axis=0)
    tl.store(scores_ptr + place * 2 + 1, second)
    tl.store(leaders_ptr + place, leader)


@triton.jit  # type: ignore[untyped-decorator]
def settle_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr, tile_token_ptr, raw_largest_ptr,
    stream_ptr, position_ptr, temperature_ptr, log_min_p_ptr, cutoff_ptr,
    scores_ptr, leaders_ptr, token_ptr, token_ids_ptr, row_ptr, state_ptr, ids_stride, max_len,
    too_close,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    in_line = tiles < NUM_TILES
    places = line * NUM_TILES + tiles
    of_tiles = tl.load(tile_largest_ptr + places, in_line, other=float("-inf"))
    largest = tl.max(of_tiles, axis=0)
    best = tl.where((of_tiles == largest) & in_line, tiles, NO_ID)
    token = tl.load(tile_token_ptr + line * NUM_TILES + tl.min(best, axis=0))
    is_broken = not _is_finite(_largest_of_line(raw_largest_ptr, line, NUM_TILES, BLOCK_TILES))
    state = tl.where(is_broken, 1, tl.where(_is_finite(largest), 0, 2))
    tl.store(state_ptr + line, state)
    temperature = tl.load(temperature_ptr + line)
    if state != 0:
        token = token * 0
    elif temperature > 0.0:
        leads = tl.load(scores_ptr + places * 2, in_line, other=float("-inf"))
        seconds = tl.load(scores_ptr + places * 2 + 1, in_line, other=float("-inf"))
        lead = tl.max(leads, axis=0)
        floor = lead - too_close
        leading_tile = tl.min(tl.where(leads == lead, tiles, NO_ID), axis=0)
        token = tl.load(leaders_ptr + line * NUM_TILES + leading_tile)
        num_close = tl.sum((leads >= floor).to(tl.int32) + (seconds >= floor), axis=0)
        if num_close > 1:
            key = row_key(tl.load(stream_ptr + line), tl.load(position_ptr + line))
            left = _lowest_left(line, log_min_p_ptr, cutoff_ptr, largest, temperature)
            token = _exact_winner(
                logits_ptr + line * stride, tile_largest_ptr + line * NUM_TILES,
                key, largest, temperature, tl.maximum(left, _LOWEST_X), largest + _NEVER, floor,
                V, TILE, NUM_TILES,
            )  # fmt: skip
    _write_token(line, token, token_ptr, token_ids_ptr, row_ptr, position_ptr, ids_stride, max_len)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(line_ptr, token_ids, largest, temperature, left, won, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the tokens that are left weigh, and those of them above x = `won`."""
    x = _scaled(load_logits(line_ptr, token_ids, V), largest, temperature)
    weight = tl.floor(tl.exp(tl.where(x >= left, x, _NEVER)) * _WEIGHT_UNITS).to(tl.int64)
    return tl.sum(weight, axis=0), tl.sum(tl.where(x > won, weight, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def weigh_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr,
    stream_ptr, position_ptr, temperature_ptr, log_min_p_ptr, cutoff_ptr,
    top_p_ptr, token_ptr, state_ptr,
    masses_ptr,  # [R, T, 2]: what a tile's tokens that are left weigh, and those above the winner
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + line)
    if (temperature == 0.0) | (tl.load(top_p_ptr + line) >= 1.0) | (tl.load(state_ptr + line) != 0):
        return
    largest = _largest_of_line(tile_largest_ptr, line, NUM_TILES, BLOCK_TILES)
    left = _lowest_left(line, log_min_p_ptr, cutoff_ptr, largest, temperature)
    place = (line * NUM_TILES + tile) * 2
    upper = _scaled(tl.load(tile_largest_ptr + line * NUM_TILES + tile), largest, temperature)
    if upper < tl.maximum(left, _WEIGHTLESS_X):
        tl.store(masses_ptr + place, 0)
        tl.store(masses_ptr + place + 1, 0)
        return
    line_ptr = logits_ptr + line * stride
    won = _scaled(tl.load(line_ptr + tl.load(token_ptr + line)), largest, temperature)
    token_ids = tile * TILE + tl.arange(0, TILE)
    total, above = _weights(line_ptr, token_ids, largest, temperature, left, won, V)
    tl.store(masses_ptr + place, total)
    tl.store(masses_ptr + place + 1, above)


@triton.jit  # type: ignore[untyped-decorator]
def finish_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr,
    stream_ptr, position_ptr, temperature_ptr, log_min_p_ptr, cutoff_ptr,
    top_p_ptr, masses_ptr, token_ptr, token_ids_ptr, row_ptr, state_ptr, ids_stride, max_len,
    too_close,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + line)
    top_p = tl.load(top_p_ptr + line)
    if (temperature == 0.0) | (top_p >= 1.0) | (tl.load(state_ptr + line) != 0):
        return
    tiles = tl.arange(0, BLOCK_TILES)
    places = (line * NUM_TILES + tiles) * 2
    in_line = tiles < NUM_TILES
    total = tl.sum(tl.load(masses_ptr + places, in_line, other=0), axis=0)
    above = tl.sum(tl.load(masses_ptr + places + 1, in_line, other=0), axis=0)
    limit = top_p * total.to(tl.float64)
    if above.to(tl.float64) < limit:
        return
    largest = _largest_of_line(tile_largest_ptr, line, NUM_TILES, BLOCK_TILES)
    left = _lowest_left(line, log_min_p_ptr, cutoff_ptr, largest, temperature)
    left = tl.maximum(left, _LOWEST_X)
    line_ptr = logits_ptr + line * stride
    key = row_key(tl.load(stream_ptr + line), tl.load(position_ptr + line))
    token = tl.load(token_ptr + line)
    tiles_ptr = tile_largest_ptr + line * NUM_TILES
    while above.to(tl.float64) >= limit:
        beaten = tl.load(line_ptr + token)
        won = _scaled(beaten, largest, temperature)
        lead = won * 0.0 + _NEVER
        for tile in range(NUM_TILES):
            if tl.load(tiles_ptr + tile) > beaten:
                token_ids = tile * TILE + tl.arange(0, TILE)
                scores = _coarse_scores(
                    line_ptr, token_ids, key, largest, temperature, left, won, V
                )
                lead = tl.maximum(lead, tl.max(scores, axis=0))
        token = _exact_winner(
            line_ptr, tiles_ptr, key, largest, temperature, left, beaten, lead - too_close,
            V, TILE, NUM_TILES,
        )  # fmt: skip
        beaten = tl.load(line_ptr + token)
        won = _scaled(beaten, largest, temperature)
        above = above * 0
        for tile in range(NUM_TILES):
            if tl.load(tiles_ptr + tile) > beaten:
                token_ids = tile * TILE + tl.arange(0, TILE)
                _, of_tile = _weights(line_ptr, token_ids, largest, temperature, left, won, V)
                above += of_tile
    _write_token(line, token, token_ptr, token_ids_ptr, row_ptr, position_ptr, ids_stride, max_len)
