"""How much memory this machine gives us, control groups included."""

from pathlib import Path


def total_memory_bytes() -> int:
    """Physical memory, or the control group's limit if that is less."""
    return min(_meminfo_bytes("MemTotal"), *_cgroup_bytes("memory.max", "limit_in_bytes"))


def available_memory_bytes() -> int:
    """What can be allocated now without swapping."""
    available = _meminfo_bytes("MemAvailable")
    limits = _cgroup_bytes("memory.max", "limit_in_bytes")
    used = _cgroup_bytes("memory.current", "usage_in_bytes")
    for limit, current in zip(limits, used, strict=False):
        available = min(available, max(0, limit - current))
    return available


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _cgroup_bytes(unified: str, legacy: str) -> list[int]:
    """The value of this process's own control group (version 2, then 1), where there is one."""
    found = []
    for path in (
        Path("/sys/fs/cgroup") / unified,
        Path("/sys/fs/cgroup/memory") / f"memory.{legacy}",
    ):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            found.append(int(text))
    return found or [1 << 62]
