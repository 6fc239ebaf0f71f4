"""Chooses the next token: the best, or a sample by top_k/top_p/min_p.

A sample is the argmax of logit / temperature + Gumbel noise over the tokens that the options keep.
This draws each token with its softmax probability (Gumbel 1954; Maddison, Tarlow and Minka,
arXiv:1411.0030). Two methods make it cheap without changing the result:

- *The race.* Exact noise is needed only for tokens that can win. With x = logit / temperature
  and u the token's uniform, the score is log(exp(x) / e) with e = -log(1 - u) >= u. So log(exp(x) /
  u) is an upper bound of the score, and a token whose bound is below another token's score can't
  win. Only one or two tokens remain, for which the exact noise is computed.
- *No sorting for top_p.* A token belongs to the nucleus if the more likely tokens together have
  less probability than top_p. First, all tokens race. If the winner is outside the nucleus, so are
  all tokens that are not more likely than the winner: they are dropped, and the remaining tokens
  race again.

The options keep these tokens, in this order, after the temperature:

    min_p   tokens at least min_p times as likely as the most likely token
    top_k   tokens at least as likely as the k-th; more than k tokens if some tie with the k-th
    top_p   of these, tokens for which all more likely tokens together have less than top_p: the
            smallest set that reaches top_p, and ties with its last token. Probabilities are counted
            in units of 2**-32 of the largest, so their sums are exact in any order.

The most likely token is always kept. Equally likely tokens are kept or dropped together, so the
result does not depend on any order. The sampler calls this for logits in main memory if there is no
native library.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.sampling.host import noise

Int64s = npt.NDArray[np.int64]
NEVER = float("-inf")

# Number of tokens that top_k examines in addition to k, to see whether more tokens tie with the
# k-th.
TIE_ROOM = 8

# The race's bound is computed in fp32, with a relative error below 1e-6.
RACE_MARGIN = 1e-5

# Number of elements that race at a time, so that temporaries stay in the processor's caches. For
# [16, 151936] on one thread of an AMD EPYC with 1 MiB of L2 per core, this takes 16 ms, and one
# race of all elements 26 ms.
BLOCK_ELEMENTS = 1 << 18

# Integers of up to 2**32 for each token sum exactly in fp64 over a vocabulary of up to 2**21.
WEIGHT_UNITS = 2.0**32

# Smaller temperatures have the same effect as this one: no two different logits of fp32 models are
# closer.
MIN_TEMPERATURE = 2.0**-100


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling options of n rows; all arrays are [n]."""

    #: The key of the noise at each row's position.
    keys: npt.NDArray[np.uint64]
    #: At least MIN_TEMPERATURE.
    temperature: npt.NDArray[np.float32]
    #: The natural logarithm of min_p; -inf means no limit.
    log_min_p: npt.NDArray[np.float32]
    #: 0 means no limit.
    top_k: Int64s
    #: 1 means no limit.
    top_p: npt.NDArray[np.float64]

    def take(self, index: Int64s | slice) -> "Draw":
        """The options of some of the rows."""
        return Draw(
            self.keys[index],
            self.temperature[index],
            self.log_min_p[index],
            self.top_k[index],
            self.top_p[index],
        )


def first_argmax(values: torch.Tensor) -> Int64s:
    """The lowest index of the largest value in each line of [n, W]; a NaN counts as the largest."""
    index: Int64s = values.numpy().argmax(axis=1)  # 10 times as fast as torch's
    return index


def sample(logits: torch.Tensor, largest: torch.Tensor, draw: Draw) -> Int64s:
    """Token ids [n] sampled from logits [n, V] fp32, which are overwritten.

    `largest` [n] is the largest logit of each line, which is finite.
    """
    x = logits.sub_(largest.unsqueeze(1)).div_(_column(draw.temperature))
    if (draw.log_min_p > NEVER).any():
        x.masked_fill_(x < _column(draw.log_min_p), NEVER)
    limited = np.flatnonzero(draw.top_k)
    if len(limited) == 0:
        return _race_all(x, draw)
    token_ids = np.empty(len(draw.keys), dtype=np.int64)
    token_ids[limited] = _sample_top_k(_lines(x, limited), draw.take(limited))
    others = np.flatnonzero(draw.top_k == 0)
    if len(others):
        token_ids[others] = _race_all(_lines(x, others), draw.take(others))
    return token_ids


def _sample_top_k(x: torch.Tensor, draw: Draw) -> Int64s:
    """Like `sample`, for scaled logits of rows that all have a top_k."""
    vocab_size = x.shape[1]
    width = min(vocab_size, int(draw.top_k.max()) + TIE_ROOM)
    best, token_ids = x.topk(width, dim=1)
    last = torch.from_numpy(np.minimum(draw.top_k, vocab_size) - 1).unsqueeze(1)
    cutoff = best.gather(1, last)
    best.masked_fill_(best < cutoff, NEVER)
    chosen = _race(best, token_ids, noise.token_counters(token_ids), draw)
    # If more tokens tie with the k-th than `best` has, the row races with its whole vocabulary.
    if width < vocab_size:
        ties_beyond = (best[:, -1:] == cutoff).logical_and_(cutoff > NEVER)
        spilled = np.flatnonzero(ties_beyond.squeeze(1).numpy())
        if len(spilled):
            whole = _lines(x, spilled)
            whole.masked_fill_(whole < _lines(cutoff, spilled), NEVER)
            chosen[spilled] = _race_all(whole, draw.take(spilled))
    return chosen


