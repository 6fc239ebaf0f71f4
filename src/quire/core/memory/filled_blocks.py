"""Publishes the blocks that decoding rows fill, many at a time.

Each decoding row fills a block every block_size steps, so in a large batch many rows fill one in
the same step. These blocks are inserted into the prefix cache in one pass. `prefix_index`
publishes the remaining blocks, and explains publishing.
"""

from typing import NamedTuple

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.growth import Growth
from quire.core.memory.hash_chain import hash_block
from quire.core.memory.packed_tokens import pack_tokens
from quire.core.memory.prefix_index import PrefixIndex
from quire.core.sequence import Sequence


class _FilledBlock(NamedTuple):
    """A block of a sequence that is full now."""

    sequence: Sequence
    #: Its place in the sequence, and its number in the pool.
    place: int
    block: int
    digest: bytes
    #: The digest of the block before it.
    parent: bytes


class FilledBlocks:
    """Does the same as calls of `PrefixIndex.publish` for the sequences in their order."""

    def __init__(self, prefixes: PrefixIndex, pool: BlockPool, growth: Growth) -> None:
        self._prefixes = prefixes
        self._cache = prefixes.cache
        self._pool = pool
        #: The only KV group of the model, if it keeps all tokens. None for a model with several
        #: groups, whose contents tiers store in the order of the sequences.
        self._group = growth.main if len(growth.rules) == 1 and not growth.bounded else None

    def publish(self, sequences: list[Sequence]) -> None:
        """Publish the confirmed tokens of each of these sequences, in this order."""
        filled: dict[bytes, _FilledBlock] = {}
        for sequence in sequences:
            block = self._filled_block(sequence)
            if block is not None and block.digest not in filled:
                filled[block.digest] = block
                continue
            self._insert_filled(filled)
            filled.clear()
            self._prefixes.publish(sequence, sequence.num_confirmed_tokens)
        self._insert_filled(filled)

    def _filled_block(self, sequence: Sequence) -> _FilledBlock | None:
        """The one block that the sequence has filled, if it has a new content after another full
        block, and publishing it changes nothing else. None if `PrefixIndex` must publish it."""
        size, chain, spans = self._cache.block_size, sequence.chain, sequence.content_spans
        place = sequence.num_confirmed_tokens // size - 1
        if (
            self._group is None
            or not self._prefixes.enabled
            or place < max(1, sequence.num_registered_blocks)
            or place != sequence.num_published_blocks
            or (spans and spans[-1].end > place * size)
        ):
            return None
        if len(chain) == place:
            packed = pack_tokens(sequence.token_ids[place * size : (place + 1) * size])
            chain.append(hash_block(chain[-1], packed))
            sequence.chain_tokens.append(packed)
        block, digest = sequence.block_tables[self._group][place], chain[place]
        has_content = self._pool.content[block] is not None
        if has_content or self._cache.find(self._group, digest) is not None:
            return None
        return _FilledBlock(sequence, place, block, digest, chain[place - 1])

    def _insert_filled(self, filled: dict[bytes, _FilledBlock]) -> None:
        """Publish these blocks, by digest."""
        if not filled or self._group is None:
            return
        digests = list(filled)
        tokens = [block.sequence.chain_tokens[block.place] for block in filled.values()]
        parents = [block.parent for block in filled.values()]
        blocks = [block.block for block in filled.values()]
        self._cache.insert(self._group, digests, blocks, tokens, parents)
        found = list(zip(blocks, digests, strict=True))
        self._pool.set_contents(self._group, found, is_run=False)
        for block in filled.values():
            block.sequence.num_published_blocks = block.place + 1
