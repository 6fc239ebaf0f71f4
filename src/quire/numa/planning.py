"""Divides a machine's cores and memory nodes into parts for ranks or replicas.

Plans depend only on a `Topology`. Every part computes on the cores of its own nodes, with one
thread per physical core, and its memory is on these nodes:

    as many parts as nodes      each has one node
    fewer parts than nodes      each has several nodes that are near each other
    more parts than nodes       parts share a node's memory and divide its cores

Cores of a node without memory belong to the nearest node with memory. Memory without cores (CXL)
is used only if its node is named in the option. `binding` binds threads and memory to a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quire.errors import ConfigurationError
from quire.numa.topology import Node, Topology, format_list


@dataclass(frozen=True, slots=True)
class Part:
    """The cores and memory nodes of one rank or replica."""

    #: The nodes of the cores, and the nodes of the memory.
    nodes: tuple[int, ...]
    #: Nodes over which pages are spread evenly; empty if the system knows no nodes.
    memory_nodes: tuple[int, ...]
    #: One hardware thread of each physical core.
    cpus: tuple[int, ...]
    #: The other hardware threads of these cores.
    siblings: tuple[int, ...]
    #: Whether some of these cores are also in another part.
    shares_cores: bool
    #: Number of parts, including this part, that have their memory on these nodes.
    num_sharing: int = 1

    def cpus_for(self, num_threads: int) -> tuple[int, ...]:
        """The CPUs for `num_threads` threads: all hardware threads if there are fewer cores."""
        if num_threads <= len(self.cpus):
            return self.cpus
        return tuple(sorted({*self.cpus, *self.siblings}))

    def as_option(self) -> str:
        """The value of the option `numa` that binds an engine to this part."""
        cpus = format_list({*self.cpus, *self.siblings})
        return f"{format_list(self.nodes)}:{cpus}" if self.nodes else "off"


@dataclass(frozen=True, slots=True)
class _Home:
    """A node with memory, together with the cores that use this memory."""

    node: Node
    #: The nodes to which these cores belong: the node itself and nodes without memory.
    members: tuple[Node, ...]
    #: The hardware threads of each physical core.
    cores: tuple[tuple[int, ...], ...]
    #: Nodes without CPUs whose memory these cores use, too.
    bare: tuple[int, ...] = ()


def plan(topology: Topology, num_parts: int, *, uses_bare_memory: bool = False) -> tuple[Part, ...]:
    """The parts in the order of ranks or replicas, at least one. Parts of one node are adjacent.

    If `uses_bare_memory`, a node without CPUs adds its memory to the part with the nearest node.
    Raises ConfigurationError if no CPU is left.
    """
    assert num_parts >= 1, num_parts
    if not topology.cores:
        raise ConfigurationError(
            "no CPU is left for the engine: this process may run on none of the CPUs of these"
            " nodes, or on none of the CPUs that are named with them"
        )
    homes = _used_nodes(topology)
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


def _used_nodes(topology: Topology) -> list[_Home]:
    """The nodes whose memory is used, sorted by number, each with the cores that use its memory."""
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
    """The homes, with the memory of each node without CPUs added to the home nearest to it."""
    known = {home.node.id for home in homes}
    found: dict[int, list[int]] = {number: [] for number in known}
    for node in topology.nodes if homes else ():
        if node.memory_bytes and not node.cpus and node.id not in known:
            nearest = min(homes, key=lambda home: (node.distance(home.node), home.node.id))
            found[nearest.node.id].append(node.id)
    return [replace(home, bare=tuple(found[home.node.id])) for home in homes]


def _groups(homes: Sequence[_Home], num_parts: int) -> list[list[_Home]]:
    """Divides the homes into `num_parts` groups of near nodes, whose sizes differ by at most 1."""
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
    """The parts, if they outnumber the nodes. Each joins the node with the most cores per part."""
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
    """The cores in `count` contiguous parts, and whether parts share cores.

    Parts share cores if there are more parts than cores.
    """
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
