"""Tiny random models of transformers with a Pixtral tower, and images for them."""

from pathlib import Path
from typing import Any

import torch
from tests.models.vision.towers import randomize, save_model
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)

PATCH = 4
IMAGE, BREAK, END = 10, 12, 13
TEXT = {
    "model_type": "mistral",
    "vocab_size": 1013,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": PATCH,
    "image_size": 96,
}


def reference(family: str = "mistral3") -> PreTrainedModel:
    """A model: "mistral3", "llava", or "early layer" for a connector that skips the last layer."""
    if family == "mistral3":
        config = Mistral3Config(vision_config=VISION | {"hidden_act": "silu"}, text_config=TEXT)
        config.tie_word_embeddings = False
        return randomize(Mistral3ForConditionalGeneration(config))
    config = LlavaConfig(
        vision_config=VISION,
        text_config=TEXT,
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-2 if family == "early layer" else -1,
    )
    return randomize(LlavaForConditionalGeneration(config))


def save(family: str, folder: Path) -> PreTrainedModel:
    """Write a model to the folder, and return it."""
    return save_model(reference(family), folder)


def make_image(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A random image of rows and columns of patches."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, PATCH * rows, PATCH * columns, generator=generator)


def token_ids(rows: int, columns: int) -> list[int]:
    """The placeholder ids of an image with rows and columns of embeddings."""
    ids = ([IMAGE] * columns + [BREAK]) * rows
    return [*ids[:-1], END]


def arguments(images: list[torch.Tensor], _: torch.Tensor) -> dict[str, Any]:
    """The arguments of transformers' `forward` for images of equal size."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    return {"pixel_values": torch.stack(images), "image_sizes": sizes}
