"""Heads against plain definitions, from files with the names of published ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.conftest import CPU, DenseAttention
from tests.models.family_shapes import FAMILIES
from tests.models.heads.head_files import add_layer_head, add_named_head, save_eagle3
from torch.nn import functional

from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from quire.models.checkpoints.loader import load_model
from quire.models.decoder import DecoderForCausalLM
from quire.models.heads.draft_head import DraftHead
from quire.models.heads.eagle3 import load_eagle3_config
from quire.models.heads.mtp import mtp_config
from quire.models.registry import MTP_HEADS, load_config

LENGTH = 11
TOKENS = torch.tensor([5, 900, 3, 77, 1000, 5, 5, 41, 12, 600, 9])
POSITIONS = torch.arange(LENGTH)
SIZES = {"dtype": torch.float32, "device": CPU, "max_model_len": 48}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """x [T, heads, D], rotated by the positions of the tokens."""
    half = x.shape[-1] // 2
    angles = POSITIONS[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.split(half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def load_mtp(folder: Path) -> tuple[DraftHead, DecoderForCausalLM]:
    config = load_config(folder)
    target = load_model(folder, config, **SIZES)
    head = load_model(folder, mtp_config(config, MTP_HEADS), **SIZES)
    assert isinstance(head, DraftHead) and isinstance(target, DecoderForCausalLM)
    head.use_target(target, LENGTH)
    return head, target


def drafted(head: DraftHead, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of all tokens, whose states stand before them, in two chunks."""
    attention, found = DenseAttention(head.attention_specs), []
    with torch.inference_mode():
        for span in (slice(0, 4), slice(4, LENGTH)):
            count = len(TOKENS[span])
            head.states[:count] = states[span]
            found.append(head(TOKENS[span], POSITIONS[span], attention).clone())
        hidden = torch.cat(found)
        return hidden, head.logits(hidden)


def layer_of(model: Any, number: int, hidden: torch.Tensor) -> torch.Tensor:
    """The result of one layer of a model of transformers, [T, H] -> [T, H]."""
    inner, batch = model.model, hidden[None]
    hidden_mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    angles = inner.rotary_emb(batch, POSITIONS[None])
    found = inner.layers[number](
        batch,
        attention_mask=hidden_mask,
        position_ids=POSITIONS[None],
        position_embeddings=angles,
    )
    return (found[0] if isinstance(found, tuple) else found).view(LENGTH, -1)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4-moe", "glm4_moe_lite"])
