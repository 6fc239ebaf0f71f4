"""Which full blocks of tokens are in memory: a keyed hash chain over contents.

The hash of a block covers its parent's hash and its own tokens, so equal hashes mean equal
prefixes. The chain's root is keyed with the installation's secret and the cache domain: a tenant
can neither hit another's blocks nor predict their hashes. Knows no sequences; used by
`kv_cache_manager` alone.
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


class PrefixCache:
    """Content hash -> block, by KV group.

    Invariant, kept together with the block pool by the manager: `find(group, digest) == block` if
    and only if `pool.content[block] == (group, digest)`.
    """

    def __init__(self, num_groups: int, block_size: int, secret: bytes) -> None:
        self.block_size = block_size
        self._secret = secret
        self._blocks: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks)

    def root(self, domain: str, extra: bytes = b"") -> bytes:
        """The hash that a chain of `domain` starts from.

        extra: whatever else determines the content of all blocks (an adapter's digest).
        """
        named = len(domain).to_bytes(8, "little") + domain.encode() + extra
        return hashlib.blake2b(named, key=self._secret, digest_size=DIGEST_BYTES).digest()

    def extend_chain(self, chain: list[bytes], root: bytes, token_ids: Sequence[int]) -> None:
        """Append the hashes of the full blocks of `token_ids` that `chain` does not have yet."""
        size = self.block_size
        first = len(chain) * size
        data = array("I", token_ids[first : len(token_ids) // size * size]).tobytes()
        parent = chain[-1] if chain else root
        blake2b = hashlib.blake2b
        for start in range(0, len(data), 4 * size):
            block = data[start : start + 4 * size]
            parent = blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
            chain.append(parent)

    def find(self, group: int, digest: bytes) -> int | None:
        """The block with this content, or None."""
        return self._blocks[group].get(digest)

    def insert(self, group: int, digest: bytes, block: int) -> None:
        """Make a block findable; the caller has checked that its content is not yet known."""
        self._blocks[group][digest] = block

    def remove(self, group: int, digest: bytes) -> None:
        """Forget a content."""
        del self._blocks[group][digest]

    def entries(self, group: int) -> dict[bytes, int]:
        """A copy of one group's map, for checks."""
        return dict(self._blocks[group])
