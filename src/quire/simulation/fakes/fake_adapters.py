"""A fake source of LoRA adapters: reading takes time, and fails for broken adapters.

Reading an adapter takes a random time of the virtual clock, after which a broken adapter fails.
`core.scheduling.residency.ItemSource` forbids loading an adapter before it is ready;
`pop_ready` checks this.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future

from quire.core.adapters import AdapterRef

MAX_READ_S = 0.5

#: Prefix of the digests of broken adapters, which can't be read.
BROKEN = "broken"


class FakeAdapters:
    """The adapters that are being read or are ready. Invariant: no adapter is both."""

    def __init__(
        self, rng: random.Random, clock: Callable[[], float], wait_until: Callable[[float], None]
    ) -> None:
        """`clock` returns the virtual clock's seconds, and `wait_until` sets the clock."""
        self.num_reads = 0
        self._rng = rng
        self._clock = clock
        self._wait_until = wait_until
        self._due_s: dict[str, float] = {}
        self._ready: set[str] = set()

    def begin(self, digest: str) -> bool:
        """See `ItemSource`."""
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
        """See `ItemSource`."""
        self._due_s.pop(digest, None)
        self._ready.discard(digest)

    def pop_ready(self, digest: str) -> None:
        """Check that an adapter, which the runner now loads, is ready."""
        assert digest in self._ready, f"adapter {digest} is loaded, but was not ready"
        self._ready.discard(digest)

    def pop_failed(self) -> dict[str, str]:
        """The reason for each adapter's failure since the last call, by digest."""
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
        """Not supported, since clients of a simulation name adapters by digest."""
        raise NotImplementedError("a simulated adapter has no files")

    def remember_source(self, ref: AdapterRef) -> None:
        """See `engine.adapter_work.StoredAdapters`."""

    def counts(self) -> dict[str, int]:
        """See `engine.adapter_work.StoredAdapters`."""
        return {"num_reads": self.num_reads}

    def wait(self) -> None:
        """Move the clock to the time when the next adapter is read, if one is being read."""
        if self._due_s:
            self._wait_until(min(self._due_s.values()))
