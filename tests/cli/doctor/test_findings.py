"""`quire doctor`: from readings of made-up machines to sentences, and the exit code."""

import re
from dataclasses import replace

import pytest

from quire.cli.doctor.findings import describe, examine, findings
from quire.cli.doctor.gpu import Gpu, GpuSoftware
from quire.cli.doctor.machine import Kernels, Machine

GIB = 1 << 30

SOUND = Machine(
    processor="A Processor",
    isa_flags=("avx2", "avx512f"),
    num_processors=8,
    num_usable=8,
    cpu_limit=None,
    physical_bytes=32 * GIB,
    memory_bytes=32 * GIB,
    available_bytes=20 * GIB,
    transparent_huge_pages="madvise",
    torch_version="2.13.0",
    kernels=Kernels("avx512", 8, ("avx2", "portable")),
    extras={"fast": (), "otel": (), "bench": ()},
    cache_folder="/home/someone/.cache",
    cache_free_bytes=100 * GIB,
    read_bytes_per_s=50e9,
    port=8000,
    is_port_free=True,
)

H200 = Gpu("NVIDIA H200", 140 * GIB, GIB, "580.1")
READY = GpuSoftware("13.0", 1, ((9, 0),), "3.6.0")

BYTES = "each token reads all weights once"


def advices(machine: Machine) -> list[str]:
    found = list(findings(machine))
    assert not any(finding.is_problem for finding in found)
    return [finding.text for finding in found]


def test_a_sound_machine_gets_one_advice() -> None:
    (advice,) = advices(SOUND)
    assert advice.startswith(BYTES)
    assert "At 50 GB/s" in advice and "at most 25 tokens/s" in advice and "50 in int8" in advice


def test_an_unmeasured_bandwidth_gives_no_figure() -> None:
    unmeasured = replace(SOUND, read_bytes_per_s=None)
    (advice,) = advices(unmeasured)
    assert "GB/s" not in advice
    assert any("not measured" in line for line in describe(unmeasured))


def test_a_gpu_that_can_be_used_is_described_and_leaves_nothing_to_advise() -> None:
    machine = replace(SOUND, gpus=(H200,), gpu_software=READY)
    (advice,) = advices(machine)
    assert advice.startswith(BYTES)
    lines = "\n".join(describe(machine))
    assert "NVIDIA H200, 140.0 GiB, 1.0 GiB in use, driver 580.1" in lines
    assert "torch for CUDA 13.0; 1 GPU usable (compute capability 9.0); triton 3.6.0" in lines
    assert "GPU software" not in "\n".join(describe(SOUND))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"kernels": Kernels("torch", 8, reason="x was not built")},
            "there is no C\\+\\+ compiler; torch computes",
        ),
        (
            {"kernels": Kernels("torch", 8, reason="x was not built", compiler="/usr/bin/g++")},
            "can't be used \\(x was not built\\); torch computes",
        ),
        (
            {"kernels": Kernels("avx2", 8, ("portable",), for_tests=("avx2", "portable"))},
            "kernels of avx2 were compiled for tests, so they are slow",
        ),
        ({"transparent_huge_pages": "never"}, "transparent huge pages are off"),
        ({"gpus": (H200,)}, "there is a GPU, but torch was built without CUDA"),
        (
            {"gpus": (H200,), "gpu_software": GpuSoftware("13.0", 0, (), "3.6.0")},
            "with CUDA 13.0, can't use the GPU: driver 580.1 is too old",
        ),
        (
            {"gpus": (H200,), "gpu_software": GpuSoftware("13.0", 1, ((9, 0),), None)},
            "Triton, .* is missing: pip install triton",
        ),
        (
            {"gpus": (H200,), "gpu_software": replace(READY, obstacle="no C compiler")},
            "quire's GPU kernels can't run: no C compiler",
        ),
        (
            {"gpus": (H200,), "gpu_software": GpuSoftware("13.0", 1, ((7, 5),), "3.6.0")},
            "can't multiply bfloat16: give --dtype float16",
        ),
        (
            {"gpus": (replace(H200, used_bytes=20 * GIB),), "gpu_software": READY},
            "other programs hold 20.0 GiB of the NVIDIA H200's 140.0 GiB",
        ),
        (
            {
                "gpus": (H200, H200),
                "gpu_software": replace(READY, num_usable=2, capabilities=((9, 0), (9, 0))),
            },
            "--tensor-parallel-size 2 shares each layer",
        ),
        ({"cache_free_bytes": GIB}, "the disk of /home/someone/.cache has 1.0 GiB left"),
        ({"extras": {"fast": ("httptools",)}}, "`pip install httptools`: with it the server"),
    ],
)
def test_an_advice_says_what_would_be_better(change: dict[str, object], expected: str) -> None:
    first, last = advices(replace(SOUND, **change))  # type: ignore[arg-type]
    assert re.search(expected, first), first
    assert last.startswith(BYTES)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"torch_version": None, "torch_error": "No module named 'torch'", "kernels": None},
            "torch can't be imported (No module named 'torch'); install it",
        ),
        ({"available_bytes": GIB // 2}, "only 512.0 MiB of memory are available"),
        ({"is_port_free": False}, "port 8000 is in use"),
    ],
)
def test_a_problem_is_told_first_and_is_the_exit_code(
    change: dict[str, object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(SOUND, **change)  # type: ignore[arg-type]
    assert examine(8000, measure=False, read=lambda port, measure: machine) == 1
    _, _, printed = capsys.readouterr().out.partition("\n\n")
    assert printed.startswith(f"problem: {expected}")


def test_doctor_prints_a_line_for_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    limited = replace(
        SOUND,
        cpu_limit=4.0,
        memory_bytes=8 * GIB,
        extras={"fast": (), "otel": ("a", "b"), "bench": ("accelerate",)},
    )
    calls = []

    def read(port: int, measure: bool) -> Machine:
        calls.append((port, measure))
        return limited

    assert examine(81, measure=True, read=read) == 0
    assert calls == [(81, True)]
    printed = capsys.readouterr().out
    for expected in (
        "torch 2.13.0",
        "processor   A Processor",
        "features    avx2 avx512f",
        "cores       8, of which this process may use 8; control group: the time of 4",
        "memory      32.0 GiB, 20.0 GiB available; control group: 8.0 GiB",
        "huge pages  madvise",
        "reads       50.0 GB/s",
        "GPU         none",
        "kernels     avx512, 8 threads; also there: avx2, portable",
        "extras      fast, otel (not installed), bench (lacks accelerate)",
        "model cache /home/someone/.cache, 100.0 GiB free",
        "port        8000 is free",
    ):
        assert expected in printed
