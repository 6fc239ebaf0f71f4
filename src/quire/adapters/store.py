"""Adapters in the host's memory and on disk, read and checked in threads.

    in the runner's slots          at most max_loras
    ready                          adapters that wait for a plan to load them into slots
    in the host's memory           at most max_cpu_loras, the most recently used
    on disk                        all adapters that were ever found, by their digests

An adapter is first found by its folder, and then requested by the digest of its weights. If the
folder's content has changed when it is read again, other folders in which the digest was found are
read. If all have changed, the adapter counts as failed, so no request gets wrong weights.
Implements `engine.adapter_work.StoredAdapters`; the runner takes adapters from it to load them.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

from quire.adapters.adapter import LoRAAdapter
from quire.core.adapters import AdapterRef
from quire.errors import AdapterError
from quire.hub.adapter_files import FileStamps, file_stamps
from quire.hub.model_files import shown_name, shown_text
from quire.observability.log import get_logger

NUM_THREADS = 4
"""More threads than a disk needs, so that one read that hangs doesn't delay the others."""
WAIT_S = 0.01
"""Maximum seconds of one wait for a read while the engine is idle, since messages may arrive."""

logger = get_logger(__name__)


class AdapterStore:
    """Reads adapters in threads, and keeps them until the runner loads them.

    Invariant while `_lock` is free: an adapter is in `_ready` or `_reading` from the call of
    `begin` until `pop_ready`, `release` or a failure. `_host` has at most max_cpu_loras.
    """

    def __init__(self, read: Callable[[Path], LoRAAdapter], max_cpu_loras: int) -> None:
        """`read` returns the adapter in a folder, or raises AdapterError if it doesn't fit the
        model. Several threads call it at the same time."""
        self._read = read
        self._max_cpu_loras = max_cpu_loras
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-adapters")
        self._lock = Lock()
        #: Maps a folder's path to the stamps of its files when they were read, and the digest of
        #: its adapter.
        self._found: dict[str, tuple[FileStamps, str]] = {}
        #: Maps a digest to the folders in which it was found, by path; the latest is last.
        self._known: dict[str, dict[str, AdapterRef]] = {}
        #: Adapters by digest, the least recently used first.
        self._host: dict[str, LoRAAdapter] = {}
        #: Adapters by digest that wait for a plan to load them.
        self._ready: dict[str, LoRAAdapter] = {}
        self._reading: dict[str, Future[None]] = {}
        #: Messages of failures by digest, until `pop_failed` returns them.
        self._failed: dict[str, str] = {}
        self._num_reads = self._num_failed = 0

    def find(self, name: str, path: str, *, anew: bool = False) -> "Future[AdapterRef]":
        """See `engine.adapter_work.StoredAdapters`."""
        return self._threads.submit(self._find, name, os.path.abspath(path), anew)

    def remember_source(self, ref: AdapterRef) -> None:
        """See `engine.adapter_work.StoredAdapters`."""
        with self._lock:
            self._remember_source(ref)

    def begin(self, digest: str) -> bool:
        """See `core.scheduling.residency.ItemSource`. Must be called after
        `remember_source` or `find`."""
        with self._lock:
            if digest in self._ready:
                return True
            if digest in self._reading or digest in self._failed:
                return False
            if digest in self._host:
                self._ready[digest] = adapter = self._host[digest]
                self._cache_on_host(digest, adapter)
                return True
            refs = [*reversed(self._known[digest].values())]
            self._reading[digest] = self._threads.submit(self._make_ready, digest, refs)
            return False

    def release(self, digest: str) -> None:
        """See `core.scheduling.residency.ItemSource`."""
        with self._lock:
            self._ready.pop(digest, None)
            self._reading.pop(digest, None)

    def pop_ready(self, digest: str) -> LoRAAdapter:
        """Remove a ready adapter and return it to the runner, which loads it into a slot."""
        with self._lock:
            return self._ready.pop(digest)

    def pop_failed(self) -> dict[str, str]:
        """See `engine.item_work.ReadItems`."""
        with self._lock:
            failed, self._failed = self._failed, {}
        return failed

    def wait(self) -> None:
        """See `engine.item_work.ReadItems`."""
        with self._lock:
            reading = list(self._reading.values())
        wait(reading, WAIT_S, FIRST_COMPLETED)

    def counts(self) -> dict[str, int]:
        """See `engine.adapter_work.StoredAdapters`.

        `num_host` and `host_bytes` count adapters in the host's memory, including ready adapters.
        `num_reads` counts reads of folders, `num_failed` adapters that could not be made ready.
        """
        with self._lock:
            here = {id(each): each for each in (*self._host.values(), *self._ready.values())}
            return {
                "num_host": len(here),
                "host_bytes": sum(each.num_bytes for each in here.values()),
                "num_reads": self._num_reads,
                "num_failed": self._num_failed,
            }

    # ---- in threads -------------------------------------------------------------------------

    def _find(self, name: str, path: str, anew: bool) -> AdapterRef:
        stamps = file_stamps(path)
        with self._lock:
            found = self._found.get(path)
            if found is not None and found[0] == stamps and not anew:
                return self._remember_source(AdapterRef(name, path, found[1]))
        adapter = self._read_checked(name, path)
        if file_stamps(path) != stamps:  # config and tensors may belong to different adapters
            del adapter  # else the error's traceback would keep it alive
            raise AdapterError(
                f"adapter {name!r}: its files were changed while they were read; load it again"
            )
        with self._lock:
            self._found[path] = stamps, adapter.digest
            self._cache_on_host(adapter.digest, adapter)
            return self._remember_source(AdapterRef(name, path, adapter.digest))

    def _make_ready(self, digest: str, refs: Sequence[AdapterRef]) -> None:
        """Read the adapter from the first folder of `refs` that still has it. If no folder has it,
        record the first failure."""
        adapter, failure = None, ""
        for ref in refs:
            try:
                adapter = self._read_same(ref)
                break
            except AdapterError as error:
                failure = failure or str(error)
        with self._lock:
            is_wanted = self._reading.pop(digest, None) is not None
            if adapter is None:
                self._num_failed += 1
                if is_wanted:
                    self._failed[digest] = failure
                return
            self._cache_on_host(digest, adapter)
            if is_wanted:
                self._ready[digest] = adapter

    def _read_same(self, ref: AdapterRef) -> LoRAAdapter:
        """Read the adapter in a folder again. Raises AdapterError if that fails or if its digest
        has changed."""
        adapter = self._read_checked(ref.name, ref.path)
        if adapter.digest != ref.digest:
            del adapter  # else the error's traceback would keep it alive
            raise AdapterError(
                f"adapter {ref.name!r}: its files were changed since it was loaded; load it again"
            )
        return adapter

    def _read_checked(self, name: str, path: str) -> LoRAAdapter:
        """Read the adapter in a folder. Failures are logged and raised as AdapterError.

        The error names the adapter, not its path, which the client may not know.
        """
        with self._lock:
            self._num_reads += 1
        try:
            adapter = self._read(Path(path))
            # Compute and cache the digest in this thread: hashing takes as long as reading.
            _ = adapter.digest
            return adapter
        except AdapterError as error:
            logger.warning("%s", shown_text(error))
            text = str(error).replace(f"adapter {path}", f"adapter {name!r}")
            failure = text.replace(f"{path}/", "").replace(path, "its folder")
        except Exception as error:
            # A bug or a lack of memory would otherwise end the thread's task unreported.
            logger.exception("adapter %s in %s can't be read", name, shown_name(path))
            what = f"{type(error).__name__}: {error}".replace(path, "its folder")
            failure = f"adapter {name!r}: it can't be read: {what}"
        # Raised without the cause, whose traceback would keep the tensors alive.
        raise AdapterError(failure)

    def _remember_source(self, ref: AdapterRef) -> AdapterRef:
        refs = self._known.setdefault(ref.digest, {})
        refs.pop(ref.path, None)
        refs[ref.path] = ref
        return ref

    def _cache_on_host(self, digest: str, adapter: LoRAAdapter) -> None:
        """Put the adapter into the host's cache, as the most recently used."""
        self._host.pop(digest, None)
        self._host[digest] = adapter
        while len(self._host) > self._max_cpu_loras:
            del self._host[next(iter(self._host))]
