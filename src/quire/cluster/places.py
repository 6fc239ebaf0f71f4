"""Where a fleet's engines can be started: on this machine, or behind agents.

`ray_agents` has a third kind: on the nodes of a Ray cluster.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from quire.cluster.machines.remote_link import AgentAccess, RemoteLink
from quire.engine_client.process.link import OpenLink
from quire.engine_client.process.process_link import ENGINE_COMMAND, ProcessLink
from quire.errors import ConfigurationError
from quire.numa.binding import has_own_policy, split_for_replicas
from quire.numa.numa_options import AUTO, NumaOptions
from quire.numa.planning import Part
from quire.observability.machine_processors import cpu_limit

GPU_FILES = "/dev"
"""Has a file nvidia<number> for each GPU that this process may see, where NVIDIA's driver is."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where an engine is started. options: its own, beside those of the whole fleet."""

    name: str
    open_link: OpenLink
    options: Mapping[str, object] = field(default_factory=dict)


class EnginePlaces(Protocol):
    """Gives out places for engines."""

    def first(self) -> Sequence[EnginePlace]:
        """Those of the engines that a fleet starts with."""
        ...

    def another(self, name: str) -> EnginePlace:
        """One more, for an engine of this name. Raises ConfigurationError where there is none."""
        ...

    def give_back(self, name: str) -> None:
        """The engine of this name is gone for good."""
        ...

    def close(self) -> None:
        """All engines are gone for good."""
        ...


class LocalPlaces:
    """Processes of this machine. On a CPU each has processors of its own, where there are enough,
    and the memory beside them where there are several memory nodes; on GPUs each has one."""

    def __init__(
        self, num_engines: int, options: Mapping[str, object], most: int | None = None
    ) -> None:
        """num_engines: that are started at first. options: of all of them. most: engines that may
        share the memory at some time; None: num_engines. Raises ConfigurationError."""
        device = str(options.get("device") or "auto")
        if device.startswith("cuda:"):
            raise ConfigurationError(
                f"device is {device!r}, but {num_engines} replicas need a GPU each; write 'cuda',"
                " and let CUDA_VISIBLE_DEVICES choose which ones"
            )
        if options.get("cache_dir") is not None:
            raise ConfigurationError(
                f"cache_dir is {options['cache_dir']!r}, but replicas of one machine can't share a"
                " cache folder; leave it out, or run an agent for each with a machine of its own"
            )
        self._num_engines = num_engines
        self._shared = {"engines_here": max(num_engines, most or 0)}
        self._on_gpus = device == "cuda" or (device == "auto" and _has_gpus())
        num_ranks = options.get("tensor_parallel_size") or 1
        if self._on_gpus and num_ranks != 1:
            raise ConfigurationError(
                f"tensor_parallel_size is {num_ranks}, but replicas of one machine have one GPU"
                " each; run an agent for each, with the GPUs in its CUDA_VISIBLE_DEVICES, and name"
                " them with --agents"
            )
        self._parts: Sequence[Part] = ()
        self._processors = _processor_shares(num_engines)
        if not self._on_gpus:
            if options.get("num_threads") is None:
                self._shared |= _shares_of_quota(num_engines)
            numa: Any = options.get("numa")
            asked = NumaOptions() if numa is None else NumaOptions(numa)
            self._parts = split_for_replicas(asked, num_engines) or ()
            # Then engines find their nodes by their processors, and leave memory as it is.
            self._keeps_policy = bool(self._parts) and asked.numa == AUTO and has_own_policy()

    def first(self) -> list[EnginePlace]:
        """See `EnginePlaces`."""
        return [self._place(number) for number in range(self._num_engines)]

    def another(self, name: str) -> EnginePlace:
        """See `EnginePlaces`. On a CPU those beyond the first ones share all processors."""
        if self._on_gpus or int(name) < self._num_engines:
            return self._place(int(name))
        return EnginePlace(name, ProcessLink, self._shared)

    def give_back(self, name: str) -> None:
        """See `EnginePlaces`; it is free with the process."""

    def close(self) -> None:
        """See `EnginePlaces`; nothing is left."""

    def _place(self, number: int) -> EnginePlace:
        if self._on_gpus:
            return EnginePlace(str(number), ProcessLink, {"device": f"cuda:{number}"})
        options: dict[str, object] = {**self._shared}
        command = [*ENGINE_COMMAND]
        processors = self._processors[number]
        if self._parts:
            part = self._parts[number]
            options["engines_on_nodes"] = part.num_sharing
            processors = ()
            if self._keeps_policy:
                processors = tuple(sorted({*part.cpus, *part.siblings}))
            else:
                options["numa"] = part.as_option()
        if processors:
            command += ["--cpus", ",".join(map(str, processors))]
        return EnginePlace(str(number), partial(ProcessLink, command=command), options)


class AgentPlaces:
    """Agents at addresses that were given."""

    def __init__(self, addresses: Sequence[str], key: bytes, heartbeat_s: float) -> None:
        """addresses: HOST:PORT each. Raises ConfigurationError."""
        self._key = key
        self._heartbeat_s = heartbeat_s
        self._front_id = new_front_id()
        self._free = {address: _parsed(address) for address in addresses}
        if len(self._free) < len(addresses):
            raise ConfigurationError("agents names one address twice; each has one replica")
        self._addresses = tuple(addresses)

    def first(self) -> list[EnginePlace]:
        """See `EnginePlaces`."""
        return [self._place(address) for address in self._addresses]

    def another(self, name: str) -> EnginePlace:
        """See `EnginePlaces`."""
        for address in self._addresses:
            if address in self._free:
                return self._place(address)
        raise ConfigurationError("every agent has its replica; start one more, and name it")

    def give_back(self, name: str) -> None:
        """See `EnginePlaces`."""
        self._free[name] = _parsed(name)

    def close(self) -> None:
        """See `EnginePlaces`; agents stay, for the next front."""

    def _place(self, address: str) -> EnginePlace:
        host, port = self._free.pop(address)

        async def find() -> tuple[str, int]:
            return host, port

        # With the address, so that an agent that was named by two is found to have a front.
        front_id = f"{self._front_id}/{address}"
        access = AgentAccess(find, self._key, front_id, self._heartbeat_s)
        return EnginePlace(address, partial(RemoteLink, access=access))


def _has_gpus() -> bool:
    """Whether engines will find GPUs, as far as that is known without loading torch."""
    try:
        is_for_cpus = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
    return not is_for_cpus and any(Path(GPU_FILES).glob("nvidia[0-9]*"))


def new_front_id() -> str:
    """Tells a front's process from any other."""
    return secrets.token_hex(8)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"agents has {address!r:.80}, but each must be HOST:PORT")
    return host.strip("[]"), int(port)


def _shares_of_quota(num_engines: int) -> dict[str, int]:
    """The threads of each engine where control groups give all of them together less time than
    there are processors; empty where they don't: engines count their processors then."""
    limit = cpu_limit()
    if limit is None or limit >= len(os.sched_getaffinity(0)):
        return {}
    return {"num_threads": max(1, int(limit / num_engines))}


def _processor_shares(num_engines: int) -> list[tuple[int, ...]]:
    """Of the processors that this process may use, those of each engine; all empty where there are
    fewer processors than engines, which then share them."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < num_engines:
        return [()] * num_engines
    bounds = [len(processors) * part // num_engines for part in range(num_engines + 1)]
    return [tuple(processors[start:end]) for start, end in pairwise(bounds)]
