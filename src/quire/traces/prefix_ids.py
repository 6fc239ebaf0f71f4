"""Numbers the blocks of prompts and answers; the numbers reveal only which blocks are equal.

The BLAKE2b digest of a block covers its tokens and all earlier ones, under a random key that is
never written. Digests are numbered in the order of their first occurrence, and only these numbers
leave the object. So a number reveals no tokens, and nobody can use it to test a guess of the
tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.traces.partial_block_overlap import PartialBlockOverlap

#: The maximum number of different blocks; this many take about 700 MB of memory.
MAX_BLOCKS = 4_000_000

_DIGEST_BYTES = 16
_NO_REQUEST = -1


class BlockNumbers(NamedTuple):
    """The numbers of one request's blocks."""

    #: The number given to each full block of the prompt.
    prefix_ids: tuple[int, ...]
    #: For each answer, the numbers given to the blocks that it fills. The first of these blocks may
    #: begin with tokens of the prompt.
    output_ids: tuple[tuple[int, ...], ...]
    #: The latest request whose answer filled a block of this prompt; None if there is none.
    parent: int | None
    #: The time in ms at which the parent ended.
    parent_ended_ms: int = 0


class PrefixIds:
    """The block numbers of one recording. Only one thread may use it at a time.

    Invariant: each digest has its own number, and numbers ascend from 0.
    """

    def __init__(self, block_tokens: int, max_blocks: int = MAX_BLOCKS) -> None:
        """block_tokens: at least 1."""
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._ids: dict[bytes, int] = {}
        # By block number: the latest request whose answer filled the block, and its end in ms.
        self._owners, self._ended_ms = array("q"), array("q")
        #: Means of the tokens that prompts share after their last common block.
        self.overlap = PartialBlockOverlap(block_tokens)

    @property
    def is_full(self) -> bool:
        """True if the limit of blocks is reached; then no further request should be added."""
        return len(self._ids) >= self._max_blocks

    def add(
        self,
        number: int,
        domain: str,
        prompt: Sequence[int],
        outputs: Sequence[Sequence[int]],
        ended_ms: int = 0,
        contents: Iterable[tuple[int, int, str]] = (),
    ) -> BlockNumbers:
        """Assign numbers to the blocks of request `number`, which ended at `ended_ms`.

        Requests of different domains share no prefixes, so their blocks have no number in common.
        contents: the first position, length and digest of each span of the prompt that is not
        tokens.
        """
        prompt = list(prompt)
        for first, count, digest in contents:
            # Negative numbers name a content's positions, from a random one of 62 bits on.
            name = -1 - int.from_bytes(self._digest(digest.encode(), b"content")[:8]) // 4
            prompt[first : first + count] = range(name, name - count, -1)
        # First, number the prompt's blocks; find the last block that an earlier request has, and
        # the parent.
        size = self._block_tokens
        chain = self._digest(domain.encode("utf-8", "surrogatepass"), b"")
        num_known, parent, parent_ended_ms = len(self._ids), None, 0
        last_known, rest, is_answer = chain, prompt[:size], False
        found: list[int] = []
        for begin in range(0, len(prompt) - size + 1, size):
            chain = self._digest(_bytes(prompt[begin : begin + size]), chain)
            block_id = self._number(chain)
            found.append(block_id)
            if block_id < num_known:
                last_known, rest = chain, prompt[begin + size : begin + 2 * size]
                is_answer = self._owners[block_id] != _NO_REQUEST
                if is_answer:
                    parent, parent_ended_ms = self._owners[block_id], self._ended_ms[block_id]
        self.overlap.compare(last_known, rest, is_answer=is_answer)
        # Then, number the blocks that each answer fills after the prompt's last full block.
        tail = prompt[len(found) * size :]
        answers: list[tuple[int, ...]] = []
        for index, output in enumerate(outputs):
            last, filled, behind = self._add_output(number, ended_ms, chain, [*tail, *output])
            answers.append(filled)
            if not index:
                self.overlap.record_end(last, behind, is_answer=bool(filled))
        return BlockNumbers(tuple(found), tuple(answers), parent, parent_ended_ms)

    def forget(self) -> None:
        """Delete the key, the digests and all tokens. Afterwards no request can be added."""
        self._key = b""
        self._ids.clear()
        self.overlap.forget()

    def _add_output(
        self, number: int, ended_ms: int, chain: bytes, tokens: Sequence[int]
    ) -> tuple[bytes, tuple[int, ...], Sequence[int]]:
        """Number the blocks of `tokens`, the tokens of prompt and answer that follow the prompt's
        last full block. `chain` is that block's digest.

        Returns the digest of the last full block, the numbers of the blocks that the answer
        filled, and the remaining tokens.
        """
        size, found = self._block_tokens, []
        for begin in range(0, len(tokens) - size + 1, size):
            chain = self._digest(_bytes(tokens[begin : begin + size]), chain)
            block_id = self._number(chain)
            self._owners[block_id], self._ended_ms[block_id] = number, ended_ms
            found.append(block_id)
        return chain, tuple(found), tokens[len(found) * size :]

    def _number(self, digest: bytes) -> int:
        found = self._ids.setdefault(digest, len(self._owners))
        if found == len(self._owners):
            self._owners.append(_NO_REQUEST)
            self._ended_ms.append(0)
        return found

    def _digest(self, data: bytes, parent: bytes) -> bytes:
        return hashlib.blake2b(parent + data, key=self._key, digest_size=_DIGEST_BYTES).digest()


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
