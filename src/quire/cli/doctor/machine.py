"""Reads a machine's processor, memory, limits, kernels and disk.

For `quire doctor`. Only looks: what it means is said in `findings`. What can't be read is None or
empty; torch may be missing or broken, which is then one of the findings. Linux's files are read
below `root`, so that tests can bring their own.
"""

import importlib.util
import os
import platform
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

from quire.cli.doctor.gpu import Gpu, GpuSoftware, read_gpu_software, read_gpus
from quire.numa.topology import Topology, read_topology
from quire.observability.machine_memory import available_memory_bytes, total_memory_bytes
from quire.observability.machine_processors import cpu_limit, usable_processors
from quire.observability.memory_speed import measure_reads

ROOT = Path("/")

ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""Of all the processor's flags, those that decide how fast a model is computed."""

EXTRAS = {
    "fast": ("httptools",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "bench": ("transformers", "accelerate", "matplotlib", "psutil"),
}
"""Extra of the package -> the modules that it brings."""

MEASURE_S = 0.3


@dataclass(frozen=True, slots=True)
class Kernels:
    """What would compute. chosen: "torch", or an instruction set of the native library. others:
    that run here, too. num_threads: used where no option sets it. reason: why the native ones can't
    be had. compiler: to build them with."""

    chosen: str
    num_threads: int
    others: tuple[str, ...] = ()
    reason: str | None = None
    compiler: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Readings of one machine.

    num_processors: that there are; num_usable: that this process may run on. cpu_limit: processors'
        worth of time that control groups allow; None: no limit.
    memory_bytes: the control groups' limit included; physical_bytes: without it.
    topology: memory nodes and cores, as far as this process may use them.
    transparent_huge_pages: "always", "madvise" or "never".
    torch_version: None: torch can't be imported, for the reason in torch_error.
    extras: name -> the modules of it that are missing.
    read_bytes_per_s: of memory, by all usable processors; None: not measured.
    """

    processor: str
    isa_flags: tuple[str, ...]
    num_processors: int
    num_usable: int
    cpu_limit: float | None
    physical_bytes: int
    memory_bytes: int
    available_bytes: int
    topology: Topology = field(default_factory=lambda: Topology((), ()))
    transparent_huge_pages: str | None
    gpus: tuple[Gpu, ...] = ()
    gpu_software: GpuSoftware = field(default_factory=GpuSoftware)
    torch_version: str | None
    torch_error: str | None = None
    kernels: Kernels | None
    extras: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cache_folder: str
    cache_free_bytes: int | None
    read_bytes_per_s: float | None
    port: int
    is_port_free: bool


def read_machine(port: int, *, measure: bool, root: Path = ROOT) -> Machine:
    """Look at this machine. measure: also read memory for MEASURE_S seconds."""
    torch_version, torch_error = _torch()
    cache_folder = _cache_folder()
    meminfo = _pairs(root / "proc/meminfo")
    available_bytes = available_memory_bytes(root)
    return Machine(
        processor=_processor(root),
        isa_flags=_isa_flags(root),
        num_processors=os.cpu_count() or 1,
        num_usable=len(os.sched_getaffinity(0)),
        cpu_limit=cpu_limit(root),
        physical_bytes=int(meminfo.get("MemTotal", "0").split()[0]) * 1024,
        memory_bytes=total_memory_bytes(root),
        available_bytes=available_bytes,
        topology=_topology(root),
        transparent_huge_pages=_huge_pages(root),
        gpus=read_gpus(),
        gpu_software=GpuSoftware() if torch_version is None else read_gpu_software(),
        torch_version=torch_version,
        torch_error=torch_error,
        kernels=None if torch_version is None else _kernels(),
        extras={name: _missing(modules) for name, modules in EXTRAS.items()},
        cache_folder=str(cache_folder),
        cache_free_bytes=_free_bytes(cache_folder),
        read_bytes_per_s=_read_speed(available_bytes) if measure else None,
        port=port,
        is_port_free=_is_free(port),
    )


def _read_speed(available_bytes: int) -> float:
    return measure_reads(usable_processors(), available_bytes, MEASURE_S)


def _topology(root: Path) -> Topology:
    """Empty where the system doesn't show it: engines bind nothing then."""
    try:
        return read_topology(root)
    except (OSError, ValueError):
        return Topology((), ())


def _pairs(path: Path) -> dict[str, str]:
    """The lines "key: value" of a file of the kernel's, the first of each key."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def _processor(root: Path) -> str:
    info = _pairs(root / "proc/cpuinfo")
    return info.get("model name") or platform.processor() or platform.machine()


def _isa_flags(root: Path) -> tuple[str, ...]:
    info = _pairs(root / "proc/cpuinfo")
    there = set(f"{info.get('flags', '')} {info.get('Features', '')}".split())
    return tuple(flag for flag in ISA_FLAGS if flag in there)


def _huge_pages(root: Path) -> str | None:
    """The word in brackets of "always [madvise] never"."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    text = path.read_text() if path.is_file() else ""
    return text.partition("[")[2].partition("]")[0] or None


def _torch() -> tuple[str | None, str | None]:
    """(version, None), or (None, why it can't be imported)."""
    try:
        import torch  # a second, and it may be missing or broken
    except (ImportError, OSError) as error:
        return None, str(error).partition("\n")[0]
    return str(torch.__version__), None


def _kernels() -> Kernels:
    # Both bring torch.
    from quire.kernels.cpu import build
    from quire.kernels.cpu.library import (
        NativeUnavailableError,
        load_library,
    )

    try:
        compiler = build.find_compiler()
    except build.BuildError:
        compiler = None
    try:
        chosen, *others = load_library().isas()
    except NativeUnavailableError as error:
        return Kernels("torch", usable_processors(), reason=str(error), compiler=compiler)
    return Kernels(chosen, usable_processors(), tuple(others), None, compiler)


def _missing(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in modules if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _cache_folder() -> Path:
    """Where models of the hub are kept."""
    from huggingface_hub import constants  # which reads the environment for it

    return Path(constants.HF_HUB_CACHE)


def _free_bytes(folder: Path) -> int | None:
    """On the disk where the folder is, or would be."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return shutil.disk_usage(place).free
    return None


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
