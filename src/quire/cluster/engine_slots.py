"""Slots for several engines of a fleet: on this machine, or behind agents.

`ray_agents` has a third kind of slot, the nodes of a Ray cluster.
"""

import os
import secrets
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.cluster.machines.cluster_key import tls_context
from quire.cluster.machines.remote_link import AgentAccess, RemoteLink
from quire.engine_client.engine_slot import EngineSlot
from quire.engine_client.process.early_process import ENGINE_COMMAND
from quire.engine_client.process.process_link import ProcessLink
from quire.errors import ConfigurationError
from quire.numa.binding import has_own_policy, split_for_replicas
from quire.numa.numa_options import AUTO, NumaOptions
from quire.numa.planning import Part
from quire.observability.machine_processors import cpu_limit

GPU_FILES = "/dev"
"""The folder with a file nvidia<number> for each GPU that this process may see, if NVIDIA's driver
is installed."""


class LocalSlots:
    """Slots for processes of this machine.

    On CPUs, each engine gets its own processors if there are enough, and the memory of their NUMA
    node if the machine has several. On GPUs, each engine gets one GPU.
    """

    def __init__(
        self, num_engines: int, options: Mapping[str, object], most: int | None = None
    ) -> None:
        """`num_engines` is the number of engines at the start, all with `options`. `most` is the
        largest number of engines that will ever share the memory; None means `num_engines`. Raises
        ConfigurationError for options that the engines of one machine can't share."""
        # First, refuse options that engines of one machine can't share.
        device = str(options.get("device") or "auto")
        if device.startswith("cuda:"):
            raise ConfigurationError(
                f"device is {device!r}, but {num_engines} replicas need a GPU each; write 'cuda',"
                " and let CUDA_VISIBLE_DEVICES choose which ones"
            )
        if options.get("cache_dir") is not None:
            raise ConfigurationError(
                f"cache_dir is {options['cache_dir']!r}, but replicas of one machine can't share a"
                " cache folder; leave it out, or run each replica's agent on its own machine"
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
        # Then divide processors, threads and memory nodes between the engines.
        self._parts: Sequence[Part] = ()
        self._processors = _processor_shares(num_engines)
        if not self._on_gpus:
            if options.get("num_threads") is None:
                self._shared |= _shares_of_quota(num_engines)
            numa: Any = options.get("numa")
            asked = NumaOptions() if numa is None else NumaOptions(numa)
            self._parts = split_for_replicas(asked, num_engines) or ()
            # A memory policy that was set from outside (numactl) is kept. Engines then derive their
            # memory nodes from their processors.
            self._keeps_policy = bool(self._parts) and asked.numa == AUTO and has_own_policy()

    def initial(self) -> list[EngineSlot]:
        """See `EngineSlots`."""
        return [self._slot(number) for number in range(self._num_engines)]

    def allocate(self, name: str) -> EngineSlot:
        """See `EngineSlots`. On a CPU, engines beyond the first ones share all processors."""
        if self._on_gpus or int(name) < self._num_engines:
            return self._slot(int(name))
        return EngineSlot(name, ProcessLink, self._shared)

    def release(self, name: str) -> None:
        """See `EngineSlots`. Does nothing, since the slot is free once the process has ended."""

    def close(self) -> None:
        """See `EngineSlots`. Does nothing, since local slots hold no resources."""

    def _slot(self, number: int) -> EngineSlot:
        if self._on_gpus:
            return EngineSlot(str(number), ProcessLink, {"device": f"cuda:{number}"})
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
        return EngineSlot(str(number), partial(ProcessLink, command=command), options)


class AgentSlots:
    """Slots behind agents at given addresses."""

    def __init__(self, addresses: Sequence[str], key: bytes, heartbeat_s: float) -> None:
        """Each address is HOST:PORT. `key` is the content of the cluster's key file. Raises
        ConfigurationError."""
        self._tls = tls_context(key, ssl.PROTOCOL_TLS_CLIENT)
        self._heartbeat_s = heartbeat_s
        self._server_id = new_server_id()
        self._free = {address: _parsed(address) for address in addresses}
        if len(self._free) < len(addresses):
            raise ConfigurationError("agents has one address twice; an agent runs one replica")
        self._addresses = tuple(addresses)

    def initial(self) -> list[EngineSlot]:
        """See `EngineSlots`."""
        return [self._slot(address) for address in self._addresses]

    def allocate(self, name: str) -> EngineSlot:
        """See `EngineSlots`."""
        for address in self._addresses:
            if address in self._free:
                return self._slot(address)
        raise ConfigurationError(
            "every agent has its replica; start another agent, and name it in agents"
        )

    def release(self, name: str) -> None:
        """See `EngineSlots`."""
        self._free[name] = _parsed(name)

    def close(self) -> None:
        """See `EngineSlots`. The agents keep running for the next API server."""

    def _slot(self, address: str) -> EngineSlot:
        host, port = self._free.pop(address)

        async def find() -> tuple[str, int]:
            return host, port

        # The id includes the address. So an agent that is listed under two addresses sees two
        # different API servers, and refuses the second.
        server_id = f"{self._server_id}/{address}"
        access = AgentAccess(find, self._tls, server_id, self._heartbeat_s)
        return EngineSlot(address, partial(RemoteLink, access=access))


def _has_gpus() -> bool:
    """True if engines will probably find GPUs. Decided without importing torch, which takes
    long."""
    try:
        is_for_cpus = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
    return not is_for_cpus and any(Path(GPU_FILES).glob("nvidia[0-9]*"))


def new_server_id() -> str:
    """A random id of this API server's process."""
    return secrets.token_hex(8)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"agents has {address!r:.80}, but each must be HOST:PORT")
    return host.strip("[]"), int(port)


def _shares_of_quota(num_engines: int) -> dict[str, int]:
    """The option `num_threads` of each engine if a cgroup grants less processor time than there are
    processors. Otherwise empty, and each engine counts its processors itself."""
    limit = cpu_limit()
    if limit is None or limit >= len(os.sched_getaffinity(0)):
        return {}
    return {"num_threads": max(1, int(limit / num_engines))}


def _processor_shares(num_engines: int) -> list[tuple[int, ...]]:
    """Divides the processors that this process may use among the engines. With fewer processors
    than engines, all entries are empty, and the engines share all processors."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < num_engines:
        return [()] * num_engines
    bounds = [len(processors) * part // num_engines for part in range(num_engines + 1)]
    return [tuple(processors[start:end]) for start, end in pairwise(bounds)]
