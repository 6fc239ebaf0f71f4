"""Draws a machine's memory nodes, and says how `--numa auto` would use them.

                2 nodes; auto: each engine uses nodes 0-1, 2 ranks a node each
                node      memory        free  cores  CPUs               to 0  to 1
                   0    64.0 GiB    40.0 GiB      4  0-3,8-11             10    21
                   1    64.0 GiB    40.0 GiB      4  4-7,12-15            21    10

Called by `findings`.
"""

from collections.abc import Iterator

from quire.core.memory.memory_report import format_bytes
from quire.numa.binding import name_nodes
from quire.numa.planning import Part, plan
from quire.numa.topology import Node, Topology, format_list

_LONGEST_CPUS = 24


def sum_up_nodes(topology: Topology) -> str:
    """The number of nodes, and how `--numa auto` assigns ranks to them."""
    count = len(topology.nodes)
    if not count:
        return "the system shows no memory nodes; auto: nothing is bound"
    counted = f"{count} node{'s' if count > 1 else ''}"
    if not topology.has_several:
        return f"{counted}, one with memory for this process; auto: nothing is bound"
    (alone,) = plan(topology, 1)
    text = f"{counted}; auto: one rank uses {_part(alone)}"
    together = plan(topology, max(1, len(alone.memory_nodes)))
    if len(together) > 1:
        text += f"; {len(together)} ranks use {' | '.join(map(_part, together))}"
    return text


def draw_nodes(topology: Topology) -> Iterator[str]:
    """A line for each node; none for a single node."""
    if len(topology.nodes) < 2:
        return
    numbers = [node.id for node in topology.nodes]
    columns = "".join(f"{f'to {number}':>6}" for number in numbers)
    yield f"node      memory        free  cores  {'CPUs':<{_LONGEST_CPUS}}{columns}"
    for node in topology.nodes:
        cpus = format_list(node.cpus) or "none"
        distances = "".join(f"{node.distance(other):>6}" for other in topology.nodes)
        yield (
            f"{node.id:>4}  {_memory(node.memory_bytes)}  {_memory(node.free_bytes)}"
            f"  {_num_cores(node, topology):>5}  {cpus:<{_LONGEST_CPUS}}{distances}"
        )


def advice_on_nodes(topology: Topology) -> Iterator[str]:
    """Advice if one process would use the memory of several nodes."""
    if not topology.has_several:
        return
    (alone,) = plan(topology, 1)
    count = len(alone.memory_nodes)
    if count > 1:
        yield (
            f"one process computes a model with the memory of {name_nodes(alone.memory_nodes)};"
            f" --tensor-parallel-size {count} gives each of {count} processes a node of its own"
        )


def _part(part: Part) -> str:
    threads = f"{len(part.cpus)} thread{'s' if len(part.cpus) > 1 else ''}"
    return f"{name_nodes(part.memory_nodes)} ({threads})"


def _memory(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes) if num_bytes else 'none':>10}"


def _num_cores(node: Node, topology: Topology) -> int:
    return sum(core[0] in node.cpus for core in topology.cores)
