"""Which modules are replaced, and that what is not known stays as it is."""

import pytest
import torch
from tests.models.fallback.conftest import raw_config
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.embedding import LMHead
from quire.layers.linear import Linear
from quire.models.fallback import fused
from quire.models.fallback.hf_classes import build, find_class
from quire.models.fallback.interfaces import register_functions
from quire.models.fallback.parts import ExpertModules, Making, Parts, wide_parameters


def replaced(model_type, dtype=torch.float32, **fields):
    """The model, and the types of its modules by name."""
    register_functions()
    model = build(*find_class(raw_config(model_type, **fields)), dtype=dtype)
    wide = wide_parameters(model, dtype)
    Parts(model, Making(dtype, torch.device("cpu"), 64, False, wide)).replace()
    return model, {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_model_of_known_parts_has_ours_alone(model_type):
    _, kinds = replaced(model_type)
    layer = "model.layers.1"
    assert kinds[layer] is fused.ResidualLayer
    assert kinds[f"{layer}.self_attn"] is fused.RowAttention
    assert kinds[f"{layer}.mlp"] is fused.RowMLP
    assert kinds["model.norm"] is fused.RowNorm
    assert kinds["model.rotary_emb"] is fused.TableRotary
    assert kinds["lm_head"] is LMHead


def test_other_attention_keeps_its_own_code_and_gets_cosines():
    model, kinds = replaced("phi3")
    assert kinds["model.layers.0.self_attn"].__name__ == "Phi3Attention"
    assert issubclass(kinds["model.layers.0.self_attn.qkv_proj"], Linear)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 64), torch.tensor([[0, 5, 2]]))
    assert cos.shape == sin.shape == (1, 3, 16)
    assert torch.equal(cos[0, 0], torch.ones(16))


def test_all_linears_but_routers_in_fp32_are_ours():
    _, kinds = replaced("ernie4_5_moe", torch.bfloat16)
    torchs = [name for name, kind in kinds.items() if kind is nn.Linear]
    assert all(name.endswith("gate") for name in torchs)


def test_experts_are_linears_one_each():
    model, _ = replaced("mixtral")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts.expert_linears, ExpertModules)
    assert len(experts.expert_linears) == 4
    assert not dict(experts.named_parameters(recurse=False))


def test_a_rotation_that_depends_on_the_context_is_fixed_or_refused():
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, _ = replaced("llama", rope_parameters=scaled, max_position_embeddings=32)
    table = model.model.rotary_emb.table
    assert table.shape == (64, 16)
    with pytest.raises(UnsupportedModelError, match="of the type dynamic"):
        replaced("cohere", rope_parameters=scaled, max_position_embeddings=32)
