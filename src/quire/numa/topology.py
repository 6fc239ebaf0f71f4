"""Reads a machine's nodes, cores and their distances from the files of Linux.

    sys/devices/system/node/     online, nodeN/cpulist, nodeN/meminfo, nodeN/distance
    sys/devices/system/cpu/      online, cpuN/topology/thread_siblings_list
    proc/thread-self/status      Cpus_allowed_list, Mems_allowed_list; else proc/self/status

Everything is read below a root, which is / or a folder with the recorded files of another machine.
What is not there has the value that a plain machine has: no file of siblings, no SMT; no allowed
list, everything is allowed. `planning` decides what becomes of it.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path("/")
OWN_DISTANCE, OTHER_DISTANCE = 10, 20
"""Of a node to itself and to another where the firmware does not say (ACPI, System Locality
Distance Information Table)."""

_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")


@dataclass(frozen=True, slots=True)
class Node:
    """One memory node, as far as this process may use it.

    cpus: online and allowed, by number; none: it has only memory (CXL, high-bandwidth memory).
    memory_bytes: 0: it has none, or this process may not use it. free_bytes: free, or holding
    files that can be dropped. distances: node -> distance, 10 for itself.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    distances: dict[int, int]

    def distance(self, other: "Node") -> int:
        usual = OWN_DISTANCE if other.id == self.id else OTHER_DISTANCE
        return self.distances.get(other.id, usual)


@dataclass(frozen=True, slots=True)
class Topology:
    """nodes: by number; none: the system knows no nodes. cores: the allowed hardware threads of
    each physical core, in the order of the first of them."""

    nodes: tuple[Node, ...]
    cores: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core))

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """Those that this process can have memory of."""
        return tuple(node.id for node in self.nodes if node.memory_bytes)

    @property
    def has_several(self) -> bool:
        """Whether there is anything to choose: more than one node with memory."""
        return len(self.memory_nodes) > 1

    def only(
        self, cpus: Collection[int] | None = None, nodes: Collection[int] | None = None
    ) -> "Topology":
        """The same machine with no other CPUs and no other nodes; None: all."""
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
    """Of the machine whose files lie below `root`. Raises OSError where a file can't be read."""
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
    # Some guests are shown siblings on two nodes; a core lies on one.
    split = {
        tuple(cpu for cpu in core if owners.get(cpu) == owner)
        for core in cores
        for owner in {owners.get(cpu) for cpu in core}
    }
    return Topology(nodes, tuple(sorted(split)))


def parse_list(text: str) -> tuple[int, ...]:
    """ "0-3,8" -> (0, 1, 2, 3, 8); "0-15:2/4", of older kernels, is 0, 1, 4, 5, 8, 9, 12, 13.
    Raises ValueError."""
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
    """(0, 1, 2, 3, 8) -> "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _allowed(root: Path) -> tuple[set[int] | None, set[int] | None]:
    """CPUs and nodes that affinity and cpusets leave; None: the file doesn't say."""
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
    # The columns are those of the nodes that are online.
    columns = _text(folder / "distance").split()
    return Node(
        id=number,
        cpus=tuple(cpu for cpu in own if cpu in cpus),
        memory_bytes=memory.get("MemTotal", 0) if usable else 0,
        free_bytes=sum(memory.get(name, 0) for name in _RECLAIMABLE) if usable else 0,
        distances=dict(zip(online, map(int, columns), strict=False)),
    )


def _meminfo(path: Path) -> dict[str, int]:
    """The lines "Node 0 MemTotal:  1024 kB", in bytes."""
    lines = re.findall(r"^Node \d+ (\S+):\s+(\d+) kB$", _text(path), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in lines}


def _siblings(folder: Path, cpu: int) -> tuple[int, ...]:
    return parse_list(_text(folder / "thread_siblings_list")) or (cpu,)


def _cores(cores: Iterable[Iterable[int]], cpus: set[int]) -> tuple[tuple[int, ...], ...]:
    """The parts of cores that lie within `cpus`, each once."""
    left = {tuple(sorted(cpus & set(core))) for core in cores}
    return tuple(sorted(core for core in left if core))


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
