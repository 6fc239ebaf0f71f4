"""Reading GPUs: of an nvidia-smi that is made up, and of the torch that is here."""

from pathlib import Path

import pytest
import torch

from quire.cli.doctor.gpu import Gpu, GpuSoftware, read_gpu_software, read_gpus


def install_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_the_gpus_of_nvidia_smi_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "NVIDIA H200, 143771, 512, 580.159.03\\nMy, GPU, [N/A], [N/A], 1"
    install_smi(
        tmp_path, monkeypatch, f'[ "$2" = "--format=csv,noheader,nounits" ] && printf "{lines}"'
    )
    assert read_gpus() == (
        Gpu("NVIDIA H200", 143771 << 20, 512 << 20, "580.159.03"),
        Gpu("My, GPU", 0, 0, "1"),
    )


def test_no_driver_and_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smi(tmp_path, monkeypatch, "echo failed to talk to the driver; exit 9")
    assert read_gpus() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert read_gpus() == ()


def test_the_software_that_is_installed() -> None:
    software = read_gpu_software()
    assert isinstance(software, GpuSoftware)
    assert software.cuda == torch.version.cuda
    assert software.num_usable == len(software.capabilities) == torch.cuda.device_count()


def test_a_torch_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    software = read_gpu_software()
    assert (software.cuda, software.capabilities) == ("13.0", ((9, 0), (9, 1)))
