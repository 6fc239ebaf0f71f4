"""Memory for weights: zeros, aligned, and there only once it is written."""

import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import memory
from quire.kernels.cpu.memory import HUGE_PAGE_BYTES, allocate


@pytest.mark.parametrize("num_bytes", [0, 1, 64, HUGE_PAGE_BYTES - 1])
def test_small_memory_is_zeros(num_bytes: int) -> None:
    found = allocate(num_bytes)
    assert found.dtype == torch.uint8 and found.shape == (num_bytes,) and not found.any()


@pytest.mark.parametrize("extra_bytes", [0, 1, 4096, HUGE_PAGE_BYTES - 1])
def test_large_memory_begins_at_a_huge_page(extra_bytes: int) -> None:
    num_bytes = 2 * HUGE_PAGE_BYTES + extra_bytes
    found = allocate(num_bytes)
    assert found.shape == (num_bytes,) and not found.any()
    assert found.data_ptr() % HUGE_PAGE_BYTES == 0
    found.fill_(7)
    assert found[-1] == 7 and found.sum() == 7 * num_bytes


def _mapping(address: int) -> dict[str, str]:
    """The lines of /proc/self/smaps on the mapping that holds an address."""
    lines: dict[str, str] = {}
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            is_ours = first <= address < last
        elif is_ours:
            lines[name] = value.strip()
    return lines


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_huge_pages_are_asked_for_where_they_are_filled_alone() -> None:
    num_bytes = 3 * HUGE_PAGE_BYTES + 5000
    found = allocate(num_bytes)
    whole, rest = _mapping(found.data_ptr()), _mapping(found.data_ptr() + num_bytes - 1)
    assert "hg" in whole["VmFlags:"].split() and "hg" not in rest["VmFlags:"].split()
    assert whole["Rss:"] == "0 kB"
    found[HUGE_PAGE_BYTES] = 1
    resident_kib = int(_mapping(found.data_ptr())["Rss:"].split()[0])
    assert 0 < resident_kib <= HUGE_PAGE_BYTES // 1024


def test_systems_without_huge_pages_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE", raising=False)
    assert not allocate(2 * HUGE_PAGE_BYTES).any()
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 9999, raising=False)  # EINVAL
    assert not allocate(2 * HUGE_PAGE_BYTES).any()
