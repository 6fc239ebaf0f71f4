"""A fake source of LoRA adapters, as the engine uses it."""

import random
from collections.abc import Callable
from concurrent.futures import Future

from quire.core.adapters import AdapterRef
from quire.simulation.fakes.fake_source import MAX_READ_S, FakeSource

#: Prefix of the digests of broken adapters, which can't be read.
BROKEN = "broken"


class FakeAdapters(FakeSource):
    """The adapters that are being read or are ready."""

    def __init__(
        self,
        rng: random.Random,
        clock: Callable[[], float],
        wait_until: Callable[[float], None],
        max_read_s: float = MAX_READ_S,
    ) -> None:
        super().__init__(rng, clock, wait_until, BROKEN, max_read_s=max_read_s)

    def find(self, name: str, path: str, *, anew: bool = False) -> Future[AdapterRef]:
        """Not supported, since clients of a simulation name adapters by digest."""
        raise NotImplementedError("a simulated adapter has no files")

    def remember_source(self, ref: AdapterRef) -> None:
        """See `engine.adapter_work.StoredAdapters`."""

    def counts(self) -> dict[str, int]:
        """See `engine.adapter_work.StoredAdapters`."""
        return {"num_reads": self.num_reads}
