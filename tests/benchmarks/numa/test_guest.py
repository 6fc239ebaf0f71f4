"""The guest with two memory nodes: its files and its command; what is judged of what it prints."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from benchmarks.numa.guest import MODULES, machine, make_image
from benchmarks.numa.page_count import nodes_of, pages_of
from benchmarks.numa.placement import judge

from quire.kernels.cpu.memory import allocate
from quire.numa.system_calls import PAGE_BYTES


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """An unpacked package with nothing in its files."""
    root = tmp_path / "kernel"
    for path in ("boot/vmlinuz-6", f"lib/modules/6/kernel/{MODULES[-1]}.ko"):
        (root / path).parent.mkdir(parents=True)
        (root / path).touch()
    return root


def test_the_guest_has_two_nodes_of_two_cores(kernel: Path, tmp_path: Path) -> None:
    words = " ".join(machine(kernel, tmp_path / "image", kvm=False))
    assert "-smp 4,sockets=2,cores=2" in words
    assert "node,nodeid=1,cpus=2-3,memdev=m1" in words
    assert "readonly=on" in words and "-net none" in words
    assert f"-kernel {kernel}/boot/vmlinuz-6" in words


@pytest.mark.skipif(
    not (shutil.which("busybox") and shutil.which("cpio")), reason="needs busybox and cpio"
)
def test_the_image_holds_the_command_and_the_modules(kernel: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path, kernel, ["python", "-c", "print('a b')"])
    with image.open("rb") as file:
        listed = subprocess.run(["cpio", "-t", "--quiet"], stdin=file, capture_output=True)
    names = listed.stdout.decode().split()
    assert {"./init", "./bin/busybox", "./command", "./modules/9p.ko"} <= {
        name if name.startswith("./") else f"./{name}" for name in names
    }
    assert "print('\"'\"'a b'\"'\"')" in (tmp_path / "root/command").read_text()


def test_pages_are_those_within_a_tensor() -> None:
    memory = allocate(3 << 20)
    pages = pages_of(memory[100:])
    assert len(pages) == (3 << 20) // PAGE_BYTES - 1
    assert pages_of(torch.zeros(8)) == set()
    memory[:PAGE_BYTES] = 1
    assert sum(nodes_of(pages_of(memory)).values()) <= len(pages) + 1


@pytest.mark.parametrize(
    ("counts", "tokens", "good"),
    [
        ([{"weights": {"1": 100}, "kv": {"1": 99, "0": 1}}], [[1]], True),
        ([{"weights": {"1": 100}, "kv": {"1": 98, "0": 2}}], [[1]], False),
        ([{"weights": {"0": 100}, "kv": {"1": 100}}], [[1]], False),
        ([{"weights": {"1": 100}, "kv": {"1": 100}}], [[2]], False),
    ],
)
def test_a_case_is_good_where_pages_and_tokens_are(
    counts: list[dict[str, dict[str, int]]], tokens: list[list[int]], good: bool
) -> None:
    assert judge("replica", {"tokens": tokens, "counts": counts}, [1], {"tokens": [[1]]}) == good
    assert not judge("replica", {"error": "OSError()"}, [1], {"tokens": [[1]]})
