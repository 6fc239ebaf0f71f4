"""Translates the tensors of GGUF files with encoders of images ("mmproj" files).

`hub.gguf.projectors` translates their metadata. Called by `gguf.encoder_file`.
"""

from collections.abc import Callable, Mapping

import torch

from quire.models.checkpoints.gguf.families.architecture import of_pairs
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_locations import CombinedStacks, TensorLocation
from quire.models.checkpoints.gguf.tensor_map import Change, TensorRules, misshapen

PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The tensors of Qwen's patch projection: for the first and for the second frame of a patch."""

CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""The parameters of a clipped linear of Gemma 4 beside its weight."""

_QKV = {f"attn_{part}": f"{part}_proj" for part in "qkv"}


def _siglip_rules(
    model: GGUFModel, tower: str, connector: dict[str, str], changes: Mapping[str, Change]
) -> TensorRules:
    """The rules for SigLIP, whose tensors have the prefix `tower`. Old files swap
    the names of the two linears of an MLP."""
    up, down = "ffn_up", "ffn_down"
    hidden_size = model.integer("vision.embedding_length")
    if model.shape("v.blk.0.ffn_down.weight")[-1] == hidden_size:
        up, down = down, up
    layer = {name: f"self_attn.{linear}" for name, linear in _QKV.items()}
    layer |= {"attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2"}
    layer |= {up: "mlp.fc1", down: "mlp.fc2"}
    top = connector | {
        "v.patch_embd": f"{tower}embeddings.patch_embedding",
        "v.position_embd": f"{tower}embeddings.position_embedding",
        "v.post_ln": f"{tower}post_layernorm",
    }
    return TensorRules({**layer}, top, changes=changes, prefix=f"{tower}encoder.layers.")


def _idefics3_rules(model: GGUFModel) -> TensorRules:
    connector = {"mm.model.fc": "connector.modality_projection.proj"}
    return _siglip_rules(model, "vision_model.", connector, {})


def _gemma3_rules(model: GGUFModel) -> TensorRules:
    """The rules for Gemma 3. The file's norm has 1 + the weight of the checkpoint."""
    norm, linear = "mm.soft_emb_norm.weight", "mm.input_projection.weight"
    connector = {
        norm: "multi_modal_projector.mm_soft_emb_norm.weight",
        linear: "multi_modal_projector.mm_input_projection_weight",
    }
    changes: dict[str, Change] = {norm: lambda weight: weight - 1}
    return _siglip_rules(model, "vision_tower.vision_model.", connector, changes)


