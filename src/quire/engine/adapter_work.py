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
from quire.core.request import Request
from quire.core.scheduling.scheduler import Scheduler
from quire.engine.item_work import ItemWork, ReadItems
from quire.errors import InvalidRequestError

NOT_ENABLED = (
    "this engine serves no adapters; make it with enable_lora=True (quire serve --enable-lora)"
)


class StoredAdapters(ReadItems, Protocol):
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

    def counts(self) -> Mapping[str, int]:
        """Number of adapters that were read, and number that are in the host's memory, by name."""
        ...


class AdapterWork(ItemWork):
    """The adapters of one engine."""

    def __init__(self, scheduler: Scheduler, store: StoredAdapters | None = None) -> None:
        """store: None refuses adapters."""
        super().__init__(scheduler, scheduler.adapters, store)
        self._store = store

    def find(self, name: str, path: str, *, anew: bool = False) -> "Future[AdapterRef]":
        """See `StoredAdapters.find`. Raises InvalidRequestError. Any thread may call."""
        return self._find_store().find(name, path, anew=anew)

    def check(self, request: Request) -> None:
        """Remember the folder of the request's adapter. Raises InvalidRequestError if this engine
        serves no adapters."""
        if request.adapter is not None:
            self._find_store().remember_source(request.adapter)

    def counts(self) -> dict[str, Any]:
        """The counts of adapters for `EngineStats`; empty without adapters."""
        if self._store is None:
            return {}
        adapters = self._residency
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
