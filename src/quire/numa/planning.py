"""Divides a machine's cores and memory nodes into parts: ranks or replicas.

A pure function of a `Topology`. Every part computes on the cores of its own nodes, with one thread
a physical core, and has its memory there:

    as many parts as nodes      one node each
    fewer                       several nodes each, those that are near each other
    more                        parts share a node, and divide its cores

Cores without memory belong to the nearest node that has some. Memory without cores (CXL) is left
out, unless the nodes were named. Binds nothing itself: `binding` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quire.errors import ConfigurationError
from quire.numa.topology import Node, Topology, format_list


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank or replica gets.

    nodes: that its cores and its memory are of. memory_nodes: where its pages belong; several:
    spread evenly; none: the system knows no nodes. cpus: one of each of its physical cores.
    siblings: the other hardware threads of these cores. shares_cores: whether another part has some
    of them, too. num_sharing: how many parts, with this one, have their memory on these nodes.
    """

    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    siblings: tuple[int, ...]
    shares_cores: bool
    num_sharing: int = 1

    def cpus_for(self, num_threads: int) -> tuple[int, ...]:
        """Where so many threads run: with more than cores, on all hardware threads."""
        if num_threads <= len(self.cpus):
            return self.cpus
        return tuple(sorted({*self.cpus, *self.siblings}))

    def as_option(self) -> str:
        """The value of the option `numa` with which an engine keeps to this part."""
        cpus = format_list({*self.cpus, *self.siblings})
        return f"{format_list(self.nodes)}:{cpus}" if self.nodes else "off"


@dataclass(frozen=True, slots=True)
class _Home:
    """A node with memory, with the CPUs whose memory it is. members: the nodes of these CPUs.
    cores: their hardware threads by physical core. bare: nodes without CPUs whose memory serves,
    too."""

    node: Node
    members: tuple[Node, ...]
    cores: tuple[tuple[int, ...], ...]
    bare: tuple[int, ...] = ()


def plan(topology: Topology, num_parts: int, *, uses_bare_memory: bool = False) -> tuple[Part, ...]:
    """The parts, in the order of ranks or replicas; parts of one node are neighbours.

    num_parts: at least 1. uses_bare_memory: whether nodes without CPUs serve, too: each the part
    whose node is nearest.

    Raises ConfigurationError where no CPU is left.
    """
    assert num_parts >= 1, num_parts
    if not topology.cores:
        raise ConfigurationError(
            "no CPU is left for the engine: the nodes, the CPUs named with them and what this"
            " process may run on have none in common"
        )
    homes = _homes(topology)
    if uses_bare_memory:
        homes = _with_bare_memory(topology, homes)
    if not homes:
        return tuple(
            _part((), cores, shares) for cores, shares in _divided(topology.cores, num_parts)
        )
    if num_parts > len(homes):
        return _sharing(homes, num_parts)
    return tuple(
        _part(group, tuple(core for home in group for core in home.cores), False)
        for group in _groups(homes, num_parts)
    )


def _homes(topology: Topology) -> list[_Home]:
    """The nodes whose memory is used, with their CPUs; by number."""
    with_cpus = [node for node in topology.nodes if node.cpus]
    with_memory = [node for node in topology.nodes if node.memory_bytes]
    candidates = [node for node in with_cpus if node.memory_bytes] or with_memory
    members: dict[int, list[Node]] = {node.id: [] for node in candidates}
    for node in with_cpus if candidates else ():
        nearest = min(candidates, key=lambda home: (node.distance(home), home.id))
        members[nearest.id].append(node)
    homes = []
    for node in candidates:
        cpus = {cpu for member in members[node.id] for cpu in member.cpus}
        cores = tuple(core for core in topology.cores if core[0] in cpus)
        if cores:
            homes.append(_Home(node, tuple(members[node.id]), cores))
    return homes


def _with_bare_memory(topology: Topology, homes: Sequence[_Home]) -> list[_Home]:
    """With the nodes that have memory, but no CPUs, each at the home to which it is the nearest."""
    known = {home.node.id for home in homes}
    found: dict[int, list[int]] = {number: [] for number in known}
    for node in topology.nodes if homes else ():
        if node.memory_bytes and not node.cpus and node.id not in known:
            nearest = min(homes, key=lambda home: (node.distance(home.node), home.node.id))
            found[nearest.node.id].append(node.id)
    return [replace(home, bare=tuple(found[home.node.id])) for home in homes]


def _groups(homes: Sequence[_Home], num_parts: int) -> list[list[_Home]]:
    """As many groups, of neighbouring nodes; their sizes differ by one at most."""
    left = list(homes)
    groups = []
    for part in range(num_parts):
        size = (part + 1) * len(homes) // num_parts - part * len(homes) // num_parts
        group = [left.pop(0)]
        while len(group) < size:
            nearest = min(left, key=lambda home: (_distance(home.node, group), home.node.id))
            left.remove(nearest)
            group.append(nearest)
        groups.append(group)
    return groups


def _distance(node: Node, group: Sequence[_Home]) -> int:
    return sum(node.distance(home.node) for home in group)


def _sharing(homes: Sequence[_Home], num_parts: int) -> tuple[Part, ...]:
    """More parts than nodes: each goes where it gets the most cores."""
    counts = [0] * len(homes)
    for _ in range(num_parts):
        index = max(
            range(len(homes)), key=lambda i: (len(homes[i].cores) / (counts[i] + 1), -counts[i], -i)
        )
        counts[index] += 1
    return tuple(
        _part([home], cores, shares, count)
        for home, count in zip(homes, counts, strict=True)
        if count
        for cores, shares in _divided(home.cores, count)
    )


def _divided(
    cores: Sequence[tuple[int, ...]], count: int
) -> list[tuple[Sequence[tuple[int, ...]], bool]]:
    """The cores in `count` parts that lie beside each other, and whether parts share them: where
    there are more parts than cores."""
    size = len(cores)
    if count > size:
        return [([cores[part % size]], True) for part in range(count)]
    bounds = [part * size // count for part in range(count + 1)]
    return [(cores[begin:end], False) for begin, end in pairwise(bounds)]


def _part(
    homes: Sequence[_Home],
    cores: Sequence[tuple[int, ...]],
    shares_cores: bool,
    num_sharing: int = 1,
) -> Part:
    memory = {number for home in homes for number in (home.node.id, *home.bare)}
    cpus = {core[0] for core in cores}
    members = [member for home in homes for member in home.members]
    return Part(
        nodes=tuple(sorted({node.id for node in members if cpus & set(node.cpus)} | memory)),
        memory_nodes=tuple(sorted(memory)),
        cpus=tuple(sorted(cpus)),
        siblings=tuple(sorted({cpu for core in cores for cpu in core} - cpus)),
        shares_cores=shares_cores,
        num_sharing=num_sharing,
    )
