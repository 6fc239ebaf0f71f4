"""Tiny random models of transformers with InternVL's tower, and tiles for them."""

from pathlib import Path
from typing import Any

import torch
from tests.models.vision.towers import randomize, save_model
from transformers import InternVLConfig, InternVLForConditionalGeneration, PreTrainedModel

IMAGE = 5
"""The placeholder's token id."""
SIDE = 24
"""Height and width of a tile: 6 x 6 patches, which become 3 x 3 embeddings."""
TILE_TOKENS = 9
TEXT = {
    "vocab_size": 1013,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": [4, 4],
    "image_size": [SIDE, SIDE],
    "attention_bias": True,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 24}
_LARGE = {
    "attention_bias": False,
    "norm_type": "rms_norm",
    "use_qk_norm": True,
    "use_mean_pooling": False,
    "patch_size": 2,
}


def reference(family: str = "internvl") -> PreTrainedModel:
    """A model: "internvl", or "large" for the norms of the 6B encoder, and squares of 4 x 4."""
    is_large = family == "large"
    config = InternVLConfig(
        vision_config=VISION | (_LARGE if is_large else {}),
        text_config=TEXT | ({"model_type": "qwen2"} if is_large else QWEN3),
        downsample_ratio=0.25 if is_large else 0.5,
        image_token_id=IMAGE,
        image_seq_length=TILE_TOKENS,
        tie_word_embeddings=False,
    )
    return randomize(InternVLForConditionalGeneration(config))


def save(folder: Path) -> PreTrainedModel:
    """Write a model to the folder, and return it."""
    return save_model(reference(), folder)


def make_tile(seed: int = 0, side: int = SIDE) -> torch.Tensor:
    """A random tile."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, side, side, generator=generator)


def arguments(tiles: list[torch.Tensor], _: torch.Tensor) -> dict[str, Any]:
    """The arguments of transformers' `forward` for tiles."""
    return {"pixel_values": torch.stack(tiles)}
