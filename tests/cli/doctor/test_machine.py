"""Reading a machine: made-up kernel files, and the real one."""

import socket
import sys
from pathlib import Path

import pytest

from quire.cli.doctor.machine import EXTRAS, read_machine

CPUINFO = """processor\t: 0
model name\t: A Processor
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 something

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""
MEMINFO = "MemTotal:       4194304 kB\nMemAvailable:   2097152 kB\n"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/cpuinfo": CPUINFO,
            "proc/meminfo": MEMINFO,
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
        },
    )
    machine = read_machine(0, measure=False, root=root)
    assert machine.processor == "A Processor"
    assert machine.isa_flags == ("avx2", "avx512f", "avx512_bf16")
    assert machine.physical_bytes == machine.memory_bytes == 4 << 30
    assert machine.available_bytes == 2 << 30
    assert machine.transparent_huge_pages == "never"
    assert machine.cpu_limit == 3.0


def test_this_machine_can_be_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        machine = read_machine(taken.getsockname()[1], measure=True)
    assert not machine.is_port_free
    assert machine.torch_version is not None and machine.torch_error is None
    assert machine.kernels is not None and machine.kernels.num_threads >= 1
    assert 1 <= machine.num_usable <= machine.num_processors
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.read_bytes_per_s is not None and machine.read_bytes_per_s > 1e8
    assert machine.cache_free_bytes is not None
    assert set(machine.extras) == set(EXTRAS)


def test_without_torch_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    machine = read_machine(0, measure=False)
    assert machine.torch_version is None and machine.kernels is None
    assert machine.torch_error is not None and "torch" in machine.torch_error
    assert machine.is_port_free  # 0: any
