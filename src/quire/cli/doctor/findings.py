"""Turns a machine's readings into findings: facts, problems and advice.

A problem keeps quire from working on this machine; advice would make it faster. `machine` reads the
machine. Called by `cli.main`.
"""

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.cli.doctor.gpu import Gpu, GpuSoftware
from quire.cli.doctor.machine import EXTRAS, Machine, read_machine
from quire.cli.doctor.nodes import advice_on_nodes, draw_nodes, sum_up_nodes
from quire.core.memory.memory_report import format_bytes
from quire.formats.format_registry import BFLOAT16_BITS, weight_formats
from quire.version import __version__

LEAST_MEMORY_BYTES = 1 << 30
LEAST_DISK_BYTES = 10 << 30
LEAST_CAPABILITY = (8, 0)
LEAST_USED_SHARE = 0.1
"""If other programs hold more than this share of a GPU's memory, advice says so."""

_ABOUT_HALF = 0.6
"""Formats that keep at most this share of the bits, scales included, are reported as halving
them."""

_EXAMPLE_WEIGHTS_BYTES = 2 * 10**9
"""Bytes of the weights of a model with 10^9 parameters in bfloat16."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence that states a problem or gives advice."""

    is_problem: bool
    text: str


def examine(port: int, *, measure: bool, read: Callable[..., Machine] = read_machine) -> int:
    """Print the machine's facts and the findings. Returns the exit code: 1 if any finding is a
    problem."""
    machine = read(port, measure=measure)
    for line in describe(machine):
        print(line)
    found = list(findings(machine))
    print()
    for finding in found:
        print(f"{'problem' if finding.is_problem else 'advice'}: {finding.text}")
    if not found:
        print("no problems, and no advice")
    return int(any(finding.is_problem for finding in found))


def describe(machine: Machine) -> Iterator[str]:
    """Yield the machine's facts as lines, each with a name and a value."""
    torch = machine.torch_version or f"can't be imported ({machine.torch_error})"
    yield f"quire {__version__}, Python {platform.python_version()}, torch {torch}"
    rows = {
        "processor": machine.processor,
        "features": " ".join(machine.isa_flags) or "none that matter",
        "cores": _cores(machine),
        "memory": _memory(machine),
        "NUMA": sum_up_nodes(machine.topology),
        "huge pages": machine.transparent_huge_pages or "unknown",
        "reads": _reads(machine),
        "GPU": "; ".join(map(_gpu, machine.gpus)) or "none",
        "kernels": _kernels(machine),
        "extras": ", ".join(_extra(machine, name) for name in EXTRAS),
        "model cache": _cache(machine),
        "port": f"{machine.port} is {'free' if machine.is_port_free else 'in use'}",
    }
    if machine.gpus:
        rows["GPU software"] = _gpu_software(machine.gpu_software)
    for name, value in rows.items():
        yield f"  {name:<12}{value}"
        if name == "NUMA":
            for line in draw_nodes(machine.topology):
                yield f"  {'':<12}{line}"


def findings(machine: Machine) -> Iterator[Finding]:
    """Yield all findings: first the problems, then the advice."""
    yield from (Finding(True, text) for text in _problems(machine))
    yield from (Finding(False, text) for text in _advices(machine))


def _problems(machine: Machine) -> Iterator[str]:
    if machine.torch_version is None:
        yield (f"torch can't be imported ({machine.torch_error}); install it: pip install torch")
    if machine.available_bytes < LEAST_MEMORY_BYTES:
        yield (
            f"only {format_bytes(machine.available_bytes)} of memory are available; end other"
            " programs, or raise the control group's limit"
        )
    if not machine.is_port_free:
        yield f"port {machine.port} is in use; `quire serve` needs another one: --port"


