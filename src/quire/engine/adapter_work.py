"""Finds a request's LoRA adapter, and has it read while other requests run.

    find ──> a thread reads and checks it ──> AdapterRef, with the digest that requests carry
    step:    sequences whose adapter can't be read end │ schedule │ runner loads slots

The engine itself reads no files and imports no torch: the composition root passes in a store that
reads adapters. Used by `engine`.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from quire.core.adapters import AdapterRef
from quire.core.request import Request, SequenceOutput
from quire.core.scheduling.adapter_residency import AdapterSource
from quire.core.scheduling.scheduler import Scheduler, fail_adapter
from quire.errors import InvalidRequestError

NOT_ENABLED = (
    "this engine serves no adapters; make it with enable_lora=True (quire serve --enable-lora)"
)


class StoredAdapters(AdapterSource, Protocol):
    """The interface of `adapters.store`. Any thread may call `find`; only the engine's thread may
    call the other methods."""

    def find(self, name: str, path: str, *, anew: bool = False) -> "Future[AdapterRef]":
        """Read and check an adapter in a thread, unless its files are unchanged since the last
        time.

        anew: read it even if its files are unchanged. The future raises AdapterError.
        """
        ...

    def remember_source(self, ref: AdapterRef) -> None:
        """Remember the folder from which an adapter is read again for later requests.

        If the content has changed by then, reading it fails.
        """
        ...

    def pop_failed(self) -> dict[str, str]:
        """Adapters that could not be made ready since the last call: digest -> message."""
        ...

    def wait(self) -> None:
        """Wait briefly for an adapter that is being read, if there is one."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Number of adapters that were read, and number that are in the host's memory, by name."""
        ...


class AdapterWork:
    """The adapters of one engine.

    Invariant: a sequence that ended because its adapter could not be read has its output in
    `_ended`, until that is taken.
    """

    def __init__(self, scheduler: Scheduler, store: StoredAdapters | None = None) -> None:
        """store: None refuses adapters."""
        self._scheduler = scheduler
        self._store = store
        self._ended: list[SequenceOutput] = []

    @property
    def has_ended(self) -> bool:
        """Whether `pop_ended` would return anything."""
        return bool(self._ended)

    def find(self, name: str, path: str, *, anew: bool = False) -> "Future[AdapterRef]":
        """See `StoredAdapters.find`. Raises InvalidRequestError. Any thread may call."""
        return self._find_store().find(name, path, anew=anew)

    def check(self, request: Request) -> None:
        """Remember the folder of the request's adapter. Raises InvalidRequestError if this engine
        serves no adapters."""
        if request.adapter is not None:
            self._find_store().remember_source(request.adapter)

    def end_failed(self) -> None:
        """End all sequences that wait for an adapter which could not be read."""
        if self._store is not None:
            for digest, message in self._store.pop_failed().items():
                self._ended += fail_adapter(self._scheduler, digest, message)

    def pop_ended(self) -> list[SequenceOutput]:
        """Return the outputs of sequences that ended, because an adapter could not be read, since
        the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Wait a little for an adapter, if sequences need one that is being read."""
        if self._store is not None and self._scheduler.adapters.num_reading:
            self._store.wait()

    def counts(self) -> dict[str, Any]:
        """The counts of adapters for `EngineStats`; empty without adapters."""
        if self._store is None:
            return {}
        adapters = self._scheduler.adapters
        own = {
            "num_slots": adapters.num_slots,
            "num_resident": adapters.num_resident,
            "num_loads": adapters.num_loads,
        }
        return own | dict(self._store.counts())

    def _find_store(self) -> StoredAdapters:
        if self._store is None:
            raise InvalidRequestError(NOT_ENABLED, "lora_request")
        return self._store
