"""A fake source of adapters, which reads them slowly and fails for some.

Reading an adapter takes a random time of the virtual clock, after which a broken one fails. Loading
an adapter before it is ready violates the contract of
`core.scheduling.adapter_residency.AdapterSource`, and raises.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future

from quire.core.adapters import AdapterRef

MAX_READ_S = 0.5

#: Adapters whose digest begins with this can't be read.
BROKEN = "broken"


class FakeAdapters:
    """The adapters that are being read or are ready. Invariant: no adapter is both."""

    def __init__(
        self, rng: random.Random, clock: Callable[[], float], wait_until: Callable[[float], None]
    ) -> None:
        """`clock` gives the seconds of the virtual clock, and `wait_until` moves it."""
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

    def pop_ready(self, digest: str) -> None:
        """Note that the runner loads an adapter, which must be ready."""
        assert digest in self._ready, f"adapter {digest} is loaded, but was not ready"
        self._ready.discard(digest)

    def pop_failed(self) -> dict[str, str]:
        """The adapters that failed since the last call, with the reasons."""
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
        """Refuses: clients of a simulation name adapters by digest."""
        raise NotImplementedError("a simulated adapter has no files")

    def remember_source(self, ref: AdapterRef) -> None:
        """See `engine.adapter_work.StoredAdapters`."""

    def counts(self) -> dict[str, int]:
        """See `engine.adapter_work.StoredAdapters`."""
        return {"num_reads": self.num_reads}

    def wait(self) -> None:
        """Move the clock to the end of the next reading, if there is one."""
        if self._due_s:
            self._wait_until(min(self._due_s.values()))