def _gemma4_rules(model: GGUFModel) -> TensorRules:
    """The rules for Gemma 4. Clipped linears have four bounds, each one number. The checkpoint's
    patches have each pixel's channels side by side, as in LFM2-VL. Tensors of an encoder of sound
    have no rule."""
    linears = {name: f"self_attn.{linear}" for name, linear in _QKV.items()}
    linears |= {"attn_out": "self_attn.o_proj"}
    linears |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    layer = {f"{name}.weight": f"{linear}.linear.weight" for name, linear in linears.items()}
    layer |= linears  # their bounds
    layer |= {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
    layer |= {
        "ln1": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
    embedder = "vision_tower.patch_embedder"
    top = {
        "v.patch_embd": f"{embedder}.input_proj",
        "v.position_embd.weight": f"{embedder}.position_embedding_table",
        "v.std_bias": "vision_tower.std_bias",
        "v.std_scale": "vision_tower.std_scale",
        "mm.input_projection": "embed_vision.embedding_projection",
    }
    bounds = [f"{name}.{bound}" for name in linears for bound in CLIP_BOUNDS]
    changes: dict[str, Change] = dict.fromkeys(bounds, lambda bound: bound.reshape(()))
    changes[PATCHES[0]] = _channels_last
    return TensorRules({**layer}, top, changes=changes, prefix="vision_tower.encoder.layers.")


def _channels_last(kernel: torch.Tensor) -> torch.Tensor:
    """[outputs, 3, patch, patch] -> [outputs, pixels of a patch with their channels]."""
    return kernel.permute(0, 2, 3, 1).flatten(1)


def _lfm2_rules(model: GGUFModel) -> TensorRules:
    """The rules for LFM2-VL. The checkpoint's patches have each pixel's channels side by side; the
    file's have the channels one after the other."""
    connector = {
        "mm.input_norm": "multi_modal_projector.layer_norm",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    }
    changes: dict[str, Change] = {PATCHES[0]: _channels_last}
    return _siglip_rules(model, "vision_tower.", connector, changes)


def _internvl_rules(model: GGUFModel) -> TensorRules:
    layer = {name: f"attention.{linear}" for name, linear in _QKV.items()}
    layer |= {f"attn_{part}_norm": f"attention.{part}_norm" for part in "qk"}
    layer |= {"ls1.weight": "lambda_1", "ls2.weight": "lambda_2"}
    layer |= {"ln1": "layernorm_before", "ln2": "layernorm_after"}
    layer |= {"attn_out": "attention.projection_layer", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    embeddings = "vision_tower.embeddings"
    top = {
        "v.patch_embd": f"{embeddings}.patch_embeddings.projection",
        "v.class_embd": f"{embeddings}.cls_token",
        "v.position_embd.weight": f"{embeddings}.position_embeddings",
        "v.post_ln": "vision_tower.layernorm",
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    }
    size = model.integer("vision.embedding_length")
    changes = dict.fromkeys(
        ("v.class_embd", "v.position_embd.weight"), lambda table: table.reshape(1, -1, size)
    )
    return TensorRules({**layer}, top, changes=changes, prefix="vision_tower.encoder.layer.")


def _pixtral_rules(model: GGUFModel) -> TensorRules:
    """The rules for Pixtral, whose q and k llama.cpp reorders, as it does for Llama. The embedding
    of [IMG_BREAK] is a row of the language model's embedding."""
    layer = {name: f"attention.{linear}" for name, linear in _QKV.items()}
    layer |= {"attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm"}
    layer |= {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    top = {
        "v.patch_embd": "vision_tower.patch_conv",
        "v.pre_ln": "vision_tower.ln_pre",
        "mm.input_norm": "multi_modal_projector.norm",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    }
    num_heads = model.integer("vision.attention.head_count")
    num_rows = model.shape("v.blk.0.attn_q.weight")[0]
    if not num_heads or num_rows % (2 * num_heads):
        raise misshapen(model, "v.blk.0.attn_q.weight")
    order = of_pairs(num_heads, num_rows // num_heads)
    return TensorRules(
        {**layer},
        top,
        order={"attn_q": order, "attn_k": order},
        unused=frozenset({"v.token_embd.img_break"}),
        prefix="vision_tower.transformer.layers.",
    )


def _qwen3vl_rules(model: GGUFModel) -> TensorRules:
    layer = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
    layer |= {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
    top = {
        "v.patch_embd.bias": "visual.patch_embed.proj.bias",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    }
    stem = "v.deepstack."
    layers = {name.split(".")[2] for name in model.tensors if name.startswith(stem)}
    for index, number in enumerate(sorted(layers, key=lambda each: (len(each), each))):
        for part, ours in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
            top[f"{stem}{number}.{part}"] = f"visual.deepstack_merger_list.{index}.{ours}"
    return TensorRules({**layer}, top, unused=frozenset(PATCHES), prefix="visual.blocks.")


def joined_patches(model: GGUFModel) -> dict[str, TensorLocation]:
    """The projection of patches of two frames, which Qwen's files store as two tensors; empty for
    other encoders."""
    first, second = PATCHES
    if second not in model.tensors:
        return {}
    outputs, *kernel = model.shape(first)
    if model.shape(second) != model.shape(first) or len(kernel) != 3:
        raise misshapen(model, second)
    shape = (outputs, kernel[0], len(PATCHES), *kernel[1:])
    name = "visual.patch_embed.proj.weight"
    return {name: CombinedStacks(shape, PATCHES, 1, lambda *frames: torch.stack(frames, dim=2))}


ENCODER_RULES: dict[str, Callable[[GGUFModel], TensorRules]] = {
    "gemma3": _gemma3_rules,
    "gemma4v": _gemma4_rules,
    "idefics3": _idefics3_rules,
    "internvl": _internvl_rules,
    "lfm2": _lfm2_rules,
    "pixtral": _pixtral_rules,
    "qwen3vl_merger": _qwen3vl_rules,
}
"""The rules for each kind of projector. The keys are those of `hub.gguf.projectors`."""
