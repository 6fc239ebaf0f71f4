"""Reads a machine's nodes, cores and their distances from the files of Linux.

    sys/devices/system/node/     online, nodeN/cpulist, nodeN/meminfo, nodeN/distance
    sys/devices/system/cpu/      online, cpuN/topology/thread_siblings_list
    proc/thread-self/status      Cpus_allowed_list, Mems_allowed_list; else proc/self/status

The files are read below a root folder: / or a folder with recorded files of another machine. If a
file is missing, a default is used: without siblings there is no SMT, and without a list of allowed
CPUs or nodes all are allowed. `planning` uses the result.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path("/")
OWN_DISTANCE, OTHER_DISTANCE = 10, 20
"""Distances of a node to itself and to another node if the firmware does not list them in its
System Locality Distance Information Table (ACPI)."""

_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")


@dataclass(frozen=True, slots=True)
class Node:
    """A memory node, restricted to the CPUs and memory that this process may use."""

    id: int
    #: Numbers of the online, allowed CPUs. A node without CPUs has only memory, such as CXL.
    cpus: tuple[int, ...]
    #: 0 if the node has no memory, or this process may not use it.
    memory_bytes: int
    #: Memory that is free or holds cached files that can be dropped.
    free_bytes: int
    #: Maps the number of each node to its distance from this node; the distance of a node from
    #: itself is 10.
    distances: dict[int, int]

    def distance(self, other: "Node") -> int:
        usual = OWN_DISTANCE if other.id == self.id else OTHER_DISTANCE
        return self.distances.get(other.id, usual)


@dataclass(frozen=True, slots=True)
class Topology:
    """The memory nodes and cores of a machine that this process may use."""

    #: The nodes in order of their numbers; empty if the system knows no nodes.
    nodes: tuple[Node, ...]
    #: The allowed hardware threads of each physical core, sorted.
    cores: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core))

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """Numbers of the nodes whose memory this process can use."""
        return tuple(node.id for node in self.nodes if node.memory_bytes)

    @property
    def has_several(self) -> bool:
        """Whether this process can use the memory of several nodes."""
        return len(self.memory_nodes) > 1

    def only(
        self, cpus: Collection[int] | None = None, nodes: Collection[int] | None = None
    ) -> "Topology":
        """The same machine, restricted to these CPUs and nodes. None means no restriction."""
        kept = [node for node in self.nodes if nodes is None or node.id in nodes]
        allowed = set(self.cpus if nodes is None else [cpu for node in kept for cpu in node.cpus])
        if cpus is not None:
            allowed &= set(cpus)
        return Topology(
            tuple(
                replace(node, cpus=tuple(cpu for cpu in node.cpus if cpu in allowed))
                for node in kept
            ),
            _cores(self.cores, allowed),
        )


def read_topology(root: Path = ROOT) -> Topology:
    """Read the topology from the files below `root`. Raises OSError if a file can't be read."""
    system = root / "sys/devices/system"
    allowed_cpus, allowed_nodes = _allowed(root)
    cpus = _online_cpus(system)
    if allowed_cpus is not None:
        cpus &= allowed_cpus
    nodes = tuple(
        _node(system / f"node/node{number}", number, cpus, online, allowed_nodes)
        for online in [_online_nodes(system)]
        for number in online
    )
    siblings = {cpu: _siblings(system / f"cpu/cpu{cpu}/topology", cpu) for cpu in cpus}
    cores = _cores(siblings.values(), cpus)
    owners = {cpu: node.id for node in nodes for cpu in node.cpus}
    # Some virtual machines list siblings on two nodes. A core lies on one node: split such cores.
    split = {
        tuple(cpu for cpu in core if owners.get(cpu) == owner)
        for core in cores
        for owner in {owners.get(cpu) for cpu in core}
    }
    return Topology(nodes, tuple(sorted(split)))


def parse_list(text: str) -> tuple[int, ...]:
    """Parse "0-3,8" as (0, 1, 2, 3, 8), and "0-15:2/4" of older kernels as 0, 1, 4, 5, ..., 13.

    Raises ValueError.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6})/(\d{1,6}))?)?\s*", part)
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range like 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        used, group = int(match[3] or 1), int(match[4] or 1)
        found.update(n for n in range(first, last + 1) if (n - first) % max(1, group) < used)
    return tuple(sorted(found))


def format_list(numbers: Iterable[int]) -> str:
    """Format (0, 1, 2, 3, 8) as "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _allowed(root: Path) -> tuple[set[int] | None, set[int] | None]:
    """(CPUs, nodes) that affinity and cpusets allow; None for a list that the file lacks."""
    text = _text(root / "proc/thread-self/status") or _text(root / "proc/self/status")
    found: dict[str, set[int]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in ("Cpus_allowed_list", "Mems_allowed_list"):
            found[name] = set(parse_list(value))
    return found.get("Cpus_allowed_list"), found.get("Mems_allowed_list")


def _online_cpus(system: Path) -> set[int]:
    path = system / "cpu/online"
    if path.is_file():
        return set(parse_list(path.read_text()))
    return {int(folder.name[3:]) for folder in system.glob("cpu/cpu[0-9]*")}


def _online_nodes(system: Path) -> tuple[int, ...]:
    path = system / "node/online"
    numbers = {int(folder.name[4:]) for folder in system.glob("node/node[0-9]*")}
    if path.is_file():
        numbers &= set(parse_list(path.read_text()))
    return tuple(sorted(numbers))


def _node(
    folder: Path,
    number: int,
    cpus: set[int],
    online: tuple[int, ...],
    allowed: set[int] | None,
) -> Node:
    own = parse_list(_text(folder / "cpulist"))
    memory = _meminfo(folder / "meminfo")
    usable = allowed is None or number in allowed
    # The file has a column for each online node.
    columns = _text(folder / "distance").split()
    return Node(
        id=number,
        cpus=tuple(cpu for cpu in own if cpu in cpus),
        memory_bytes=memory.get("MemTotal", 0) if usable else 0,
        free_bytes=sum(memory.get(name, 0) for name in _RECLAIMABLE) if usable else 0,
        distances=dict(zip(online, map(int, columns), strict=False)),
    )


def _meminfo(path: Path) -> dict[str, int]:
    """The values of lines such as "Node 0 MemTotal:  1024 kB", in bytes."""
    lines = re.findall(r"^Node \d+ (\S+):\s+(\d+) kB$", _text(path), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in lines}


def _siblings(folder: Path, cpu: int) -> tuple[int, ...]:
    return parse_list(_text(folder / "thread_siblings_list")) or (cpu,)


def _cores(cores: Iterable[Iterable[int]], cpus: set[int]) -> tuple[tuple[int, ...], ...]:
    """The cores restricted to `cpus`, without empty cores and duplicates."""
    left = {tuple(sorted(cpus & set(core))) for core in cores}
    return tuple(sorted(core for core in left if core))


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
