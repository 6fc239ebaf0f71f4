"""Greedy choice and sampling from logits without sorting, in Triton.

Serves temperature, top_k, min_p and top_p. The filters and the noise are defined in
`sampling/host/choice.py`, which is the reference. With x = (logit - largest) / temperature, rounded
as in the reference, these kernels run after `scan_logits`:

    race    finds the two best coarse scores x + gumbel, in fp32, of each tile's tokens that top_k
            and min_p keep
    choose  takes the best score of all tiles; scores that are closer than the coarse error, which
            occur in two lines of ten thousand, are computed exactly
    weigh   top_p: sums the weights of all tokens and of those above the winner, in whole units, so
            that sums are exact
    finish  top_p: if the winner is outside of the nucleus, so are all tokens not above it; the
            tokens above race again, in one program a line, until the winner is inside

The launches do not depend on results, so the host waits for nothing: `choose_kernel` and
`finish_kernel` loop on the device. Each winner outside the nucleus removes half of the weight
outside, on average.

Bound by instructions: the race has about 140 instructions a token as compiled for sm_90, half of
them for the hash and the two logarithms; tiles without a possible winner are skipped. An estimate
for R = 256, V = 152k on an H200 (132 SMs of 128 lanes, 4.3 TB/s): the race takes 0.2 ms, each other
pass over the logits 0.04 ms.

Shapes: R lines, V tokens, T tiles; logits fp32. The bits of a line's result depend only on that
line. Called by `sampling/device/sampler.py`.
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

#: States of a line: a token was chosen; the raw logits are not finite; every token is forbidden.
SAMPLED, BROKEN, EMPTY = 0, 1, 2

# A token with a lower x cannot win: the noise lies between -3.7 and 36.8.
_LOWEST_X = tl.constexpr(-41.0)
# The number of units in the weight of the likeliest token, as in `choice.py`.
_WEIGHT_UNITS = tl.constexpr(2.0**32)
# Tokens with a lower x weigh less than half a unit, however the exponential is rounded.
_WEIGHTLESS_X = tl.constexpr(-22.9)
_NEVER = tl.constexpr(float("-inf"))

#: Coarse scores that differ by at most this may be in the wrong order.
TOO_CLOSE = 2 * COARSE_ERROR


@dataclass(frozen=True, slots=True)
class Draws:
    """The sampling options of R lines, [R] each, on the device; see `sampling.host.choice.Draw`."""

    #: The row's stream of noise, int64; positions are not part of it.
    stream: torch.Tensor
    #: fp32; 0 chooses the largest logit.
    temperature: torch.Tensor
    #: The natural logarithm of min_p, fp32.
    log_min_p: torch.Tensor
    #: int32; 0 keeps all tokens.
    top_k: torch.Tensor
    #: fp64; 1 keeps all tokens.
    top_p: torch.Tensor
    #: Whether any line has a temperature above 0; without one, the race is not launched.
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tensors that the results for R lines are written to."""

    #: The chosen tokens, [R] int32; a line that is BROKEN or EMPTY has 0.
    token: torch.Tensor
    #: SAMPLED, BROKEN or EMPTY, [R] int32.
    state: torch.Tensor
    #: The tokens of all rows, [N, L] int32; line r's token is also written to
    #: token_ids[row[r], position[r]], unless the position is L or more.
    token_ids: torch.Tensor
    #: Each line's row of token_ids, [R] int64.
    row: torch.Tensor
    #: Each line's position in its row, which also selects the noise, [R] int64.
    position: torch.Tensor


