"""A fake source of adapters or contents: reading takes time, and fails for broken items.

Reading an item takes a random time of the virtual clock, after which a broken one fails.
`core.scheduling.residency.ItemSource` forbids loading an item before it is ready; `pop_ready`
checks this.
"""

import random
from collections.abc import Callable

MAX_READ_S = 0.5

#: Prefix of the digests of broken contents, which can't be read.
BROKEN_CONTENT = "ffffffff"


class FakeSource:
    """The items that are being read or are ready. Invariant: no item is both."""

    def __init__(
        self,
        rng: random.Random,
        clock: Callable[[], float],
        wait_until: Callable[[float], None],
        broken: str = BROKEN_CONTENT,
        instant_rate: float = 0.0,
        max_read_s: float = MAX_READ_S,
    ) -> None:
        """`clock` returns the virtual clock's seconds, and `wait_until` sets the clock. Items whose
        digest begins with `broken` can't be read. The share `instant_rate` of the reads takes no
        time, the others at most max_read_s."""
        self.num_reads = 0
        self._rng = rng
        self._clock = clock
        self._wait_until = wait_until
        self._broken = broken
        self._instant_rate = instant_rate
        self._max_read_s = max_read_s
        self._due_s: dict[str, float] = {}
        self._ready: set[str] = set()

    def begin(self, digest: str) -> bool:
        """See `ItemSource`."""
        if digest in self._ready:
            return True
        if digest not in self._due_s:
            self.num_reads += 1
            self._due_s[digest] = self._clock() + self._draw_s()
        if digest.startswith(self._broken) or self._due_s[digest] > self._clock():
            return False
        del self._due_s[digest]
        self._ready.add(digest)
        return True

    def release(self, digest: str) -> None:
        """See `ItemSource`."""
        self._due_s.pop(digest, None)
        self._ready.discard(digest)

    def pop_ready(self, digest: str) -> None:
        """Check that an item, which the runner now loads, is ready."""
        assert digest in self._ready, f"item {digest} is loaded, but was not ready"
        self._ready.discard(digest)

    def pop_failed(self) -> dict[str, str]:
        """The reason for each item's failure since the last call, by digest."""
        now_s = self._clock()
        failed = [
            digest
            for digest, due_s in self._due_s.items()
            if digest.startswith(self._broken) and due_s <= now_s
        ]
        for digest in failed:
            del self._due_s[digest]
        return {digest: f"item {digest} can't be read" for digest in failed}

    def _draw_s(self) -> float:
        is_instant = self._instant_rate and self._rng.random() < self._instant_rate
        return 0.0 if is_instant else self._rng.random() * self._max_read_s

    def wait(self) -> None:
        """Move the clock to the time when the next item is read, if one is being read."""
        if self._due_s:
            self._wait_until(min(self._due_s.values()))
