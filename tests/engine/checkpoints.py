"""Small random checkpoints of each family, in odd shapes, made by transformers.

Weights are drawn wide (standard deviation 0.15), so that logits lie apart and ties are rare.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

COMMON: dict[str, Any] = {
    "vocab_size": 1013,
    "hidden_size": 56,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SEVEN_TO_ONE = {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80}
FOUR_MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
WINDOW_LAYERS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}

CONFIGS: dict[str, PreTrainedConfig] = {
    "granite": GraniteConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, **FOUR_MULTIPLIERS
    ),
    "llama": LlamaConfig(
        **COMMON, **(SEVEN_TO_ONE | {"num_attention_heads": 14, "num_key_value_heads": 2})
    ),
    "mistral": MistralConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=40, sliding_window=24
    ),
    "olmo2": Olmo2Config(**COMMON, num_attention_heads=4, num_key_value_heads=2),
    "qwen2": Qwen2Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, **WINDOW_LAYERS, hidden_act="silu"
    ),
    "qwen3": Qwen3Config(**COMMON, **SEVEN_TO_ONE, tie_word_embeddings=True),
}


def save_checkpoint(name: str, folder: Path, **changes: Any) -> Path:
    """Write the family's random model in fp32, its config so changed; returns the folder."""
    torch.manual_seed(len(name))
    config = CONFIGS[name]
    if changes:
        given = config.to_dict() | changes
        if given.get("layer_types"):
            given["layer_types"] = given["layer_types"][: given["num_hidden_layers"]]
        config = type(config)(**given)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases start as constants: make them matter
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder
