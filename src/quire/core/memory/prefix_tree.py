"""The cached prefixes as a tree whose branches tell how many prompt tokens they have saved.

For the page of the server, which draws it as an icicle. It has neither tokens nor text. Costs a
pass over all cached blocks: 15 ms for 10,000 (Zen 4, 2026).
"""

from heapq import heappop, heappush
from typing import NamedTuple

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.packed_tokens import num_packed

DIGEST_DIGITS = 8
"""Hexadecimal digits of a digest that are shown."""


class PrefixNode(NamedTuple):
    """A run of cached blocks without a branch between them."""

    #: Index of the run before it, or -1 for the beginning of a prompt.
    parent: int
    #: First digits of the digest of its first block.
    name: str
    num_blocks: int
    num_tokens: int
    #: Prompt tokens that its own blocks have saved: their tokens times their uses.
    num_saved_tokens: int
    #: Prompt tokens that the blocks of this run and of all runs after it have saved.
    num_saved_below: int


class _Tree:
    """The cached blocks of the main group: their sizes, uses and children."""

    def __init__(self, memory: KVCacheManager) -> None:
        content, uses = memory.pool.content, memory.pool.num_uses
        self.tokens: dict[bytes, int] = {}
        self.saved: dict[bytes, int] = {}
        self.children: dict[bytes, list[bytes]] = {}
        for block, (parent, tokens, _) in memory.cache.nodes.items():
            key = content[block]
            assert key is not None, "a block in the tree has content"
            digest, num_tokens = key[1], num_packed(tokens)
            self.tokens[digest] = num_tokens
            self.saved[digest] = num_tokens * uses[block]
            self.children.setdefault(parent, []).append(digest)
        # A parent that is not cached is the root of a domain, or a block that was evicted.
        self.roots = [
            digest
            for parent, digests in self.children.items()
            if parent not in self.tokens
            for digest in digests
        ]
        self.below = self._sums()

    def _sums(self) -> dict[bytes, int]:
        """Digest -> tokens saved by the block and all blocks after it."""
        order, pending = [], list(self.roots)
        while pending:
            digest = pending.pop()
            order.append(digest)
            pending += self.children.get(digest, [])
        below: dict[bytes, int] = {}
        for digest in reversed(order):
            behind = sum([below[child] for child in self.children.get(digest, [])])
            below[digest] = self.saved[digest] + behind
        return below

    def run_from(self, digest: bytes) -> list[bytes]:
        """The block and those that follow it, up to the next branch or end."""
        run = [digest]
        while len(children := self.children.get(run[-1], [])) == 1:
            run.append(children[0])
        return run


def prefix_tree(memory: KVCacheManager, max_num_nodes: int) -> list[PrefixNode]:
    """At most max_num_nodes runs of blocks, those that have saved most first; parents come before
    their children."""
    tree = _Tree(memory)
    nodes: list[PrefixNode] = []
    pending: list[tuple[int, bytes, int]] = []
    for root in tree.roots:
        heappush(pending, (-tree.below[root], root, -1))
    while pending and len(nodes) < max_num_nodes:
        negative, first, parent = heappop(pending)
        run = tree.run_from(first)
        for child in tree.children.get(run[-1], []):
            heappush(pending, (-tree.below[child], child, len(nodes)))
        nodes.append(
            PrefixNode(
                parent,
                first.hex()[:DIGEST_DIGITS],
                len(run),
                sum([tree.tokens[digest] for digest in run]),
                sum([tree.saved[digest] for digest in run]),
                -negative,
            )
        )
    return nodes
