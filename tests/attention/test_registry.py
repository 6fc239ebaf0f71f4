"""Names to backends."""

import pytest

from quire.attention.registry import backend_names, select
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError


def test_each_name_gives_a_new_backend():
    for name in backend_names():
        assert select("cpu", name) is not select("cpu", name)


def test_torch_serves_where_none_is_named():
    assert isinstance(select("cpu"), TorchPagedAttention)


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
