"""Tiny random models of transformers with Gemma 3's tower, and images for them."""

from pathlib import Path
from typing import Any

import torch
from tests.models.vision.towers import randomize, save_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

BEGIN, IMAGE, END = 6, 5, 7
"""The token ids around an image, and its placeholder's."""
SIDE = 24
"""Height and width of an image: 6 x 6 patches, which become 3 x 3 embeddings."""
NUM_TOKENS = 9
TOKEN_IDS = [BEGIN, *[IMAGE] * NUM_TOKENS, END]
TEXT = {
    "vocab_size": 1013,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    # Narrower than an image.
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": SIDE,
}


def reference() -> PreTrainedModel:
    """A model whose vision tower has a head, as transformers' own default."""
    config = Gemma3Config(
        vision_config=VISION,
        text_config=TEXT,
        mm_tokens_per_image=NUM_TOKENS,
        boi_token_index=BEGIN,
        image_token_index=IMAGE,
        eoi_token_index=END,
    )
    config._attn_implementation = "eager"
    return randomize(Gemma3ForConditionalGeneration(config))


def save(folder: Path) -> PreTrainedModel:
    """Write a model to the folder, and return it."""
    return save_model(reference(), folder)


def make_image(seed: int = 0) -> torch.Tensor:
    """A random image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, SIDE, SIDE, generator=generator)


def arguments(images: list[torch.Tensor], ids: torch.Tensor) -> dict[str, Any]:
    """The arguments of transformers' `forward` for images, and the ids of all tokens [1, T]."""
    return {"pixel_values": torch.stack(images), "token_type_ids": (ids == IMAGE).long()}
