"""Fetches and removes models of this machine for clients, if the operator has allowed it.

Made by `launch` if the server has the option `manage_models`; called by the routes of Ollama's API.
Models come from the hub, or from a Python package, as with `quire pull`. They are not served.
"""

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

from quire.errors import CheckpointError, QuireError, shown
from quire.hub.aliases import hub_id_of

KEPT_FREE = 0.1
"""The share of the disk with the cache that a fetch must leave free."""

_PAGES = ("hf.co/", "huggingface.co/")
"""Prefixes that Ollama's clients put before a hub id."""


class ModelChangeError(QuireError):
    """A model can't be fetched or removed; the message says why."""

    code = "model_not_changed"
    may_be_retried = False

    def __init__(self, message: str, http_status: int) -> None:
        super().__init__(message)
        self.http_status = http_status


class ModelStore:
    """The models of this machine's cache. Invariant: one model is fetched or removed at a time."""

    def __init__(self, in_use: Callable[[], Collection[str]]) -> None:
        """`in_use` returns the models that must stay, as names or as paths of their files."""
        self._in_use = in_use
        self._lock = asyncio.Lock()

    async def pull(self, name: str) -> AsyncGenerator[tuple[int, int], None]:
        """Fetch a model's files into the cache. Yields (bytes present, bytes in total).

        Closing the generator stops the fetch; the bytes received so far are kept, and a later fetch
        continues from them. Raises ModelChangeError.
        """
        loop, reports = asyncio.get_running_loop(), asyncio.Queue[tuple[int, int] | None]()
        done: asyncio.Future[None] = loop.create_future()
        is_stopped = threading.Event()

        def on_progress(_step: str, num_present: int, num_bytes: int) -> None:
            if is_stopped.is_set():
                raise ModelChangeError("the client has closed the connection", 499)
            _check_disk(name, num_bytes - num_present)
            loop.call_soon_threadsafe(reports.put_nowait, (num_present, num_bytes))

        def fetch() -> None:
            failure = _failure_of(name, on_progress)
            if not is_stopped.is_set():
                loop.call_soon_threadsafe(_end, done, failure)

        async with self._lock:
            done.add_done_callback(lambda _: reports.put_nowait(None))
            # A daemon thread doesn't keep the server from ending while the hub does not answer.
            threading.Thread(target=fetch, name="pull", daemon=True).start()
            try:
                while (report := await reports.get()) is not None:
                    yield report
                await done
            finally:
                is_stopped.set()

    async def remove(self, name: str) -> None:
        """Remove all files of a model. Raises ModelChangeError for a model that is unknown or in
        use."""
        async with self._lock:
            await asyncio.to_thread(_remove, name, self._in_use())


def _end(done: "asyncio.Future[None]", failure: Exception | None) -> None:
    if not done.cancelled():
        done.set_result(None) if failure is None else done.set_exception(failure)


def _failure_of(name: str, on_progress: Callable[[str, int, int], None]) -> Exception | None:
    """Fetch a model. Returns the error that ended the fetch; None if the model is here."""
    # The hub's client takes a quarter of a second to import.
    from quire.hub.fetching import fetch_model

    try:
        _check_disk(name, 0)
        fetch_model(
            *(_hub_id(name), None), check=None, needs_tokenizer=True, on_progress=on_progress
        )
    except CheckpointError as error:
        return ModelChangeError(str(error), 502)
    except Exception as error:  # the caller's task raises it
        return error
    return None


def _remove(name: str, in_use: Collection[str]) -> None:
    # The hub's client takes a quarter of a second to import.
    from quire.hub.local_models import ModelInUseError, ModelNotHereError, remove_model

    try:
        remove_model(_without_page(name), in_use)
    except ModelNotHereError as error:
        raise ModelChangeError(str(error), 404) from error
    except ModelInUseError as error:
        raise ModelChangeError(str(error), 409) from error
    except CheckpointError as error:
        raise ModelChangeError(str(error), 400) from error


def _without_page(name: str) -> str:
    for page in _PAGES:
        name = name.removeprefix(page)
    return name


def _hub_id(name: str) -> str:
    """The hub id of a name, perhaps with the choice of a GGUF file. Raises CheckpointError."""
    name = _without_page(name)
    return hub_id_of(name) or name


def _check_disk(name: str, num_bytes: int) -> None:
    """Raises ModelChangeError if `num_bytes` more would leave less than KEPT_FREE of the disk."""
    from huggingface_hub import constants  # this import takes long, too

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    kept = int(disk.total * KEPT_FREE)
    if disk.free - num_bytes < kept:
        raise ModelChangeError(
            f"{shown(name)} needs {num_bytes} bytes more, but of {disk.free} free bytes on the disk"
            f" of {folder} a fetch over HTTP must leave {kept}; free some, or run quire pull",
            507,
        )
