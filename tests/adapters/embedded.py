"""Random adapters of the embedded model, which change what it says."""

import json
from pathlib import Path

from tests.adapters.peft_folders import random_pairs, save_peft

import quire

CONFIG = json.loads((Path(quire.__file__).parent / "embedded_model" / "config.json").read_text())


def save_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """An adapter on some linears of all layers, of other numbers for each seed."""
    hidden, heads = CONFIG["hidden_size"], CONFIG["head_dim"]
    sizes = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        sizes[f"{path}.self_attn.q_proj"] = hidden, heads * CONFIG["num_attention_heads"]
        sizes[f"{path}.self_attn.v_proj"] = hidden, heads * CONFIG["num_key_value_heads"]
        sizes[f"{path}.mlp.down_proj"] = CONFIG["intermediate_size"], hidden
    return save_peft(folder, random_pairs(sizes, rank, seed), lora_alpha=16 * rank)