def _advices(machine: Machine) -> Iterator[str]:
    yield from _advices_on_kernels(machine)
    if machine.transparent_huge_pages == "never":
        yield (
            "transparent huge pages are off, which costs up to a third of the memory's speed; as"
            " root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if not machine.gpus:
        yield from advice_on_nodes(machine.topology)
    if machine.gpus:
        yield from _advices_on_gpus(machine.gpus, machine.gpu_software)
    if machine.cache_free_bytes is not None and machine.cache_free_bytes < LEAST_DISK_BYTES:
        yield (
            f"the disk of {machine.cache_folder} has {format_bytes(machine.cache_free_bytes)} left,"
            " too little for most models; set HF_HOME to a larger one"
        )
    if machine.extras.get("fast"):
        missing = " ".join(machine.extras["fast"])
        yield f"`pip install {missing}`: with it the server spends a quarter less time on HTTP"
    yield _advice_on_bytes(machine)


def _advices_on_kernels(machine: Machine) -> Iterator[str]:
    kernels = machine.kernels
    if kernels is not None and kernels.chosen in kernels.for_tests:
        yield (
            f"the kernels of {kernels.chosen} were compiled for tests, so they are slow: run"
            " `python -m quire.kernels.cpu.build`"
        )
    if kernels is None or kernels.reason is None:
        return
    if kernels.compiler is None:
        yield (
            "the native kernels were not built, and there is no C++ compiler; torch computes, which"
            " is several times slower. Install one (on Debian: apt-get install g++), then run"
            " `python -m quire.kernels.cpu.build`"
        )
    else:
        yield (
            f"the native kernels can't be used ({kernels.reason}); torch computes, which is several"
            " times slower"
        )


def _advices_on_gpus(gpus: tuple[Gpu, ...], software: GpuSoftware) -> Iterator[str]:
    if software.cuda is None:
        yield (
            "there is a GPU, but torch was built without CUDA, so the CPU computes; install torch"
            " for CUDA (https://pytorch.org/get-started)"
        )
        return
    if not software.num_usable:
        yield (
            f"torch, built with CUDA {software.cuda}, can't use the GPU: driver {gpus[0].driver} is"
            " too old for it, or the GPU is hidden (CUDA_VISIBLE_DEVICES); update the driver, or"
            " install torch for an older CUDA"
        )
        return
    if software.triton is None:
        yield "Triton, which quire's GPU kernels are written in, is missing: pip install triton"
    elif software.obstacle is not None:
        yield f"quire's GPU kernels can't run: {software.obstacle}"
    if min(software.capabilities, default=LEAST_CAPABILITY) < LEAST_CAPABILITY:
        yield ("a GPU below compute capability 8.0 can't multiply bfloat16: give --dtype float16")
    for gpu in gpus:
        if gpu.used_bytes > LEAST_USED_SHARE * gpu.memory_bytes:
            yield (
                f"other programs hold {format_bytes(gpu.used_bytes)} of the {gpu.name}'s"
                f" {format_bytes(gpu.memory_bytes)}, which the KV cache goes without; end them"
            )
    if software.num_usable > 1:
        yield (
            f"a model is computed by one GPU of {software.num_usable};"
            f" --tensor-parallel-size {software.num_usable} shares each layer among them"
        )


def _advice_on_bytes(machine: Machine) -> str:
    text = f"each token reads all weights once: --quantization {_smaller_formats()}"
    speed = machine.read_bytes_per_s
    if speed is None:
        return text
    most = speed / _EXAMPLE_WEIGHTS_BYTES
    name, entry = next(iter(weight_formats().items()))
    return (
        f"{text}. At {speed / 1e9:.0f} GB/s a model of a billion parameters decodes at most"
        f" {most:.0f} tokens/s for one client in bfloat16,"
        f" {BFLOAT16_BITS / entry.bits * most:.0f} in {name}"
    )


def _smaller_formats() -> str:
    """The weight formats, with the bytes that each saves: "int8 halves their bytes ..., int4
    ..."."""
    phrases: list[str] = []
    bits = float(BFLOAT16_BITS)
    for name, entry in weight_formats().items():
        is_half = entry.bits / bits <= _ABOUT_HALF
        if not phrases:
            effect = "halves" if is_half else f"leaves {entry.bits / bits:.0%} of"
            phrases.append(f"{name} {effect} their bytes against bfloat16")
        elif is_half:
            phrases.append(f"{name} halves them again")
        else:
            phrases.append(f"{name} leaves {entry.bits / BFLOAT16_BITS:.0%} of them")
        bits = entry.bits
    return ", ".join(phrases)


def _cores(machine: Machine) -> str:
    limit = machine.cpu_limit
    allowed = "no limit" if limit is None else f"the time of {limit:g}"
    return (
        f"{machine.num_processors}, of which this process may use {machine.num_usable};"
        f" control group: {allowed}"
    )


def _memory(machine: Machine) -> str:
    available = format_bytes(machine.available_bytes)
    text = f"{format_bytes(machine.physical_bytes)}, {available} available"
    if machine.memory_bytes < machine.physical_bytes:
        text += f"; control group: {format_bytes(machine.memory_bytes)}"
    return text


def _reads(machine: Machine) -> str:
    if machine.read_bytes_per_s is None:
        return "not measured"
    return f"{machine.read_bytes_per_s / 1e9:.1f} GB/s from memory just now, all cores together"


def _gpu(gpu: Gpu) -> str:
    used = format_bytes(gpu.used_bytes)
    return f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, {used} in use, driver {gpu.driver}"


def _gpu_software(software: GpuSoftware) -> str:
    capabilities = ", ".join(f"{major}.{minor}" for major, minor in software.capabilities)
    plural = "" if software.num_usable == 1 else "s"
    usable = f"{software.num_usable} GPU{plural} usable"
    parts = [
        f"torch for CUDA {software.cuda}" if software.cuda else "torch without CUDA",
        f"{usable} (compute capability {capabilities})" if capabilities else usable,
        f"triton {software.triton or 'not installed'}",
        f"flashinfer {software.flashinfer or 'not installed'} (optional)",
    ]
    return "; ".join(parts)


def _kernels(machine: Machine) -> str:
    kernels = machine.kernels
    if kernels is None:
        return "none without torch"
    if kernels.reason is not None:
        return f"torch, since {kernels.reason}"
    others = f"; also there: {', '.join(kernels.others)}" if kernels.others else ""
    names = ", ".join(kernels.for_tests)
    slow = f"; compiled for tests, so slow: {names}" if names else ""
    return f"{kernels.chosen}, {kernels.num_threads} threads{others}{slow}"


def _extra(machine: Machine, name: str) -> str:
    missing = machine.extras.get(name, ())
    if not missing:
        return name
    whole = len(missing) == len(EXTRAS[name])
    return f"{name} (not installed)" if whole else f"{name} (lacks {', '.join(missing)})"


def _cache(machine: Machine) -> str:
    free = machine.cache_free_bytes
    left = "" if free is None else f", {format_bytes(free)} free"
    return f"{machine.cache_folder}{left}"
