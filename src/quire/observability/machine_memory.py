"""Reads how much memory is available, including the limits of control groups.

A control group's limit applies to all groups below it, so the process's own group and its parents
are read. `root` is the folder with the kernel's file systems; tests replace it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.observability.control_groups import ROOT, control_groups

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Names(NamedTuple):
    """The file names of one version of control groups."""

    limit: str
    usage: str
    #: A line of memory.stat.
    reclaimable: str
    #: A file with a line "oom_kill": the number of the group's processes that the kernel has killed
    #: because the group or the machine lacked memory.
    kills: str


_V2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)


def total_memory_bytes(root: Path = ROOT) -> int:
    """The physical memory, or the lowest limit of a control group if that is less."""
    limits = [limit for folder, names in _groups(root) for limit in _numbers(folder / names.limit)]
    return min([_meminfo_bytes(root, "MemTotal"), *limits])


def available_memory_bytes(root: Path = ROOT) -> int:
    """The bytes that can be allocated now without swapping."""
    available = min([_meminfo_bytes(root, "MemAvailable"), *_unmapped_bytes(root)])
    for folder, names in _groups(root):
        for limit in _numbers(folder / names.limit):
            for usage in _numbers(folder / names.usage):
                # Cached pages of files count as used, but are freed as soon as they are needed.
                unused = limit - usage + _stat_bytes(folder, names.reclaimable)
                available = min(available, max(0, unused))
    return available


def num_oom_kills(root: Path = ROOT) -> int | None:
    """The number of processes that the kernel has killed for lack of memory.

    It is the count of this process's control group, or of the machine if the group has no count.
    None if the system reports neither count.
    """
    files = [folder / names.kills for folder, names in _groups(root)]
    for path in [*files, root / "proc/vmstat"]:
        try:
            lines = path.read_text().splitlines()
        except OSError:  # missing or not readable, but the next file may be
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _meminfo_bytes(root: Path, name: str) -> int:
    """A line of /proc/meminfo; all physical memory on systems without it, such as macOS."""
    if not (root / "proc").exists():
        return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _unmapped_bytes(root: Path) -> list[int]:
    """The bytes left below the limit of the address space (`ulimit -v`); empty without a limit."""
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
    """(folder, names of its files) of this process's control group and of its parents. The files
    may be missing, which `_numbers` accepts."""
    for group in control_groups("memory", root):
        yield group.folder, _V2 if group.version == 2 else _V1


def _numbers(path: Path) -> list[int]:
    """The file's number; empty if the file is missing or says "max"."""
    text = path.read_text().strip() if path.is_file() else ""
    return [int(text)] if text.isdigit() else []


def _stat_bytes(folder: Path, name: str) -> int:
    path = folder / "memory.stat"
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith(name + " "))
