"""Tiny random models of transformers with Qwen3-VL's tower, and images for them."""

from pathlib import Path
from typing import Any

import torch
from tests.models.vision.towers import randomize, save_model
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

Grid = tuple[int, int, int]

IMAGE_TOKEN = 5
TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "vision_start_token_id": 6,
    "vision_end_token_id": 7,
    "video_token_id": 8,
}
TEXT = {
    "vocab_size": 1013,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
}
WIDTH = 3 * 2 * 4 * 4
"""Elements of a patch."""


def reference(family: str = "qwen3_vl") -> PreTrainedModel:
    """A model: "qwen3_vl", "qwen3_vl_moe" or "qwen3_5"."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if family == "qwen3_5":
        text = TEXT | HYBRID | {"rope_parameters": rope | {"mrope_section": [2, 1, 1]}}
        config = Qwen3_5Config(vision_config=VISION, text_config=text, **TOKENS)
        return randomize(Qwen3_5ForConditionalGeneration(config))
    vision = VISION | {"deepstack_visual_indexes": [0, 1]}
    text = TEXT | {"rope_parameters": rope | {"mrope_section": [6, 5, 5]}}
    if family == "qwen3_vl_moe":
        config = Qwen3VLMoeConfig(vision_config=vision, text_config=text | EXPERTS, **TOKENS)
        return randomize(Qwen3VLMoeForConditionalGeneration(config))
    config = Qwen3VLConfig(vision_config=vision, text_config=text, **TOKENS)
    return randomize(Qwen3VLForConditionalGeneration(config))


def save(family: str, folder: Path) -> PreTrainedModel:
    """Write a model to the folder, and return it."""
    return save_model(reference(family), folder)


def make_patches(grid: Grid, seed: int = 0) -> torch.Tensor:
    """The patches of a random image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(grid[1] * grid[2], WIDTH, generator=generator)


def token_ids(grid: Grid) -> list[int]:
    """The ids of an image between those of its start and its end."""
    return [6, *[IMAGE_TOKEN] * (grid[1] * grid[2] // 4), 7]


def arguments(images: list[torch.Tensor], ids: torch.Tensor, grid: Grid) -> dict[str, Any]:
    """The arguments of transformers' `forward` for images of one grid in a prompt [1, T]."""
    return {
        "pixel_values": torch.cat(images),
        "image_grid_thw": torch.tensor([grid] * len(images)),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }
