"""A cache of embeddings of bounded size, which evicts what is cheap to encode again.

The policy is GreedyDual-Size (Cao and Irani, USENIX 1997). The value of an entry is the seconds of
its encoding for each of its bytes, added at each use to the value of the last evicted entry. The
entry of the least value is evicted; among equal values, the least recently used entry. So an entry
that was costly stays longer, but not for good: values of later entries grow with each eviction. If
all costs are equal, the order of eviction is that of the last uses.

Evictions change no result, since encoding again gives the same bits. Used by `content_store`.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class _Entry:
    embeddings: torch.Tensor
    #: Seconds of encoding for each byte.
    cost: float
    #: The cost plus the floor of the cache at the entry's last use.
    value: float


class EmbeddingCache:
    """Embeddings by digest.

    Invariant: the embeddings have at most `max_bytes` bytes together, and no entry has a value
    below the floor.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        #: Bytes of all embeddings in the cache.
        self.num_bytes = 0
        #: The least recently used first.
        self._entries: dict[str, _Entry] = {}
        #: The value of the last evicted entry.
        self._floor = 0.0

    def find(self, digest: str) -> torch.Tensor | None:
        """The embeddings of a content, whose last use is now; None if they aren't in the cache."""
        entry = self._entries.pop(digest, None)
        if entry is None:
            return None
        self._entries[digest] = entry
        entry.value = self._floor + entry.cost
        return entry.embeddings

    def keep(self, digest: str, embeddings: torch.Tensor, encode_s: float) -> None:
        """Keep embeddings that took `encode_s` seconds, and evict others to make room.

        The digest is not in the cache. Does nothing with embeddings that are larger than the cache.
        """
        num_bytes = embeddings.nbytes
        if num_bytes > self.max_bytes:
            return
        while self.num_bytes + num_bytes > self.max_bytes:
            victim = min(self._entries, key=lambda each: self._entries[each].value)
            evicted = self._entries.pop(victim)
            self.num_bytes -= evicted.embeddings.nbytes
            self._floor = evicted.value
        cost = encode_s / max(1, num_bytes)
        self._entries[digest] = _Entry(embeddings, cost, self._floor + cost)
        self.num_bytes += num_bytes
