"""What the machine has, read from the kernel, or from a tree that looks like the kernel's."""

from pathlib import Path

import pytest

from quire.observability.machine_memory import (
    available_memory_bytes,
    num_oom_kills,
    total_memory_bytes,
)

UNLIMITED_V1 = "9223372036854771712"
CGROUP = "sys/fs/cgroup"


def make_root(root: Path, memberships: str, files: dict[str, str]) -> Path:
    """A machine of 1000 KiB with 800 KiB available, and these files of control groups."""
    texts = {
        "proc/meminfo": "MemTotal:  1000 kB\nMemFree:  5 kB\nMemAvailable:  800 kB\n",
        "proc/self/cgroup": memberships,
    }
    for name, text in (texts | {f"{CGROUP}/{name}": text for name, text in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: str, usage: str, stat: str = "") -> dict[str, str]:
    texts = {"memory.max": limit, "memory.current": usage, "memory.stat": stat}
    return {f"{folder}/{name}": text + "\n" for name, text in texts.items()}


def v1(folder: str, limit: str, usage: str, stat: str = "") -> dict[str, str]:
    texts = {"limit_in_bytes": limit, "usage_in_bytes": usage, "stat": stat}
    return {f"memory/{folder}/memory.{name}": text + "\n" for name, text in texts.items()}


def test_available_is_a_part_of_the_total() -> None:
    assert 0 < available_memory_bytes() <= total_memory_bytes() < 1 << 50


NESTED = "0::/parent/own\n"
NAMED_V1 = "9:name=systemd:/x\n4:cpu,memory:/parent/own\n1:cpuset:/\n"


@pytest.mark.parametrize(
    ("memberships", "files", "total", "available"),
    [
        pytest.param("0::/\n", {}, 1024000, 819200, id="no limits"),
        pytest.param(NESTED, v2("parent/own", "max", "9"), 1024000, 819200, id="max"),
        pytest.param(NESTED, v2("parent/own", "5000", "1200"), 5000, 3800, id="own"),
        pytest.param(
            NESTED,
            v2("parent/own", "5000", "200") | v2("parent", "4000", "3900"),
            4000,
            100,
            id="a parent's limit binds",
        ),
        pytest.param(
            NESTED,
            v2("parent/own", "max", "200") | v2("parent", "4000", "3900"),
            4000,
            100,
            id="only a parent's limit",
        ),
        pytest.param(NESTED, v2("other", "50", "40"), 1024000, 819200, id="another's group"),
        pytest.param("0::/host/name\n", v2("", "6000", "1000"), 6000, 5000, id="mounted as root"),
        pytest.param("0::/../own\n", v2("", "6000", "1000"), 6000, 5000, id="outside the mount"),
        pytest.param(NESTED, v2("parent/own", "50", "70"), 50, 0, id="over the limit"),
        pytest.param(
            NESTED,
            v2("parent/own", "5000", "4000", "anon 900\ninactive_file 3000\nactive_file 100"),
            5000,
            4000,
            id="files that were read make room",
        ),
        pytest.param(
            NAMED_V1,
            v1("parent/own", UNLIMITED_V1, "100") | v1("parent", "7000", "2000"),
            7000,
            5000,
            id="version 1, a parent's limit",
        ),
        pytest.param(
            NAMED_V1,
            v1("", "7000", "2000", "inactive_file 7\ntotal_inactive_file 1500"),
            7000,
            6500,
            id="version 1, mounted as root",
        ),
        pytest.param(
            NAMED_V1 + "0::/\n", v1("parent/own", "7000", "0"), 7000, 7000, id="both versions"
        ),
    ],
)
def test_control_groups(
    memberships: str, files: dict[str, str], total: int, available: int, tmp_path: Path
) -> None:
    root = make_root(tmp_path, memberships, files)
    assert (total_memory_bytes(root), available_memory_bytes(root)) == (total, available)


def test_a_kernel_without_control_groups(tmp_path: Path) -> None:
    root = make_root(tmp_path, "", {})
    (root / "proc/self/cgroup").unlink()
    assert (total_memory_bytes(root), available_memory_bytes(root)) == (1024000, 819200)


def test_a_kernel_that_does_not_say(tmp_path: Path) -> None:
    root = make_root(tmp_path, "", {})
    (root / "proc/meminfo").write_text("MemFree: 5 kB\n")
    with pytest.raises(OSError, match="no MemTotal"):
        total_memory_bytes(root)


V1_KILLS = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2_KILLS = "low 0\noom 7\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        pytest.param(NESTED, {"parent/own/memory.events": V2_KILLS}, 2, id="v2"),
        pytest.param("0::/\n", {"memory.events": V2_KILLS}, 2, id="v2, in a namespace"),
        pytest.param(NAMED_V1, {"memory/parent/own/memory.oom_control": V1_KILLS}, 3, id="v1"),
        pytest.param(
            NAMED_V1, {"memory/memory.oom_control": V1_KILLS}, 3, id="v1, seen from a container"
        ),
        pytest.param(
            NAMED_V1 + "0::/x\n",
            {"memory/parent/own/memory.oom_control": V1_KILLS, "unified/x": ""},
            3,
            id="both, and v1 counts",
        ),
        pytest.param(
            NESTED,
            {"parent/own/memory.events": V2_KILLS, "parent/memory.events": "oom_kill 9\n"},
            2,
            id="its own, not its parent's",
        ),
        pytest.param("0::/\n", {}, 5, id="the root group counts nothing: the machine"),
        pytest.param(NESTED, {"parent/own/memory.events": "low 0\n"}, 5, id="an old kernel's"),
    ],
)
def test_oom_kills_are_counted(
    memberships: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    root = make_root(tmp_path, memberships, files)
    (root / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 5\n")
    assert num_oom_kills(root) == expected


def test_a_kernel_that_does_not_count_what_it_kills(tmp_path: Path) -> None:
    root = make_root(tmp_path, NESTED, {})
    assert num_oom_kills(root) is None
    (root / "proc/vmstat").write_text("nr_free_pages 1\n")
    assert num_oom_kills(root) is None


@pytest.mark.parametrize(
    ("limit", "available"),
    [("unlimited", 819200), ("9000000", 819200), ("500000", 90400), ("9", 0)],
)
def test_a_limit_of_the_address_space_counts_what_is_mapped(
    limit: str, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.observability.machine_memory.PAGE_BYTES", 4096)
    root = make_root(tmp_path, "0::/\n", {})
    (root / "proc/self/limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max resident set          unlimited            unlimited            bytes     \n"
        f"Max address space         {limit:<20} unlimited            bytes     \n"
    )
    (root / "proc/self/statm").write_text("100 5 1 1 0 9 0\n")
    assert available_memory_bytes(root) == available
