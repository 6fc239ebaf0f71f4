"""Adapters that end the processes that read them, among others that don't."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.adapters import AdapterRef
from quire.engine_client.process.adapter_search import AdapterSearch
from quire.errors import AdapterError, EngineDeadError


class Process:
    """Stands for a link and its process: one in which "kills" is read dies with all that it has."""

    def __init__(self) -> None:
        self.adapters = self
        self.reading: list[str] = []
        self.is_dead = asyncio.Event()

    async def find(self, name: str, path: str, anew: bool) -> AdapterRef:
        self.reading.append(name)
        await asyncio.sleep(0.001)
        if "kills" in self.reading:
            self.is_dead.set()
        await asyncio.sleep(0.001)
        if self.is_dead.is_set():
            raise EngineDeadError("it died")
        self.reading.remove(name)
        return AdapterRef(name, path, name)


class Processes:
    """The present one is followed by another."""

    def __init__(self) -> None:
        self.all = [Process()]

    async def next_link(self) -> Any:
        if self.all[-1].is_dead.is_set():
            self.all.append(Process())
        return self.all[-1]


def with_search(test: Callable[[AdapterSearch, Processes], Any]) -> None:
    async def run() -> None:
        processes = Processes()
        await test(AdapterSearch(processes.next_link), processes)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_adapter_that_ended_two_processes_is_refused_until_its_files_change(
    tmp_path: Path,
) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text("{}")

    async def test(search: AdapterSearch, processes: Processes) -> None:
        for _ in range(3):
            with pytest.raises(AdapterError, match=r"'kills': 2 .* refused until its files change"):
                await search.find("kills", str(tmp_path), anew=True)
        assert [each.is_dead.is_set() for each in processes.all] == [True, True]
        with pytest.raises(AdapterError, match="'other name'"):
            await search.find("other name", f"{tmp_path}/../{tmp_path.name}", anew=False)
        config.write_text("{} ")
        assert (await search.find("mended", str(tmp_path), anew=False)).digest == "mended"

    with_search(test)


def test_others_that_are_read_beside_it_are_read_again(tmp_path: Path) -> None:
    names = ["first", "kills", "second", "kills", "third"]

    async def test(search: AdapterSearch, processes: Processes) -> None:
        found = await asyncio.gather(
            *[search.find(name, str(tmp_path / name), anew=False) for name in names],
            return_exceptions=True,
        )
        for name, each in zip(names, found, strict=True):
            assert isinstance(each, AdapterError if name == "kills" else AdapterRef), name
        assert sum(each.is_dead.is_set() for each in processes.all) == 2
        again = await search.find("first", str(tmp_path / "first"), anew=False)
        assert again.digest == "first"

    with_search(test)
