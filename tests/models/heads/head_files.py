"""Random checkpoints with heads: MTP layers inside of a model's files, and EAGLE-3 folders."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM


def random(*shape: int, seed: int, scale: float = 0.15) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def norm(size: int, seed: int) -> torch.Tensor:
    return random(size, seed=seed) + 1


def save_family(name: str, folder: Path, **changes: Any) -> Path:
    """A random model of a family in fp32, wide enough that logits lie apart."""
    torch.manual_seed(len(name))
    lengths = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1}
    config = make_config(name, **(lengths | {"pad_token_id": 0} | changes))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0, 0.15)
            if "norm" in parameter_name:
                parameter += 1
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def add_layer_head(folder: Path, *, repeats_ends: bool = False) -> dict[str, torch.Tensor]:
    """Make the last layer of a checkpoint its MTP layer. Returns the tensors that are added, by
    their last words."""
    path, config_path = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(path), json.loads(config_path.read_text())
    number = config["num_hidden_layers"] - 1
    size = config["hidden_size"]
    added = {
        "enorm.weight": norm(size, 1),
        "hnorm.weight": norm(size, 2),
        "eh_proj.weight": random(size, 2 * size, seed=3),
        "shared_head.norm.weight": norm(size, 4),
    }
    if repeats_ends:
        added["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        added["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors |= {f"model.layers.{number}.{name}": tensor for name, tensor in added.items()}
    save_file(tensors, path)
    config |= {"num_hidden_layers": number, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:number]
    config_path.write_text(json.dumps(config))
    return added


def repeat_last_layer(folder: Path) -> None:
    """Make the MTP head of a checkpoint compute the same as its model: both have the head's layer,
    and nothing else that changes a result."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    size, number = config["hidden_size"], config["num_hidden_layers"]
    head, last = f"model.layers.{number}.", f"model.layers.{number - 1}."
    for name, tensor in tensors.items():
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        if is_output and not name.startswith((head, last)):
            tensor.zero_()
        if name.startswith(last):
            tensor.copy_(tensors[head + name.removeprefix(last)])
    # With rows of size 1, the norm changes nothing.
    table = tensors["model.embed_tokens.weight"]
    table /= table.square().mean(-1, keepdim=True).sqrt()
    tensors[head + "enorm.weight"].fill_(1)
    tensors[head + "eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    tensors[head + "shared_head.norm.weight"].copy_(tensors["model.norm.weight"])
    save_file(tensors, path)


def add_named_head(folder: Path) -> dict[str, torch.Tensor]:
    """Make the last layer, of full attention, the MTP head of a Qwen3-Next or Qwen3.5, which may be
    the language model of a multimodal one."""
    path, config_path = folder / "model.safetensors", folder / "config.json"
    tensors, whole = load_file(path), json.loads(config_path.read_text())
    config = whole.get("text_config", whole)
    number = config["num_hidden_layers"] - 1
    place = "model." if config is whole else "model.language_model."
    size, prefix = config["hidden_size"], f"{place}layers.{number}."
    added = {
        "pre_fc_norm_embedding.weight": random(size, seed=1),
        "pre_fc_norm_hidden.weight": random(size, seed=2),
        "fc.weight": random(size, 2 * size, seed=3),
        "norm.weight": random(size, seed=4),
    }
    named = {f"mtp.{name}": tensor for name, tensor in added.items()}
    for name in [name for name in tensors if name.startswith(prefix)]:
        named["mtp.layers.0." + name.removeprefix(prefix)] = tensors.pop(name)
    save_file(tensors | named, path)
    config |= {"num_hidden_layers": number, "layer_types": config["layer_types"][:number]}
    config_path.write_text(json.dumps(whole))
    return added


def save_eagle3(
    folder: Path,
    *,
    size: int,
    vocab_size: int,
    draft_vocab_size: int | None = None,
    has_embedding: bool = False,
    **fields: Any,
) -> dict[str, torch.Tensor]:
    """A head for a target of this size. Returns its tensors."""
    own, heads, kv, head, inner = draft_vocab_size or vocab_size, 4, 2, 16, 96
    tensors = {
        "fc.weight": random(size, 3 * size, seed=1),
        "midlayer.hidden_norm.weight": norm(size, 2),
        "midlayer.input_layernorm.weight": norm(size, 3),
        "midlayer.post_attention_layernorm.weight": norm(size, 4),
        "midlayer.self_attn.q_proj.weight": random(heads * head, 2 * size, seed=5),
        "midlayer.self_attn.k_proj.weight": random(kv * head, 2 * size, seed=6),
        "midlayer.self_attn.v_proj.weight": random(kv * head, 2 * size, seed=7),
        "midlayer.self_attn.o_proj.weight": random(size, heads * head, seed=8),
        "midlayer.mlp.gate_proj.weight": random(inner, size, seed=9),
        "midlayer.mlp.up_proj.weight": random(inner, size, seed=10),
        "midlayer.mlp.down_proj.weight": random(size, inner, seed=11),
        "norm.weight": norm(size, 12),
        "lm_head.weight": random(own, size, seed=13),
    }
    if has_embedding:
        tensors["embed_tokens.weight"] = random(vocab_size, size, seed=14)
    if own != vocab_size:
        chosen = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(15))[:own]
        chosen = chosen.sort().values
        tensors["d2t"] = chosen - torch.arange(own)
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), chosen)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": own,
        "vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
