"""The feed-forward block against transformers'."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from quire.layers.linear import LinearKind
from quire.layers.mlp import MLP


@pytest.mark.parametrize("bias", [False, True])
def test_equals_transformers(bias):
    config = LlamaConfig(hidden_size=24, intermediate_size=50, num_attention_heads=4, mlp_bias=bias)
    reference = LlamaMLP(config)
    mlp = MLP(24, 50, bias=bias, dtype=torch.float32, device=torch.device("cpu"))
    parts = {"gate_proj": (mlp.gate_up_proj, 0), "up_proj": (mlp.gate_up_proj, 1)}
    parts["down_proj"] = (mlp.down_proj, 0)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            linear, index = parts[name.partition(".")[0]]
            slot = linear.slots()[name.partition(".")[2], index]
            slot.load(0, parameter.normal_(0, 0.5))
        torch.testing.assert_close(mlp(x), reference(x))


def test_is_sharded_by_columns_then_rows():
    mlp = MLP(8, 6, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    assert mlp.gate_up_proj.kind is LinearKind.COLUMN
    assert mlp.gate_up_proj.part_sizes == (6, 6)
    assert mlp.down_proj.kind is LinearKind.ROW
