"""What llama.cpp's converters do, architecture by architecture."""

import math
from typing import Any

import torch
from tests.models.checkpoints.gguf.conversion import Conversion, permute_heads


def rope_freqs(config: Any) -> dict[str, torch.Tensor]:
    """`LlamaModel.generate_extra_tensors`."""
    rope, dim = config.rope_parameters, config.head_dim
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    found = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        if wavelength < length / high:
            found.append(1.0)
        elif wavelength > length / low:
            found.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": torch.tensor(found)}


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OTHER_LLAMA_3 = LLAMA_3 | {"high_freq_factor": 8.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONVERSIONS = {
    "llama": Conversion(
        "llama",
        "llama",
        fields=lambda config: {"vocab_size": config.vocab_size, "rope.dimension_count": 24},
        modify=permute_heads,
    ),
    "llama, tied": Conversion(
        "llama", "llama", {"tie_word_embeddings": True}, modify=permute_heads
    ),
    "llama 3": Conversion(
        "llama",
        "llama",
        {"attention_bias": False, "head_dim": 32, "rope_parameters": LLAMA_3},
        modify=permute_heads,
        extra=rope_freqs,
    ),
    "llama, linear": Conversion(
        "llama", "llama", {"rope_parameters": LINEAR}, modify=permute_heads
    ),
    "qwen2": Conversion("qwen2", "qwen2", {"use_sliding_window": False}),
    "qwen3": Conversion("qwen3", "qwen3", {"tie_word_embeddings": True}),
    "qwen3, yarn": Conversion("qwen3", "qwen3", {"rope_parameters": YARN}),
}
