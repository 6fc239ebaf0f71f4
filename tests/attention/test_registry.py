"""Names to backends."""

import pytest

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.registry import backend_names, select
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels, NativeUnavailableError, load_library


def kernels_or_skip() -> NativeKernels:
    try:
        return NativeKernels(load_library(), num_threads=1)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def test_each_name_gives_a_new_backend():
    kernels = kernels_or_skip()
    for name in backend_names():
        assert select("cpu", name, kernels) is not select("cpu", name, kernels)


def test_native_kernels_serve_where_they_are_and_torch_elsewhere():
    assert isinstance(select("cpu"), TorchPagedAttention)
    assert isinstance(select("cpu", kernels=kernels_or_skip()), CpuPagedAttention)


def test_native_attention_without_kernels_is_refused():
    with pytest.raises(ConfigurationError, match="'native' does not serve device 'cpu'"):
        select("cpu", "native")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'flash' is unknown; there is: .*torch"):
        select("cpu", "flash")


def test_an_unknown_name_is_refused_on_an_unknown_device_too():
    with pytest.raises(ConfigurationError, match="'flash' is unknown"):
        select("cuda:1", "flash")


def test_a_device_without_a_backend_is_refused():
    with pytest.raises(ConfigurationError, match="no attention backend serves device 'cuda:1'"):
        select("cuda:1")


def test_a_backend_that_does_not_serve_the_device_is_refused():
    with pytest.raises(ConfigurationError, match="'torch' does not serve device 'cuda:1'"):
        select("cuda:1", "torch")
