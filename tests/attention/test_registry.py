"""Names to backends."""

import pytest

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.registry import backend_names, select
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels, NativeUnavailableError, load_library
from quire.kernels.triton import support


def kernels_or_skip() -> NativeKernels:
    try:
        return NativeKernels(load_library(), num_threads=1)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["native", "triton", "torch"])
def test_each_name_gives_a_new_backend(name):
    if name == "triton":
        pytest.importorskip("triton")
    kernels = kernels_or_skip()
    assert name in backend_names()
    assert select("cpu", name, kernels) is not select("cpu", name, kernels)


def test_native_kernels_serve_where_they_are_and_torch_elsewhere():
    assert isinstance(select("cpu"), TorchPagedAttention)
    assert isinstance(select("cpu", kernels=kernels_or_skip()), CpuPagedAttention)


def test_native_attention_without_kernels_is_refused():
    with pytest.raises(ConfigurationError, match="'native' needs the native kernels"):
        select("cpu", "native")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'flash' is unknown; there is: .*torch"):
        select("cpu", "flash")


def test_an_unknown_name_is_refused_on_an_unknown_device_too():
    with pytest.raises(ConfigurationError, match="'flash' is unknown"):
        select("cuda:1", "flash")


def test_a_device_without_a_backend_is_refused():
    with pytest.raises(ConfigurationError, match="no attention backend serves device 'mps:1'"):
        select("mps:1")


def test_a_gpu_is_served_by_triton(monkeypatch):
    """Built on a machine without one: it is bound to memory later."""
    module = pytest.importorskip("quire.attention.triton_paged")
    monkeypatch.setattr(support, "why_not", lambda device_type: None)
    assert isinstance(select("cuda:1"), module.TritonPagedAttention)


def test_triton_that_cannot_run_is_refused_with_the_reason():
    pytest.importorskip("triton")
    with pytest.raises(ConfigurationError, match="'triton' can't run: TRITON_INTERPRET is set"):
        select("cuda:0")


def test_batch_invariance_is_obeyed_or_refused():
    pytest.importorskip("triton")
    assert select("cpu", "triton", batch_invariant=True).is_batch_invariant
    assert not select("cpu", "triton").is_batch_invariant
    with pytest.raises(ConfigurationError, match="'torch' can't obey batch_invariant=True"):
        select("cpu", "torch", batch_invariant=True)
    with pytest.raises(ConfigurationError, match="'flashinfer' can't obey batch_invariant=True"):
        select("cuda", "flashinfer", batch_invariant=True)


def test_a_backend_that_does_not_serve_the_device_is_refused():
    with pytest.raises(ConfigurationError, match="'torch' does not serve device 'cuda:1'"):
        select("cuda:1", "torch")