class Workspace:
    """Tensors that the kernels of one call pass to each other, for at most `num_lines` lines."""

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
    """Choose a token for each line of logits [R, V] and write it into `outcome`.

    `scan` is the scan of these logits, and `raw_scan` of the logits before options edited them.
    """
    check_logits(logits)
    (num_lines, vocab_size), num_tiles = logits.shape, scan.tile_largest.shape[1]
    # First, find the smallest logit that top_k keeps. Without top_k, the cutoffs stay -inf.
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
    # Then choose a token as if no line had top_p.
    if draws.any_sampled:
        race_kernel[(num_tiles, num_lines)](
            *line,
            *options,
            workspace.scores,
            workspace.leaders,
            **sizes,
            num_warps=8,
            enable_fp_fusion=True,
        )
    choose_kernel[(num_lines,)](
        *(*line, scan.tile_token, raw_scan.tile_largest, *options),
        *(workspace.scores, workspace.leaders, *written, outcome.state, *lengths),
        too_close,
        **sizes,
        num_warps=8,
        enable_fp_fusion=True,
    )
    # Last, choose again for the lines whose token is outside of the nucleus.
    if draws.any_top_p:
        weigh_kernel[(num_tiles, num_lines)](
            *(*line, *options, draws.top_p, outcome.token, outcome.state, workspace.masses),
            **sizes,
            num_warps=4,
            enable_fp_fusion=True,
        )
        finish_kernel[(num_lines,)](
            *(*line, *options, draws.top_p, workspace.masses, *written, outcome.state, *lengths),
            too_close,
            **sizes,
            num_warps=16,
            enable_fp_fusion=True,
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
    """The lowest x that min_p and top_k keep."""
    last = _scaled(tl.load(cutoff_ptr + line), largest, temperature)
    return tl.maximum(last, tl.load(log_min_p_ptr + line))


@triton.jit  # type: ignore[untyped-decorator]
def _coarse_scores(line_ptr, token_ids, key, largest, temperature, left, won, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Coarse scores of tokens; -inf for those with x below `left` or not above `won`."""
    x = _scaled(load_logits(line_ptr, token_ids, V), largest, temperature)
    return tl.where((x >= left) & (x > won), x + coarse_gumbel(key, token_ids), _NEVER)


@triton.jit  # type: ignore[untyped-decorator]
def _exact_winner(  # type: ignore[no-untyped-def]
    line_ptr, tiles_ptr, key, largest, temperature, left, beaten, floor,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """The token with the best exact score, or the lowest of several with the same score.

    Only tokens with logits above `beaten` and coarse scores of at least `floor` are compared.
    `tiles_ptr` points to the largest logits of the line's tiles.
    """
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
    scores_ptr,  # [R, T, 2]: the best and the second best coarse score of a tile
    leaders_ptr,  # [R, T]: the token with the best score, the lowest if there are several
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
    # Skip a tile in which no token can win.
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
def choose_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr, tile_token_ptr, raw_largest_ptr,
    stream_ptr, position_ptr, temperature_ptr, log_min_p_ptr, cutoff_ptr,
    scores_ptr, leaders_ptr, token_ptr, token_ids_ptr, row_ptr, state_ptr, ids_stride, max_len,
    too_close,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    # First, find the line's largest logit, its token and the line's state.
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
        # Then take the best score of all tiles, or compute exactly those that are too close to it.
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
    """Weights of the tokens with x of at least `left`: the sum of all, and of those above `won`."""
    x = _scaled(load_logits(line_ptr, token_ids, V), largest, temperature)
    weight = tl.floor(tl.exp(tl.where(x >= left, x, _NEVER)) * _WEIGHT_UNITS).to(tl.int64)
    return tl.sum(weight, axis=0), tl.sum(tl.where(x > won, weight, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def weigh_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tile_largest_ptr,
    stream_ptr, position_ptr, temperature_ptr, log_min_p_ptr, cutoff_ptr,
    top_p_ptr, token_ptr, state_ptr,
    masses_ptr,  # [R, T, 2]: sums of weights in a tile, of all tokens left and of those that beat
    # the winner
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
    # First, keep the winner if the tokens above it weigh less than top_p of all.
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
        # Then let the tokens above the last winner race, first by their coarse scores.
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
        # Last, weigh the tokens above the new winner.
        beaten = tl.load(line_ptr + token)
        won = _scaled(beaten, largest, temperature)
        above = above * 0
        for tile in range(NUM_TILES):
            if tl.load(tiles_ptr + tile) > beaten:
                token_ids = tile * TILE + tl.arange(0, TILE)
                _, of_tile = _weights(line_ptr, token_ids, largest, temperature, left, won, V)
                above += of_tile
    _write_token(line, token, token_ptr, token_ids_ptr, row_ptr, position_ptr, ids_stride, max_len)
