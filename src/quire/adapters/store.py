"""Adapters in the host's memory and on disk, read and checked in threads.

    in slots (the runner's)        max_loras
    ready                          those that the coming plans load; they wait for that here
    in the host's memory           max_cpu_loras, those that were used last
    on disk                        all that were ever found, by the digest of their content

An adapter is found once by its folder, which gives its digest; from then on it is asked for by that
alone. Where it is read again and its content is another, it is not the adapter that was asked for:
it counts as failed, so that no request gets another's; before that, the other folders are read in
which that content was found. Implements `engine.adapter_work.StoredAdapters`; the runner takes from
it what it loads.
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
"""More than a disk needs: a reading that hangs keeps its thread, and holds up no other."""
WAIT_S = 0.01
"""So long at most is waited for a reading while there is nothing else to do: messages may come."""

logger = get_logger(__name__)


class AdapterStore:
    """Invariant, under `_lock`: an adapter is in `_ready` or `_reading` from `begin` on until it is
    taken, released or has failed; `_host` has at most max_cpu_loras.
    """

    def __init__(self, read: Callable[[Path], LoRAAdapter], max_cpu_loras: int) -> None:
        """read: reads the adapter in a folder, and checks that it fits the model; called in
        threads, several at a time. Raises AdapterError."""
        self._read = read
        self._max_cpu_loras = max_cpu_loras
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-adapters")
        self._lock = Lock()
        self._found: dict[str, tuple[FileStamps, str]] = {}  # path -> its files, their digest
        # digest -> path -> where it was found, the last one at the end
        self._known: dict[str, dict[str, AdapterRef]] = {}
        self._host: dict[str, LoRAAdapter] = {}  # by digest, the least recently used first
        self._ready: dict[str, LoRAAdapter] = {}
        self._reading: dict[str, Future[None]] = {}
        self._failed: dict[str, str] = {}
        self._num_reads = self._num_failed = 0

    def find(self, name: str, path: str, *, anew: bool = False) -> "Future[AdapterRef]":
        """See `engine.adapter_work.StoredAdapters`."""
        return self._threads.submit(self._find, name, os.path.abspath(path), anew)

    def know(self, ref: AdapterRef) -> None:
        """See `engine.adapter_work.StoredAdapters`."""
        with self._lock:
            self._note(ref)

    def begin(self, digest: str) -> bool:
        """See `core.scheduling.adapter_residency.AdapterSource`. `know` or `find` came before."""
        with self._lock:
            if digest in self._ready:
                return True
            if digest in self._reading or digest in self._failed:
                return False
            if digest in self._host:
                self._ready[digest] = adapter = self._host[digest]
                self._keep(digest, adapter)
                return True
            refs = [*reversed(self._known[digest].values())]
            self._reading[digest] = self._threads.submit(self._make_ready, digest, refs)
            return False

    def release(self, digest: str) -> None:
        """See `core.scheduling.adapter_residency.AdapterSource`."""
        with self._lock:
            self._ready.pop(digest, None)
            self._reading.pop(digest, None)

    def take(self, digest: str) -> LoRAAdapter:
        """For the runner, which loads it: one that is ready."""
        with self._lock:
            return self._ready.pop(digest)

    def take_failed(self) -> dict[str, str]:
        """See `engine.adapter_work.StoredAdapters`."""
        with self._lock:
            failed, self._failed = self._failed, {}
        return failed

    def wait(self) -> None:
        """See `engine.adapter_work.StoredAdapters`."""
        with self._lock:
            reading = list(self._reading.values())
        wait(reading, WAIT_S, FIRST_COMPLETED)

    def counts(self) -> dict[str, int]:
        """See `engine.adapter_work.StoredAdapters`. num_host, host_bytes: in the host's memory,
        what is ready included. num_reads: from disk; num_failed: those of them that requests waited
        for, in vain."""
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
                return self._note(AdapterRef(name, path, found[1]))
        adapter = self._read_checked(name, path)
        if file_stamps(path) != stamps:  # the config may be of one adapter, the tensors of another
            del adapter  # which the error's traceback would hold
            raise AdapterError(
                f"adapter {name!r}: its files were changed while they were read; load it again"
            )
        with self._lock:
            self._found[path] = stamps, adapter.digest
            self._keep(adapter.digest, adapter)
            return self._note(AdapterRef(name, path, adapter.digest))

    def _make_ready(self, digest: str, refs: Sequence[AdapterRef]) -> None:
        """refs: at least one; the first in which it is found. The first one's failure counts."""
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
            self._keep(digest, adapter)
            if is_wanted:
                self._ready[digest] = adapter

    def _read_same(self, ref: AdapterRef) -> LoRAAdapter:
        """What was found there. Raises AdapterError, also where it is another by now."""
        adapter = self._read_checked(ref.name, ref.path)
        if adapter.digest != ref.digest:
            del adapter  # which the error's traceback would hold
            raise AdapterError(
                f"adapter {ref.name!r}: its files were changed since it was loaded; load it again"
            )
        return adapter

    def _read_checked(self, name: str, path: str) -> LoRAAdapter:
        """Raises AdapterError, which calls the adapter by its name: whoever reads it may not be the
        one who knows the path. What else goes wrong is in the log."""
        with self._lock:
            self._num_reads += 1
        try:
            adapter = self._read(Path(path))
            _ = adapter.digest  # takes as long as reading: here, not where it is asked for
            return adapter
        except AdapterError as error:
            logger.warning("%s", shown_text(error))
            text = str(error).replace(f"adapter {path}", f"adapter {name!r}")
            failure = text.replace(f"{path}/", "").replace(path, "its folder")
        except Exception as error:
            # A bug, or no memory: the thread has nobody else who would hear of it.
            logger.exception("adapter %s in %s can't be read", name, shown_name(path))
            what = f"{type(error).__name__}: {error}".replace(path, "its folder")
            failure = f"adapter {name!r}: it can't be read: {what}"
        # Not from that error: its traceback holds the tensors for as long as this one is held.
        raise AdapterError(failure)

    def _note(self, ref: AdapterRef) -> AdapterRef:
        refs = self._known.setdefault(ref.digest, {})
        refs.pop(ref.path, None)
        refs[ref.path] = ref
        return ref

    def _keep(self, digest: str, adapter: LoRAAdapter) -> None:
        """In the host's memory, as the most recently used."""
        self._host.pop(digest, None)
        self._host[digest] = adapter
        while len(self._host) > self._max_cpu_loras:
            del self._host[next(iter(self._host))]
