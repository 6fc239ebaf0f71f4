"""Asks engine processes to find adapters, and refuses adapters that kill processes.

If a process dies while it reads several adapters, each may be the cause. The next process reads
these adapters one by one, so that a second death shows which adapter is the cause. Called by
`fleet`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from quire.core.adapters import AdapterRef
from quire.engine_client.process.link import EngineLink
from quire.errors import AdapterError, EngineDeadError
from quire.hub.adapter_files import FileStamps, file_stamps

MAX_FIND_DEATHS = 2
"""An adapter is refused after this many processes have died while they read it."""


@dataclass(slots=True)
class _Deaths:
    """Deaths of processes that were reading an adapter."""

    #: The state of the adapter's files when the processes died.
    stamps: FileStamps
    number: int = 0
    #: The link to the last process that died.
    last: EngineLink | None = None

    def count(self, link: EngineLink) -> None:
        """Count a death, once for each process, even if several calls were waiting for it."""
        if link is not self.last:
            self.number, self.last = self.number + 1, link


class AdapterSearch:
    """Finds adapters. Invariant: an adapter that has killed MAX_FIND_DEATHS processes is not read
    again until its files change."""

    def __init__(self, next_link: Callable[[], Awaitable[EngineLink]]) -> None:
        """`next_link` returns a link to a ready engine, and may wait for one. It raises
        EngineDeadError if no engine will be ready."""
        self._next_link = next_link
        self._deaths: dict[str, _Deaths] = {}  # by path
        #: Held while an adapter that may have killed a process is read, so that suspects are read
        #: one at a time.
        self._one_suspect = asyncio.Lock()

    async def find(self, name: str, path: str, *, anew: bool) -> AdapterRef:
        """The adapter in a folder, with the digest that requests carry. Other requests continue
        meanwhile. `anew` reads it even if its files have not changed. If the process dies, another
        one is asked. Raises AdapterError, InvalidRequestError, and EngineDeadError if there will be
        no process."""
        path = os.path.abspath(path)
        stamps = await asyncio.to_thread(file_stamps, path)
        if path in self._deaths and self._deaths[path].stamps != stamps:
            del self._deaths[path]
        while True:
            async with self._alone_if_suspect(path):
                if self._is_deadly(path):
                    raise AdapterError(
                        f"adapter {name!r}: {MAX_FIND_DEATHS} engine processes died while it was"
                        " read, so it is refused until its files change; the server's log says how"
                        " they died"
                    )
                link = await self._next_link()
                try:
                    ref = await link.adapters.find(name, path, anew)
                except EngineDeadError:
                    self._deaths.setdefault(path, _Deaths(stamps)).count(link)
                else:
                    self._deaths.pop(path, None)
                    return ref

    def _is_deadly(self, path: str) -> bool:
        return path in self._deaths and self._deaths[path].number >= MAX_FIND_DEATHS

    @asynccontextmanager
    async def _alone_if_suspect(self, path: str) -> AsyncIterator[None]:
        if path not in self._deaths:
            yield
            return
        async with self._one_suspect:
            yield
