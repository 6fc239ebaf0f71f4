"""Which launches may begin early; what they do then, only a GPU shows."""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton import dependent_launch
from quire.kernels.triton.dependent_launch import launch_options


def test_no_kernel_on_the_cpu_begins_early():
    assert launch_options(torch.device("cpu")) == {"IS_EARLY": False}


@pytest.mark.parametrize(("capability", "is_early"), [((8, 9), False), ((9, 0), True)])
def test_kernels_begin_early_from_sm_90_on(monkeypatch, capability, is_early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dependent_launch._can_begin_early.cache_clear()
    options = launch_options(torch.device("cuda", 0))
    dependent_launch._can_begin_early.cache_clear()
    assert options == ({"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False})
