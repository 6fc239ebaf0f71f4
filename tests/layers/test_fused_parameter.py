"""A parameter of several parts: each is filled by itself."""

import torch

from quire.layers.fused_parameter import FusedParameter


def test_parts_lie_one_after_the_other():
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    fused = FusedParameter((3, 5), (1, 2), has_bias=True, **where)
    parts = torch.randn(3, 1, 2), torch.randn(5, 1, 2)
    slots = fused.slots()
    assert {key: slot.shape for key, slot in slots.items()} == {
        ("weight", 0): (3, 1, 2),
        ("weight", 1): (5, 1, 2),
        ("bias", 0): (3,),
        ("bias", 1): (5,),
    }
    slots["weight", 1].load(2, parts[1][2:])
    slots["weight", 0].load(0, parts[0])
    slots["weight", 1].load(0, parts[1][:2])
    slots["bias", 1].load(0, torch.arange(5.0))
    slots["bias", 0].load(0, torch.zeros(3))
    assert torch.equal(fused.weight, torch.cat(parts))
    assert fused.bias.tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
