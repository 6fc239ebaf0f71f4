"""Replicas as processes of this machine: which processors or GPUs each has."""

import os
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

from quire.cluster.fleet_engines import EnginePlace
from quire.engine_client.process.process_link import ENGINE_COMMAND, ProcessLink
from quire.errors import ConfigurationError
from quire.numa.planning import options_of_replicas
from quire.numa.topology import read_topology

FIRST_GPU = "/dev/nvidia0"
"""Is there where NVIDIA's driver is. The front loads no torch, which would know more."""


def local_places(num_replicas: int, options: Mapping[str, object]) -> list[EnginePlace]:
    """A place for each of num_replicas. options: of all of them.

    On a CPU each replica has processors of its own, where there are enough, and the memory beside
    them where there are several memory nodes; on GPUs each has one: the first, the second and so
    on. Raises ConfigurationError.
    """
    numbers, device = range(num_replicas), str(options.get("device") or "auto")
    if device.startswith("cuda:"):
        raise ConfigurationError(
            f"device is {device!r}, but {num_replicas} replicas need a GPU each; write 'cuda', and"
            " let CUDA_VISIBLE_DEVICES choose which ones"
        )
    if device == "cuda" or (device == "auto" and Path(FIRST_GPU).exists()):
        return [_place(number, num_replicas, {"device": f"cuda:{number}"}) for number in numbers]
    topology = read_topology()
    if topology.has_several and options.get("numa", "auto") == "auto":
        nodes = options_of_replicas(topology, num_replicas)
        return [_place(number, num_replicas, {"numa": nodes[number]}) for number in numbers]
    shares = _processor_shares(num_replicas)
    return [_place(number, num_replicas, {}, shares[number]) for number in numbers]


def _place(
    number: int, num_replicas: int, options: Mapping[str, object], cpus: tuple[int, ...] = ()
) -> EnginePlace:
    command = [*ENGINE_COMMAND]
    if cpus:
        command += ["--cpus", ",".join(map(str, cpus))]
    shared = {} if "device" in options else {"engines_here": num_replicas}
    return EnginePlace(str(number), partial(ProcessLink, command=command), {**options, **shared})


def _processor_shares(num_replicas: int) -> list[tuple[int, ...]]:
    """Of the processors that this process may use, those of each replica; all empty where there are
    fewer processors than replicas, which then share them."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < num_replicas:
        return [()] * num_replicas
    bounds = [len(processors) * part // num_replicas for part in range(num_replicas + 1)]
    return [tuple(processors[start:end]) for start, end in pairwise(bounds)]
