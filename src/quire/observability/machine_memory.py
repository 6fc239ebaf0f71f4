"""Reads how much memory is available, control groups included.

A control group's limit binds all that are below it, so the group of this process and its parents
are all read. `root` is where the kernel's file systems are mounted, for tests.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.observability.control_groups import ROOT, control_groups

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Names(NamedTuple):
    """What a version of control groups calls its files, and the line of memory.stat.

    kills: the file whose line "oom_kill" counts processes of the group that were killed for lack of
    memory, its own limit's or the machine's.
    """

    limit: str
    usage: str
    reclaimable: str
    kills: str


_V2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)


def total_memory_bytes(root: Path = ROOT) -> int:
    """Physical memory, or the least limit of a control group if that is less."""
    limits = [limit for folder, names in _groups(root) for limit in _numbers(folder / names.limit)]
    return min([_meminfo_bytes(root, "MemTotal"), *limits])


def available_memory_bytes(root: Path = ROOT) -> int:
    """What can be allocated now without swapping."""
    available = min([_meminfo_bytes(root, "MemAvailable"), *_unmapped_bytes(root)])
    for folder, names in _groups(root):
        for limit in _numbers(folder / names.limit):
            for usage in _numbers(folder / names.usage):
                # Files that were read count as used, but make room as soon as it is needed.
                unused = limit - usage + _stat_bytes(folder, names.reclaimable)
                available = min(available, max(0, unused))
    return available


def num_oom_kills(root: Path = ROOT) -> int | None:
    """How many processes the kernel has killed for lack of memory: of this process's control group,
    or of the whole machine where the group does not count them. None where neither is reported."""
    files = [folder / names.kills for folder, names in _groups(root)]
    for path in [*files, root / "proc/vmstat"]:
        try:
            lines = path.read_text().splitlines()
        except OSError:  # not there, or not for us: the next may be
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _meminfo_bytes(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _unmapped_bytes(root: Path) -> list[int]:
    """What a limit of the address space (`ulimit -v`) leaves this process; none: there is none."""
    limits, mapped = root / "proc/self/limits", root / "proc/self/statm"
    if not limits.is_file():
        return []
    line = next(
        line for line in limits.read_text().splitlines() if line.startswith("Max address space")
    )
    limit = line.split()[3]
    if not limit.isdigit():
        return []
    num_pages = int(mapped.read_text().split()[0])
    return [max(0, int(limit) - num_pages * PAGE_BYTES)]


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The folder of this process's control group and of each of its parents. `_numbers` passes over
    files that are not there."""
    for group in control_groups("memory", root):
        yield group.folder, _V2 if group.version == 2 else _V1


def _numbers(path: Path) -> list[int]:
    """The file's number; none where it is missing or says "max"."""
    text = path.read_text().strip() if path.is_file() else ""
    return [int(text)] if text.isdigit() else []


def _stat_bytes(folder: Path, name: str) -> int:
    path = folder / "memory.stat"
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith(name + " "))
