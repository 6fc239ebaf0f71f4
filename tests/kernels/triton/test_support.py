"""Whether the kernels can run, in words; sizes of tiles; rows as they lie."""

import importlib
import sys

import pytest
import torch

import quire.kernels.triton
from quire.kernels.triton import support


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for device_type in ("cpu", "cuda"):
        assert "pip install triton" in (support.why_not(device_type) or "")


def test_support_loads_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    importlib.reload(quire.kernels.triton)
    assert importlib.reload(support).next_power_of_two(3) == 4


@pytest.mark.parametrize(
    ("device_type", "is_interpreting", "expected"),
    [
        ("cpu", True, None),
        ("cpu", False, "set TRITON_INTERPRET=1"),
        ("cuda", False, None),
        ("cuda", True, "unset it"),
        ("mps", False, "not 'mps'"),
    ],
)
def test_why_not_says_which_devices_triton_serves(
    monkeypatch, device_type, is_interpreting, expected
):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", is_interpreting)
    monkeypatch.setattr(support, "_why_not_launched", lambda: None)
    found = support.why_not(device_type)
    assert found is expected if expected is None else expected in (found or "")


def test_launching_kernels_needs_a_compiler_and_headers(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "install gcc or clang" in (support.why_not("cuda") or "")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h is missing" in (support.why_not("cuda") or "")
    (tmp_path / "Python.h").touch()
    assert support.why_not("cuda") is None


def test_tests_interpret():
    pytest.importorskip("triton")
    assert support.is_interpreting()


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 4), (80, 128), (128, 128)])
def test_the_next_power_of_two(count, expected):
    assert support.next_power_of_two(count) == expected


def test_rows_are_views_where_they_lie_evenly():
    x = torch.arange(4 * 6 * 5).view(4, 6, 5)
    assert support.as_rows(x[:, 2]).data_ptr() == x[:, 2].data_ptr()
    assert torch.equal(support.as_rows(x[:, 1:3]), x[:, 1:3].reshape(-1, 5))
    assert support.as_rows(x.transpose(1, 2)).stride(1) == 1
    assert support.as_rows(x[:0]).shape == (0, 5)


@pytest.mark.parametrize("other", [torch.zeros(1).half(), torch.zeros(1, device="meta")])
def test_tensors_that_differ_are_named(other):
    with pytest.raises(ValueError, match=r"k is torch\.float32 on cpu, but must be as q"):
        support.check_same("k", torch.zeros(1), "q", other)
