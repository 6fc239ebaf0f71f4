"""Generates token ids for the prompts of a trace, because a trace holds only block ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigurationError
from quire.traces.trace import Trace, TraceRequest

#: Blocks without an id get keys at or above this number, each used in one prompt only. Block ids
#: are smaller.
_REST = 1 << 62

#: A prompt's first block has no previous block; in place of that block's key it uses this number +
#: tenant.
_FIRST = 1 << 61


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Generates prompts. Each token is a function of the seed, its block's id and its position in
    the block.

    Tokens are drawn from first_token_id to vocab_size - 1, since models give the lowest ids to
    special tokens. Raises ConfigurationError if that range has fewer than 2 ids.
    """

    trace: Trace
    vocab_size: int
    first_token_id: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first_token_id <= self.vocab_size - 2:
            raise ConfigurationError(
                f"first_token_id is {self.first_token_id} and vocab_size {self.vocab_size}; prompts"
                " need at least 2 different tokens, so first_token_id must be between 0 and"
                " vocab_size - 2"
            )

    def prompt(self, number: int) -> list[int]:
        """The num_prompt_tokens token ids of the request with this number in the trace.

        Blocks with equal ids have the same tokens in every prompt. Blocks that follow the same
        block begin with the same `Trace.shared_tail_tokens` tokens. All other tokens of a block
        without an id are drawn for this request alone.
        """
        request = self.trace.requests[number]
        size, tail = self.trace.block_tokens, self.trace.shared_tail_tokens
        keys = block_keys(request, number, size)
        tokens = self._draw(np.repeat(keys, size), np.tile(np.arange(size), len(keys)))
        if tail:
            # The first tokens of a block depend only on the block before it; in the first block,
            # only on the tenant.
            before = np.concatenate(([_FIRST + request.tenant], keys))[:-1]
            heads = self._draw(np.repeat(before, tail), np.tile(np.arange(tail) + size, len(keys)))
            tokens.reshape(-1, size)[:, :tail] = heads.reshape(-1, tail)
        found: list[int] = tokens[: request.num_prompt_tokens].tolist()
        return found

    def _draw(self, keys: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draws a token id for each of T pairs of a block's key and a position in the block, which
        is below 2 x block_tokens. All arrays are int64 [T]."""
        with np.errstate(over="ignore"):
            seed = _mixed(np.full(1, self.seed % 2**64, np.uint64))
            mixed = _mixed(_mixed(keys.astype(np.uint64) ^ seed) + places.astype(np.uint64))
        count = np.uint64(self.vocab_size - self.first_token_id)
        return (mixed % count).astype(np.int64) + self.first_token_id


def block_keys(request: TraceRequest, number: int, block_tokens: int) -> NDArray[np.int64]:
    """The keys of a prompt's blocks, int64 [ceil(num_prompt_tokens / block_tokens)].

    A block's key is its id. A block without an id gets a key that only request `number` has.
    """
    num_blocks = -(-request.num_prompt_tokens // block_tokens)
    num_rest = num_blocks - len(request.prefix_ids)
    rest = _REST + (number << 24) + np.arange(num_rest, dtype=np.int64)
    return np.concatenate((np.array(request.prefix_ids, np.int64), rest))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
