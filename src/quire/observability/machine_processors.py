"""Counts the processors that this process may use, including limits of control groups.

Called by all code that chooses a number of threads: kernels, torch, grammars, replicas.
`root` is the folder with the kernel's file systems; tests replace it.
"""

import os
from pathlib import Path

from quire.observability.control_groups import ROOT, ControlGroup, control_groups


def usable_processors(root: Path = ROOT) -> int:
    """The number of processors that this process may run on, at least 1.

    It is at most the CPU quota of the control groups, rounded down: if more threads ran, the system
    would suspend them in the middle of a step.
    """
    # macOS doesn't let a process choose its processors.
    is_chosen = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if is_chosen else os.cpu_count() or 1
    limit = cpu_limit(root)
    return count if limit is None else max(1, min(count, int(limit)))


def cpu_limit(root: Path = ROOT) -> float | None:
    """The CPU quota of the control groups, in processors; None without a limit.

    It is the lowest quota of the process's group and the groups above it.
    """
    limits = [_quota(group) for group in control_groups("cpu", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(group: ControlGroup) -> float | None:
    """The group's limit in processors; None without a limit or without the group's files."""
    names = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = " ".join((group.folder / name).read_text() for name in names).split()
    except OSError:
        return None
    if len(words) != 2 or not all(word.isdigit() for word in words):  # "max", "-1"
        return None
    quota, period = map(int, words)
    return quota / period if quota and period else None


def processor_s(pid: int | None, root: Path = ROOT) -> float | None:
    """Processor time that a process and its threads have used so far, in seconds.

    None if it is unknown because the process has ended or runs on another machine (pid is None), or
    because this is not Linux.
    """
    try:
        fields = (root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime
