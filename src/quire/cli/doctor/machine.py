"""Reads a machine's processor, memory, limits, kernels and disk.

For `quire doctor`, which interprets the readings in `findings`. Facts that can't be read are None
or empty. If torch is missing or broken, a finding says so. Linux's files are read below `root`, so
that tests can provide their own.
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
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""Processor flags that decide how fast a model is computed."""

EXTRAS = {
    "fast": ("httptools",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "bench": ("transformers", "accelerate", "matplotlib", "psutil"),
}
"""Maps each extra of the package to the modules that it installs."""

MEASURE_S = 0.3


@dataclass(frozen=True, slots=True)
class Kernels:
    """The CPU kernels that an engine would use on this machine, and the alternatives."""

    #: An instruction set of the native library, or "torch".
    chosen: str
    #: The number of threads that an engine uses by default.
    num_threads: int
    #: Further instruction sets of the native library that run on this machine.
    others: tuple[str, ...] = ()
    #: Instruction sets among all these whose kernels were compiled for tests, and are slow.
    for_tests: tuple[str, ...] = ()
    #: The reason why the native kernels can't be used; None if they can.
    reason: str | None = None
    #: The compiler that could build the native kernels; None if there is no compiler, or if the
    #: kernels are already usable.
    compiler: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The readings of one machine."""

    processor: str
    isa_flags: tuple[str, ...]
    num_processors: int
    #: The number of processors that this process may run on.
    num_usable: int
    #: CPU time that control groups allow, in processors; None if they set no limit.
    cpu_limit: float | None
    physical_bytes: int
    #: The physical memory, or the control groups' limit if that is less.
    memory_bytes: int
    available_bytes: int
    #: The memory nodes and cores that this process may use.
    topology: Topology = field(default_factory=lambda: Topology((), ()))
    #: "always", "madvise" or "never"; None if unknown.
    transparent_huge_pages: str | None
    gpus: tuple[Gpu, ...] = ()
    gpu_software: GpuSoftware = field(default_factory=GpuSoftware)
    #: The version of torch; None if it can't be imported, for the reason in torch_error.
    torch_version: str | None
    torch_error: str | None = None
    #: The kernels of an engine on the CPU; None if torch can't be imported.
    kernels: Kernels | None
    #: Maps each extra to its missing modules.
    extras: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cache_folder: str
    #: Free bytes on the cache folder's disk; None if no parent of the folder exists.
    cache_free_bytes: int | None
    #: Bytes per second that all usable processors together read from memory; None if not measured.
    read_bytes_per_s: float | None
    port: int
    is_port_free: bool


def read_machine(port: int, *, measure: bool, root: Path = ROOT) -> Machine:
    """Read this machine's facts. With `measure`, also time reads of memory for MEASURE_S
    seconds."""
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
    """The topology. Empty if the system doesn't show it; engines then bind nothing."""
    try:
        return read_topology(root)
    except (OSError, ValueError):
        return Topology((), ())


def _pairs(path: Path) -> dict[str, str]:
    """Parse the "key: value" lines of a kernel file, and keep the first line of each key."""
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
    """The setting of transparent huge pages: the word in brackets of "always [madvise] never"."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    text = path.read_text() if path.is_file() else ""
    return text.partition("[")[2].partition("]")[0] or None


def _torch() -> tuple[str | None, str | None]:
    """(version, None), or (None, the reason why torch can't be imported)."""
    try:
        import torch  # takes a second, and may be missing or broken
    except (ImportError, OSError) as error:
        return None, str(error).partition("\n")[0]
    return str(torch.__version__), None


def _kernels() -> Kernels:
    # Both import torch.
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
        library = load_library()
    except NativeUnavailableError as error:
        return Kernels("torch", usable_processors(), reason=str(error), compiler=compiler)
    chosen, *others = library.isas()
    return Kernels(
        chosen,
        usable_processors(),
        tuple(others),
        for_tests=library.isas_for_tests(),
        compiler=compiler,
    )


def _missing(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in modules if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _cache_folder() -> Path:
    """The folder of models downloaded from the hub."""
    from huggingface_hub import constants  # reads the environment variables

    return Path(constants.HF_HUB_CACHE)


def _free_bytes(folder: Path) -> int | None:
    """Free bytes on the disk of the folder, or of its nearest existing parent."""
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
