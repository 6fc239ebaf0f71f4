"""A source of adapters that takes time to read them, and can't read some.

Each reading takes a random time of the virtual clock; a broken adapter fails at its end. Refuses
what breaks `core.scheduling.adapter_residency.AdapterSource`: a load of what is not ready.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future

from quire.core.adapters import AdapterRef

MAX_READ_S = 0.5

BROKEN = "broken"
"""Digests that begin so can't be read."""


class FakeAdapters:
    """Invariant: an adapter is being read, ready, or neither."""

    def __init__(
        self, rng: random.Random, clock: Callable[[], float], wait_until: Callable[[float], None]
    ) -> None:
        """clock: seconds. wait_until: moves it."""
        self.num_reads = 0
        self._rng = rng
        self._clock = clock
        self._wait_until = wait_until
        self._due_s: dict[str, float] = {}
        self._ready: set[str] = set()

    def begin(self, digest: str) -> bool:
        """See `AdapterSource`."""
        if digest in self._ready:
            return True
        if digest not in self._due_s:
            self.num_reads += 1
            self._due_s[digest] = self._clock() + self._rng.random() * MAX_READ_S
        if digest.startswith(BROKEN) or self._due_s[digest] > self._clock():
            return False
        del self._due_s[digest]
        self._ready.add(digest)
        return True

    def release(self, digest: str) -> None:
        """See `AdapterSource`."""
        self._due_s.pop(digest, None)
        self._ready.discard(digest)

    def take(self, digest: str) -> None:
        """The runner loads it."""
        assert digest in self._ready, f"adapter {digest} is loaded, but was not ready"
        self._ready.discard(digest)

    def take_failed(self) -> dict[str, str]:
        """Those whose reading has failed since the last call, and why."""
        now_s = self._clock()
        failed = [
            digest
            for digest, due_s in self._due_s.items()
            if digest.startswith(BROKEN) and due_s <= now_s
        ]
        for digest in failed:
            del self._due_s[digest]
        return {digest: f"adapter {digest} can't be read" for digest in failed}

    def find(self, name: str, path: str, *, anew: bool = False) -> Future[AdapterRef]:
        """Clients of a simulation know the digests."""
        raise NotImplementedError("a simulated adapter has no files")

    def know(self, ref: AdapterRef) -> None:
        """See `engine.adapter_work.StoredAdapters`."""

    def counts(self) -> dict[str, int]:
        """See `engine.adapter_work.StoredAdapters`."""
        return {"num_reads": self.num_reads}

    def wait(self) -> None:
        """Until something has been read, if anything is."""
        if self._due_s:
            self._wait_until(min(self._due_s.values()))
