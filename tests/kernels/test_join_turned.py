"""Joined parts of heads by the definition, and refused shapes."""

import pytest
import torch

from quire.kernels.join_turned import join_turned
from quire.kernels.rotary import Angles, rotary

TABLE = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([4, 0, 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tail_is_turned_by_its_position(dtype):
    x, tail = torch.randn(3, 2, 10).to(dtype), torch.randn(3, 2, 6).to(dtype)
    angles = Angles(TABLE, POSITIONS, dtype)
    before = tail.clone()
    found = join_turned(x, tail, angles)
    turned, _ = rotary(tail, tail, *angles.cos_sin())
    assert torch.equal(found, torch.cat((x, turned), dim=-1))
    assert torch.equal(tail, before)


def test_refuses_other_angles():
    angles = Angles(TABLE, POSITIONS, torch.float32)
    with pytest.raises(ValueError, match=r"angles of 6 elements need \(3, 2, 6\)"):
        join_turned(torch.zeros(3, 2, 10), torch.zeros(3, 2, 4), angles)
