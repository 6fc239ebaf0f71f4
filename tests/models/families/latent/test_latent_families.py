"""DeepSeek-V2, V3 and GLM-4.7-Flash against transformers."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.family_shapes import FAMILIES, SMALL
from transformers import DeepseekV2Config as HFDeepseekV2Config
from transformers import DeepseekV3Config as HFDeepseekV3Config
from transformers import Glm4MoeLiteConfig as HFGlm4MoeLiteConfig

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.latent.deepseek import DeepseekV2Config, DeepseekV3Config
from quire.models.families.latent.glm4_moe_lite import Glm4MoeLiteConfig

SHAPES = {
    "v2": ("deepseek_v2", {}),
    "v2, greedy, with a compressed query": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": 32, "tie_word_embeddings": True},
    ),
    "v3, stretched": ("deepseek_v3", {}),
    "v3, no pairs, biases, dense": (
        "deepseek_v3",
        {"rope_interleave": False, "attention_bias": True, "first_k_dense_replace": 3},
    ),
    "v3, weights as they are": ("deepseek_v3", {"norm_topk_prob": False, "q_lora_rank": None}),
    "flash": ("glm4_moe_lite", {}),
}


@pytest.mark.parametrize(("family", "changes"), SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(family, changes, save_checkpoint, assert_same_logits):
    class_name, fields = FAMILIES[family]
    folder, reference = save_checkpoint(getattr(transformers, class_name), **(fields | changes))
    assert_same_logits(folder, reference)


RAW = SMALL | {"architectures": ["X"], "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (DeepseekV2Config, HFDeepseekV2Config),
        (DeepseekV3Config, HFDeepseekV3Config),
        (Glm4MoeLiteConfig, HFGlm4MoeLiteConfig),
    ],
)
def test_silent_fields_have_transformers_values(ours, theirs):
    config = ours.from_hf(RAW)
    silent = theirs(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.latent.latent == silent.kv_lora_rank
    assert config.latent.query == silent.q_lora_rank
    assert config.latent.nope == silent.qk_nope_head_dim
    assert config.latent.rope == silent.qk_rope_head_dim
    assert config.latent.value == silent.v_head_dim
    assert config.rms_norm_eps == silent.rms_norm_eps
    mixture = config.mixtures[-1]
    if ours is DeepseekV3Config:
        assert mixture is None  # three dense layers
        mixture = ours.from_hf(RAW | {"num_hidden_layers": 4}).mixtures[-1]
    assert mixture.router.num_experts == silent.n_routed_experts
    assert mixture.router.scale == silent.routed_scaling_factor
    assert mixture.router.num_groups == (silent.n_group or 1)
    assert mixture.router.top_groups == (silent.topk_group or 1)
    assert mixture.intermediate_size == silent.moe_intermediate_size
    assert mixture.shared_size == silent.moe_intermediate_size * silent.n_shared_experts


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (DeepseekV2Config, {"norm_topk_prob": True}, "norm_topk_prob is true"),
        (DeepseekV2Config, {"scoring_func": "sigmoid"}, "scoring_func"),
        (DeepseekV3Config, {"topk_method": "greedy"}, "topk_method"),
        (DeepseekV3Config, {"moe_layer_freq": 2}, "moe_layer_freq is above 1"),
        (Glm4MoeLiteConfig, {"first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
        (Glm4MoeLiteConfig, {"attention_chunk_size": 2}, "attention_chunk_size"),
    ],
)
def test_refuses_what_it_does_not_understand(config, fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config.from_hf(RAW | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 48}, "it can only repeat qk_rope_head_dim, 64"),
        ({"qk_head_dim": 100}, "qk_head_dim is 100, but"),
        ({"mlp_layer_types": ["dense"]}, "a list of num_hidden_layers"),
    ],
)
def test_refuses_sizes_that_can_not_be(fields, message):
    with pytest.raises(CheckpointError, match=message):
        Glm4MoeLiteConfig.from_hf(RAW | fields)


@pytest.mark.parametrize("config", [DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig])
@pytest.mark.parametrize("fields", [{"num_experts_per_tok": 300}, {"num_experts_per_tok": 0}])
def test_refuses_more_experts_a_token_than_there_are(config, fields):
    with pytest.raises(CheckpointError, match=r"top_k is 300, |num_experts_per_tok is 0"):
        config.from_hf(RAW | fields)


def test_ranks_share_heads_and_have_the_whole_latent():
    config = DeepseekV3Config.from_hf(RAW)
    share = config.share_of(1, 2)
    assert (share.num_heads, share.latent.first_head) == (2, 2)
    assert share.attention_specs[0].num_kv_heads == 1


def test_layers_that_predict_further_tokens_are_left_out(save_checkpoint, edit_config, load):
    class_name, fields = FAMILIES["deepseek_v3"]
    folder, _ = save_checkpoint(getattr(transformers, class_name), **fields)
    path = folder / "model.safetensors"
    weights = load_file(path)
    number = fields["num_hidden_layers"]
    behind = {f"model.layers.{number}.{name}": torch.zeros(3) for name in ("a", "eh_proj.weight")}
    save_file(weights | behind, path)
    edit_config(folder, num_nextn_predict_layers=1)
    load(folder)
    edit_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=rf"layers\.{number}\.a"):
        load(folder)