def _race_all(x: torch.Tensor, draw: Draw) -> Int64s:
    """Like `_race`, over the whole vocabulary, in blocks of rows."""
    num_lines, vocab_size = x.shape
    counters = noise.vocabulary_counters(vocab_size)
    lines_at_once = max(1, BLOCK_ELEMENTS // vocab_size)
    token_ids = np.empty(num_lines, dtype=np.int64)
    for start in range(0, num_lines, lines_at_once):
        block = slice(start, start + lines_at_once)
        token_ids[block] = _race(x[block], None, counters, draw.take(block))
    return token_ids


def _race(
    x: torch.Tensor, token_ids: torch.Tensor | None, counters: torch.Tensor, draw: Draw
) -> Int64s:
    """The winning token of each row, among tokens with x > -inf that top_p keeps.

    `x` [n, W] is at most 0, and 0 at the most likely token. `token_ids` [n, W] are the tokens of
    the columns; None if a column's index is its token.
    """
    weights = x.exp()
    bound = weights / noise.coarse_uniforms(draw.keys, counters)
    field = _Field(x, bound, token_ids, draw.keys)
    columns = field.winners()
    limited = np.flatnonzero(draw.top_p < 1.0)
    if len(limited):
        mass = _lines(weights, limited).mul_(WEIGHT_UNITS).floor_().double()
        limit = torch.from_numpy(draw.top_p[limited]) * mass.sum(dim=1)
        columns[limited] = _winners_in_nucleus(field.take(limited), mass, limit, columns[limited])
    return field.tokens_at(columns)


def _winners_in_nucleus(
    field: "_Field", mass: torch.Tensor, limit: torch.Tensor, columns: Int64s
) -> Int64s:
    """Replace winners (columns [n]) outside the nucleus, race by race.

    `mass` [n, W] has whole numbers. A token is in the nucleus if the total mass of more likely
    tokens is below `limit` [n].
    """
    columns = columns.copy()
    racing = np.arange(len(columns))
    while True:
        won = field.at(columns[racing])
        above = torch.where(field.x > won, mass, 0.0).sum(dim=1)
        outside = np.flatnonzero((above >= limit).numpy())
        if len(outside) == 0:
            return columns
        racing, won = racing[outside], _lines(won, outside)
        field, mass, limit = field.take(outside), _lines(mass, outside), _lines(limit, outside)
        field.bound.masked_fill_(field.x <= won, 0.0)
        columns[racing] = field.winners()


@dataclass(frozen=True, slots=True)
class _Field:
    """The tokens that compete in n races."""

    #: [n, W]: logits divided by the temperature.
    x: torch.Tensor
    #: [n, W]: exp(x) / (uniform * 2**52), or 0 for tokens that were dropped.
    bound: torch.Tensor
    #: [n, W]; None if a column's index is its token.
    token_ids: torch.Tensor | None
    #: [n]: keys of the noise.
    keys: npt.NDArray[np.uint64]

    def take(self, index: Int64s) -> "_Field":
        token_ids = None if self.token_ids is None else _lines(self.token_ids, index)
        return _Field(_lines(self.x, index), _lines(self.bound, index), token_ids, self.keys[index])

    def at(self, columns: Int64s) -> torch.Tensor:
        """The values of `x` in one column of each line, [n, 1]."""
        return self.x.gather(1, torch.from_numpy(columns).unsqueeze(1))

    def tokens_at(self, columns: Int64s) -> Int64s:
        """The token ids in one column of each line, [n]."""
        return self._tokens(np.arange(len(columns)), columns)

    def winners(self) -> Int64s:
        """The column with the best exact score in each line; among equals, the lowest token id."""
        # First, the exact score of the token with the largest bound is a score to beat.
        lead = first_argmax(self.bound)
        lines = np.arange(len(lead))
        uniform = noise.uniforms(self.keys, self._tokens(lines, lead))
        to_beat = np.exp(self._values(lines, lead)) / noise.exponential(uniform)
        floor = (to_beat * ((1.0 - RACE_MARGIN) * 2.0**-noise.UNIFORM_BITS)).astype(np.float32)
        contenders = (self.bound >= _column(floor)).numpy()
        flat = np.flatnonzero(contenders)
        if len(flat) == len(lead):
            return lead
        # Then tokens whose bound reaches that score are compared by their exact scores.
        lines, columns = np.divmod(flat, contenders.shape[1])
        tokens = self._tokens(lines, columns)
        score = self._values(lines, columns) + noise.gumbel(
            noise.uniforms(self.keys[lines], tokens)
        )
        order = np.lexsort((tokens, -score, lines))
        first_of_line = np.searchsorted(lines, np.arange(len(lead)))  # lines ascend
        return columns[order][first_of_line]

    def _values(self, lines: Int64s, columns: Int64s) -> npt.NDArray[np.float64]:
        return _pick(self.x, lines, columns).astype(np.float64)

    def _tokens(self, lines: Int64s, columns: Int64s) -> Int64s:
        return columns if self.token_ids is None else _pick(self.token_ids, lines, columns)


def _pick(values: torch.Tensor, lines: Int64s, columns: Int64s) -> npt.NDArray[Any]:
    """The values at (lines[i], columns[i]) for each i, on the CPU."""
    return values.numpy()[lines, columns]


def _lines(values: torch.Tensor, index: Int64s) -> torch.Tensor:
    """Some lines of `values`; `values` itself, without a copy, if `index` selects all lines."""
    if len(index) == values.shape[0]:
        return values
    return values[torch.from_numpy(index)]


def _column(values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values).unsqueeze(1)
