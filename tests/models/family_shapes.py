"""A tiny config of every family that is served, for tests that go over all of them.

To add a family: a line in `FAMILIES`. Sizes are odd on purpose, and whatever makes the family
unlike others is there: windows shorter than a test's prompts, rotations in part, biases.
"""

from typing import Any

import transformers
from transformers import PreTrainedConfig

# The sizes of all families' test models; a test changes what it is about.
SMALL: dict[str, Any] = {
    "vocab_size": 1013,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

# For classes whose own ids of special tokens are beyond a small vocabulary.
SMALL_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

PARTIAL_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * index for index in range(12)],
    "long_factor": [1.5 + index for index in range(12)],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("GlmConfig", SMALL | {"head_dim": 24, **SMALL_IDS}),
    "glm4": ("Glm4Config", SMALL | {"head_dim": 24, **SMALL_IDS}),
    "granite": (
        "GraniteConfig",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.25,
        },
    ),
    "llama": ("LlamaConfig", SMALL | {"head_dim": 24, "attention_bias": True}),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": 9, "head_dim": 24}),
    "olmo2": ("Olmo2Config", SMALL | {"tie_word_embeddings": True}),
    "olmo3": ("Olmo3Config", SMALL | {"sliding_window": 5, "num_hidden_layers": 4}),
    "phi3": (
        "Phi3Config",
        SMALL
        | SMALL_IDS
        | {"num_attention_heads": 2, "sliding_window": 13}
        | {"original_max_position_embeddings": 16, "rope_parameters": PARTIAL_LONGROPE},
    ),
    "qwen2": (
        "Qwen2Config",
        SMALL | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 24}),
    "smollm3": (
        "SmolLM3Config",
        SMALL
        | SMALL_IDS
        | {"no_rope_layers": [0, 1, 0], "head_dim": 24}
        | {"use_sliding_window": True, "sliding_window": 6},
    ),
}
"""Name -> (the name of transformers' class of configs, all fields that it is given)."""


def make_config(name: str, **changes: Any) -> PreTrainedConfig:
    """transformers' config of a family, with other fields where a test changes them."""
    class_name, fields = FAMILIES[name]
    config: PreTrainedConfig = getattr(transformers, class_name)(**(fields | changes))
    return config