@pytest.mark.parametrize("repeats_ends", [False, True])
def test_a_layer_of_the_model_drafts(family: str, repeats_ends: bool, save_checkpoint) -> None:
    config_class, fields = FAMILIES[family]
    if "mlp_layer_types" in fields:
        fields = fields | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    folder, model = save_checkpoint(getattr(transformers, config_class), base=fields)
    added = add_layer_head(folder, repeats_ends=repeats_ends)
    head, target = load_mtp(folder)
    states = torch.randn(LENGTH, head.hidden_size)
    hidden, logits = drafted(head, states)
    eps = model.config.rms_norm_eps
    with torch.inference_mode():
        embeds = rms(model.model.embed_tokens(TOKENS), added["enorm.weight"], eps)
        both = torch.cat((embeds, rms(states, added["hnorm.weight"], eps)), -1)
        expected = layer_of(model, 2, both @ added["eh_proj.weight"].T)
        normed = rms(expected, added["shared_head.norm.weight"], eps)
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(logits, model.lm_head(normed), rtol=1e-3, atol=2e-3)
    assert head.embed_tokens is target.model.embed_tokens


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_head_of_a_hybrid_drafts(family: str, save_checkpoint) -> None:
    config_class, fields = FAMILIES[family]
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    folder, model = save_checkpoint(
        getattr(transformers, config_class), base=fields | {"layer_types": kinds}
    )
    added = add_named_head(folder)
    head, _ = load_mtp(folder)
    states = torch.randn(LENGTH, head.hidden_size)
    hidden, logits = drafted(head, states)
    eps = model.config.rms_norm_eps
    with torch.inference_mode():
        embeds = model.model.embed_tokens(TOKENS)
        embeds = rms(embeds, 1 + added["pre_fc_norm_embedding.weight"], eps)
        both = torch.cat((embeds, rms(states, 1 + added["pre_fc_norm_hidden.weight"], eps)), -1)
        expected = layer_of(model, 2, both @ added["fc.weight"].T)
        normed = rms(expected, 1 + added["norm.weight"], eps)
        torch.testing.assert_close(hidden, normed, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(logits, model.lm_head(normed), rtol=1e-3, atol=2e-3)


def plain_eagle3(
    tensors: dict[str, torch.Tensor],
    embeds: torch.Tensor,
    inputs: torch.Tensor,
    *,
    norm_before_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of the head: the residual stream, and logits of its vocabulary."""
    layer = {
        name.removeprefix("midlayer."): tensor
        for name, tensor in tensors.items()
        if name.startswith("midlayer.")
    }
    state = inputs @ tensors["fc.weight"].T
    normed = rms(state, layer["hidden_norm.weight"])
    both = torch.cat((rms(embeds, layer["input_layernorm.weight"]), normed), -1)
    q, k, v = (
        (both @ layer[f"self_attn.{name}_proj.weight"].T).view(LENGTH, -1, 16) for name in "qkv"
    )
    q, k = turned(q), turned(k).repeat_interleave(2, 1)
    v = v.repeat_interleave(2, 1)
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    total = normed if norm_before_residual else state
    total = total + attended.flatten(1) @ layer["self_attn.o_proj.weight"].T
    x = rms(total, layer["post_attention_layernorm.weight"])
    gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    total = total + functional.silu(gate) * up @ layer["mlp.down_proj.weight"].T
    return total, rms(total, tensors["norm.weight"]) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab_size": 200, "norm_before_residual": True},
        {"has_embedding": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
    ],
    ids=["plain", "small vocabulary", "own embedding"],
)
def test_an_eagle3_head_drafts(options: dict[str, Any], save_checkpoint, tmp_path: Path) -> None:
    fields = FAMILIES["llama"][1] | {"num_hidden_layers": 8}
    folder, model = save_checkpoint(transformers.LlamaConfig, base=fields)
    tensors = save_eagle3(tmp_path / "head", size=64, vocab_size=1013, **options)
    config = load_config(folder)
    target = load_model(folder, config, **SIZES)
    assert isinstance(target, DecoderForCausalLM)
    head_config = load_eagle3_config(tmp_path / "head", config)
    head = load_model(tmp_path / "head", head_config, **SIZES)
    assert isinstance(head, DraftHead)
    head.use_target(target, LENGTH)
    layers = (1, 2, 4) if "eagle_config" in options else (2, 4, 5)
    assert head.target_layers == layers
    # The target gives the inputs of its layers.
    target.keep_inputs(head.target_layers, LENGTH)
    assert target.kept_inputs is not None
    with torch.inference_mode():
        target(TOKENS, POSITIONS, DenseAttention(target.attention_specs))
        every = model(TOKENS[None], output_hidden_states=True).hidden_states
        inputs = torch.cat([every[layer][0] for layer in layers], -1)
        torch.testing.assert_close(target.kept_inputs.rows, inputs, rtol=1e-4, atol=1e-4)
        # From these, the head drafts.
        hidden, logits = drafted(head, head.states_of(inputs))
        table = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
        expected = plain_eagle3(
            tensors,
            table[TOKENS],
            inputs,
            norm_before_residual=bool(options.get("norm_before_residual")),
        )
    torch.testing.assert_close((hidden, logits), expected, rtol=1e-3, atol=2e-3)


def test_heads_of_other_models_are_refused_by_name(save_checkpoint, tmp_path: Path) -> None:
    fields = FAMILIES["llama"][1] | {"num_hidden_layers": 8}
    folder, _ = save_checkpoint(transformers.LlamaConfig, base=fields)
    target = load_config(folder)
    for number, (options, error, message) in enumerate(
        (
            ({"size": 32}, ConfigurationError, "of another hidden size than 64"),
            ({"vocab_size": 1000}, ConfigurationError, "for 1000 tokens, but the model has 1013"),
            ({"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers is 2"),
            (
                {"eagle_aux_hidden_state_layer_ids": [1, 4, 9]},
                ConfigurationError,
                "reads the inputs of the layers 1, 4, 9, but the model has 8 layers",
            ),
            (
                {"eagle_aux_hidden_state_layer_ids": "low"},
                CheckpointError,
                "but must be a list of layer numbers",
            ),
            (
                {"eagle_config": {"use_aux_hidden_state": False}},
                UnsupportedModelError,
                "only heads that read the inputs of three layers",
            ),
            ({"draft_vocab_size": 80, "lacks": "d2t"}, CheckpointError, "the weights lack d2t"),
            ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModelError, "heads that draft"),
        )
    ):
        lacks = options.pop("lacks", None)
        head = tmp_path / f"head{number}"
        save_eagle3(head, **({"size": 64, "vocab_size": 1013} | options))
        if lacks is not None:
            tensors = load_file(head / "model.safetensors")
            del tensors[lacks]
            save_file(tensors, head / "model.safetensors")
        with pytest.raises(error, match=message):
            load_eagle3_config(head, target)


def test_a_head_with_an_embedding_of_its_own_is_refused(save_checkpoint) -> None:
    config_class, fields = FAMILIES["glm4-moe"]
    folder, _ = save_checkpoint(getattr(transformers, config_class), base=fields)
    add_layer_head(folder, repeats_ends=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.embed_tokens.weight"][5] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="only MTP heads that share the model"):
        load_mtp(folder)
