"""Numbers blocks of prompts and answers so that only their equality can be told.

Each block has a BLAKE2b digest of its tokens and of all before them, under a random key that exists
in this object alone; what is given out are whole numbers in the order in which the digests were
first seen. Without the key, which is never written, a number tells nothing of the tokens: neither
what they are, nor whether a guess is right.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from quire.traces.shared_tails import SharedTails

MAX_BLOCKS = 4_000_000
"""Different blocks that are told apart: about 700 MB."""

_DIGEST_BYTES = 16
_NO_REQUEST = -1


class BlockNumbers(NamedTuple):
    """Of one request. output_ids: for each answer, of the blocks that it fills, the first of which
    may begin with tokens of the prompt. parent: the latest request whose answer filled a block of
    this prompt; parent_ended_ms: when it ended."""

    prefix_ids: tuple[int, ...]
    output_ids: tuple[tuple[int, ...], ...]
    parent: int | None
    parent_ended_ms: int = 0


class PrefixIds:
    """Requests of one recording. Not for several threads at once.

    tails: means of what prompts share beside whole blocks.

    Invariant: a number is given to one digest only, and numbers are given in order from 0 on.
    """

    def __init__(self, block_tokens: int, max_blocks: int = MAX_BLOCKS) -> None:
        """block_tokens: at least 1."""
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._ids: dict[bytes, int] = {}
        # By number: the latest request whose answer filled the block, and when it ended.
        self._owners, self._ended_ms = array("q"), array("q")
        self.tails = SharedTails(block_tokens)

    @property
    def is_full(self) -> bool:
        """Whether there are so many blocks that no more should come."""
        return len(self._ids) >= self._max_blocks

    def add(
        self,
        number: int,
        domain: str,
        prompt: Sequence[int],
        outputs: Sequence[Sequence[int]],
        ended_ms: int = 0,
    ) -> BlockNumbers:
        """Number a request's blocks. number: of the request. domain: what else determines whether
        two requests share prefixes; those of different domains have no number in common. ended_ms:
        when it ended."""
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
        self.tails.compare(last_known, rest, is_answer=is_answer)
        tail = prompt[len(found) * size :]
        answers: list[tuple[int, ...]] = []
        for index, output in enumerate(outputs):
            last, filled, behind = self._add_output(number, ended_ms, chain, [*tail, *output])
            answers.append(filled)
            if not index:
                self.tails.note_end(last, behind, is_answer=bool(filled))
        return BlockNumbers(tuple(found), tuple(answers), parent, parent_ended_ms)

    def forget(self) -> None:
        """Throw the key away, and all that was seen. Nothing can be added any more."""
        self._key = b""
        self._ids.clear()
        self.tails.forget()

    def _add_output(
        self, number: int, ended_ms: int, chain: bytes, tokens: Sequence[int]
    ) -> tuple[bytes, tuple[int, ...], Sequence[int]]:
        """tokens: of prompt and answer, behind the prompt's last whole block. Returns the digest of
        the last whole block, the numbers of those that the answer filled, and what is behind."""
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
