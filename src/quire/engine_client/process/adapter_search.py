"""Finds adapters by way of engine processes, and remembers which of them end these.

Of the adapters that were being read when a process died, any may have ended it. They are read
again by the next process, one after the other, so that a second death is that of one alone. Called
by `supervisor`, and by `cluster.fleet` for several engines.
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
    """Of processes that were reading an adapter of these files. last: the link to the last one."""

    stamps: FileStamps
    number: int = 0
    last: EngineLink | None = None

    def note(self, link: EngineLink) -> None:
        """Once for each process, however many calls were waiting for it."""
        if link is not self.last:
            self.number, self.last = self.number + 1, link


class AdapterSearch:
    """Invariant: an adapter whose reading has ended MAX_FIND_DEATHS processes is asked of no other
    one, until its files change."""

    def __init__(self, next_link: Callable[[], Awaitable[EngineLink]]) -> None:
        """next_link: to an engine that is ready, which may be waited for. Raises EngineDeadError
        where there will be none."""
        self._next_link = next_link
        self._deaths: dict[str, _Deaths] = {}  # by path
        self._one_suspect = asyncio.Lock()

    async def find(self, name: str, path: str, *, anew: bool) -> AdapterRef:
        """See `Supervisor.find_adapter`."""
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
                    self._deaths.setdefault(path, _Deaths(stamps)).note(link)
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
