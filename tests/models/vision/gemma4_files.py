"""Tiny random models of transformers with Gemma 4's tower, and images for them."""

from pathlib import Path
from typing import Any

import torch
from tests.models.vision.towers import randomize, save_model
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, PreTrainedModel

BEGIN, IMAGE, END, PAD = 6, 5, 7, 3
"""The token ids around an image, its placeholder's, and the one that stands for it inside."""
PATCH, POOL = 4, 3
HEIGHT, WIDTH = 36, 24
"""An image has 9 x 6 patches, which become 3 x 2 embeddings."""
NUM_TOKENS = 6
TOKEN_IDS = [BEGIN, *[IMAGE] * NUM_TOKENS, END]
TEXT = {
    "vocab_size": 1013,
    "vocab_size_per_layer_input": 1013,
    "hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "head_dim": 24,
    "global_head_dim": 32,
    # Narrower than an image.
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 256,
    "use_bidirectional_attention": "vision",
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": PAD,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "position_embedding_size": 12,
}
_LARGE = {"standardize": True}
_SMALL = {"use_clipped_linears": True}


def reference(family: str = "gemma4", **text: Any) -> PreTrainedModel:
    """A model: "gemma4", or "small" for clipped linears, and tokens that see no later ones. text:
    changes to TEXT."""
    is_small = family == "small"
    config = Gemma4Config(
        vision_config=VISION | (_SMALL if is_small else _LARGE),
        text_config=TEXT | ({"use_bidirectional_attention": None} if is_small else {}) | text,
        boi_token_id=BEGIN,
        image_token_id=IMAGE,
        eoi_token_id=END,
        audio_token_id=8,
        video_token_id=9,
    )
    config._attn_implementation = "eager"
    model = randomize(Gemma4ForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if "std_" in name:
            buffer.copy_(1 + torch.rand(buffer.shape, generator=generator))
        elif name.endswith(("_min", "_max")):
            bound = 0.4 + torch.rand((), generator=generator)
            buffer.copy_(bound if name.endswith("_max") else -bound)
    return model


def save(folder: Path) -> PreTrainedModel:
    """Write a model to the folder, and return it."""
    return save_model(reference(), folder)


def make_image(seed: int = 0) -> torch.Tensor:
    """A random image of numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, HEIGHT, WIDTH, generator=generator)


def features(images: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arguments of transformers' `get_image_features` for images of one size."""
    channels, height, width = images[0].shape
    rows, columns = height // PATCH, width // PATCH
    cut = torch.stack(images).view(-1, channels, rows, PATCH, columns, PATCH)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack((x, y), dim=-1).view(1, -1, 2).expand(len(images), -1, -1)
    patches = cut.permute(0, 2, 4, 3, 5, 1).reshape(len(images), rows * columns, -1)
    return {"pixel_values": patches, "image_position_ids": places}


def arguments(images: list[torch.Tensor], ids: torch.Tensor) -> dict[str, Any]:
    """The arguments of transformers' `forward` for images, and the ids of all tokens [1, T]."""
    return features(images) | {"mm_token_type_ids": (ids == IMAGE).long()}
