"""Machines as the files that Linux shows of them, written below a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.numa.topology import format_list

GIB = 1 << 30


@dataclass(frozen=True)
class Recorded:
    """A machine's files. nodes: number -> (CPUs, GiB of memory). distances: rows of the table, in
    the order of the nodes; none: 10 and 20. siblings: the hardware threads of each core that has
    several. offline: CPUs. cpus_allowed, mems_allowed: None: the file doesn't say."""

    nodes: Mapping[int, tuple[Sequence[int], int]]
    distances: Sequence[Sequence[int]] = ()
    siblings: Sequence[Sequence[int]] = ()
    offline: Sequence[int] = ()
    cpus_allowed: str | None = None
    mems_allowed: str | None = None
    cpus: Sequence[int] = ()
    """Where there are no nodes."""

    def write(self, root: Path) -> Path:
        every = [*self.cpus, *(cpu for cpus, _ in self.nodes.values() for cpu in cpus)]
        online = [cpu for cpu in every if cpu not in self.offline]
        cpu_folder = root / "sys/devices/system/cpu"
        _put(cpu_folder / "online", format_list(online))
        threads = {cpu: core for core in self.siblings for cpu in core}
        for cpu in online:
            core = [each for each in threads.get(cpu, (cpu,)) if each in online]
            _put(cpu_folder / f"cpu{cpu}/topology/thread_siblings_list", format_list(core))
        for row, (number, (cpus, gib)) in enumerate(self.nodes.items()):
            folder = root / f"sys/devices/system/node/node{number}"
            _put(folder / "cpulist", format_list(cpus))
            _put(folder / "meminfo", _meminfo(number, gib))
            if self.distances:
                _put(folder / "distance", " ".join(map(str, self.distances[row])))
        if self.nodes:
            _put(root / "sys/devices/system/node/online", format_list(self.nodes))
        lines = {"Cpus_allowed_list": self.cpus_allowed, "Mems_allowed_list": self.mems_allowed}
        text = "".join(f"{name}:\t{value}\n" for name, value in lines.items() if value is not None)
        _put(root / "proc/self/status", f"Name:\tquire\n{text}")
        return root


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _meminfo(number: int, gib: int) -> str:
    kib = gib << 20
    values = {"MemTotal": kib, "MemFree": kib // 2, "Active(file)": kib // 8, "Dirty": 4}
    return "\n".join(f"Node {number} {name}:{value:>15} kB" for name, value in values.items())


def _pairs(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(first, second, strict=True))


NO_NODES = Recorded({}, cpus=range(4))
ONE_NODE = Recorded({0: (range(4), 16)}, [[10]])
TWO_NODES = Recorded({0: (range(4), 32), 1: (range(4, 8), 32)}, [[10, 21], [21, 10]])
SMT = Recorded(  # two sockets of 4 cores; the second threads are numbered behind all first ones
    {0: ([*range(4), *range(8, 12)], 64), 1: ([*range(4, 8), *range(12, 16)], 64)},
    [[10, 21], [21, 10]],
    siblings=_pairs(range(8), range(8, 16)),
)
FOUR_NODES = Recorded(  # two sockets, whose nodes are numbered in turns
    {number: ([2 * number, 2 * number + 1], 16) for number in range(4)},
    [[10, 32, 12, 32], [32, 10, 32, 12], [12, 32, 10, 32], [32, 12, 32, 10]],
)
EIGHT_NODES = Recorded(  # two sockets of four sub-NUMA clusters
    {number: (range(3 * number, 3 * number + 3), 48) for number in range(8)},
    [[10 if a == b else 12 if a // 4 == b // 4 else 21 for b in range(8)] for a in range(8)],
)
MEMORY_LESS = Recorded(  # node 1 and 3 have cores only; node 3 is nearer to 2
    {0: ([0, 1], 32), 1: ([2, 3], 0), 2: ([4, 5], 32), 3: ([6, 7], 0)},
    [[10, 16, 22, 28], [16, 10, 22, 28], [22, 22, 10, 16], [28, 28, 16, 10]],
)
CXL = Recorded(  # memory without cores behind each of two sockets
    {0: ([0, 1], 32), 1: ([2, 3], 32), 2: ([], 128), 3: ([], 128)},
    [[10, 21, 14, 24], [21, 10, 24, 14], [14, 24, 10, 26], [24, 14, 26, 10]],
)
UNEVEN = Recorded({0: (range(8), 64), 1: (range(8, 12), 32)}, [[10, 21], [21, 10]])
