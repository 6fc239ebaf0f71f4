"""How many processors a process may use, by trees of files that look like the kernel's."""

import os
import time
from pathlib import Path

import pytest

from quire.observability.machine_processors import cpu_limit, processor_s, usable_processors

V2_MOUNT = "30 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
CONTAINER_V1_MOUNT = (
    "41 40 0:31 /docker/c1 /sys/fs/cgroup/cpu,cpuacct ro master:9 - cgroup cgroup rw,cpu,cpuacct\n"
)
HYBRID_MOUNTS = (
    "31 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "32 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 30 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


def v2(folder: str, text: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/cpu.max": text + "\n"}


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    numbers = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    return {f"sys/fs/cgroup/{folder}/{name}": f"{number}\n" for name, number in numbers.items()}


def make_root(root: Path, memberships: str, mounts: str, files: dict[str, str]) -> Path:
    texts = {"proc/self/cgroup": memberships, "proc/self/mountinfo": mounts, **files}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(text))
    return root


NESTED = "0::/system.slice/quire.service\n"


@pytest.mark.parametrize(
    ("memberships", "mounts", "files", "expected"),
    [
        pytest.param("0::/\n", V2_MOUNT, v2("", "50000 100000"), 0.5, id="v2: a container's"),
        pytest.param(NESTED, V2_MOUNT, v2("system.slice", "max 100000"), None, id="v2: none"),
        pytest.param(
            NESTED, V2_MOUNT, v2("system.slice/quire.service", "250000 100000"), 2.5, id="CPUQuota="
        ),
        pytest.param(
            NESTED,
            V2_MOUNT,
            v2("system.slice/quire.service", "400000 100000") | v2("system.slice", "30000 10000"),
            3.0,
            id="v2: a parent's limit is tighter",
        ),
        pytest.param(
            "0::/docker/c1\n", V2_MOUNT, v2("", "200000 100000"), 2.0, id="--cgroupns=host"
        ),
        pytest.param(
            "0::/../other\n", V2_MOUNT, v2("", "200000 100000"), 2.0, id="outside its namespace"
        ),
        pytest.param(
            "0::/gone (deleted)\n", V2_MOUNT, v2("", "100000 100000"), 1.0, id="a deleted group"
        ),
        pytest.param(
            "0::/a:b/c d\n",
            V2_MOUNT.replace("/sys/fs/cgroup", "/run/own\\040groups"),
            {"run/own groups/a:b/c d/cpu.max": "150000 100000\n"},
            1.5,
            id="odd names, mounted elsewhere",
        ),
        pytest.param(
            "0::/caf\udce9\n",
            f"29 23 8:1 / /media/caf\udce9 rw - vfat /dev/sda1 rw\n{V2_MOUNT}",
            v2("caf\udce9", "150000 100000"),
            1.5,
            id="names that are not UTF-8",
        ),
        pytest.param(
            "3:memory:/a\n2:cpu,cpuacct:/a/b\n",
            "",
            v1("cpu/a", -1) | v1("cpu/a/b", 150_000),
            1.5,
            id="v1, no table of mounts",
        ),
        pytest.param(
            "2:cpu,cpuacct:/docker/c1/own\n",
            CONTAINER_V1_MOUNT,
            v1("cpu,cpuacct/own", 800_000) | v1("cpu,cpuacct", 600_000),
            6.0,
            id="v1: a container's",
        ),
        pytest.param(
            "4:cpuset:/\n2:cpu,cpuacct:/slurm/job_7/step_0\n0::/slurm\n",
            HYBRID_MOUNTS,
            v1("cpu,cpuacct/slurm/job_7", 700_000),
            7.0,
            id="hybrid: Slurm's job",
        ),
        pytest.param("5:cpuset:/a\n", HYBRID_MOUNTS, v1("cpuset/a", 100_000), None, id="no cpu"),
        pytest.param("0::/\n", V2_MOUNT, v2("", "nothing known"), None, id="no numbers"),
        pytest.param("0::/\n", V2_MOUNT, v2("", "100000 0"), None, id="no period"),
    ],
)
def test_the_tightest_control_group_limits_the_processors(
    memberships: str, mounts: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert cpu_limit(make_root(tmp_path, memberships, mounts, files)) == expected


def test_where_control_groups_are_not_shown_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) is None
    assert usable_processors(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"), [("max", 6), ("800000", 6), ("250000", 2), ("50000", 1)]
)
def test_the_affinity_and_the_limit_both_bind(
    quota: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    root = make_root(tmp_path, "0::/\n", V2_MOUNT, v2("", f"{quota} 100000"))
    assert usable_processors(root) == expected


def test_this_machine_can_be_asked() -> None:
    assert 1 <= usable_processors() <= len(os.sched_getaffinity(0))


def test_processor_time_of_a_process_is_known_while_it_lives(tmp_path: Path) -> None:
    own_s = processor_s(os.getpid())
    assert own_s is not None and abs(own_s - time.process_time()) < 1.0
    assert processor_s(None) is None
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    numbers = " ".join(map(str, range(4, 45)))
    (folder / "stat").write_text(f"7 (a) b) c) S {numbers}")
    ticks = 14 + 15  # the fields utime and stime, counted from 1
    assert processor_s(7, tmp_path) == ticks / os.sysconf("SC_CLK_TCK")
