"""Tiny random models of transformers with LFM2-VL's tower, and images for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.models.vision.towers import randomize, save_model
from torch.nn.utils.rnn import pad_sequence
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, PreTrainedModel

from quire.core.content_spans import Content

Grid = tuple[int, int, int]

IMAGE = 5
"""The placeholder's token id."""
START, END = 6, 7
PATCH = 4
WIDTH = 3 * PATCH**2
"""Elements of a patch."""
TEXT = {
    "vocab_size": 1013,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_multiple_of": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": PATCH,
    "num_patches": 25,
    "vision_use_head": False,
}


def reference(patch: int = PATCH, **connector: Any) -> PreTrainedModel:
    """A model with patches of this side. connector: further fields of its config."""
    fields = {"projector_hidden_size": 48, "image_token_id": IMAGE} | connector
    vision = VISION | {"patch_size": patch}
    config = Lfm2VlConfig(vision_config=vision, text_config=TEXT, **fields)
    return randomize(Lfm2VlForConditionalGeneration(config))


def save(folder: Path, patch: int = PATCH) -> PreTrainedModel:
    """Write a model to the folder, and return it."""
    return save_model(reference(patch), folder)


def make_patches(grid: Grid, seed: int = 0) -> torch.Tensor:
    """The patches of a random image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(grid[1] * grid[2], WIDTH, generator=generator)


def token_ids(grid: Grid) -> list[int]:
    """The ids of an image between those of its start and its end."""
    return [START, *[IMAGE] * (grid[1] * grid[2] // 4), END]


def arguments(images: list[torch.Tensor], *grids: Grid) -> dict[str, Any]:
    """The arguments of transformers' `forward` for images of these grids, padded to one length."""
    padded = pad_sequence(images, batch_first=True)
    lengths = torch.tensor([len(image) for image in images])
    return {
        "pixel_values": padded,
        "spatial_shapes": torch.tensor([grid[1:] for grid in grids]),
        "pixel_attention_mask": (torch.arange(padded.shape[1]) < lengths[:, None]).int(),
    }


def inputs(contents: Sequence[Content]) -> dict[str, Any]:
    """The arguments of transformers' `forward` for processed images."""
    images = [
        torch.frombuffer(bytearray(each.values), dtype=torch.float32).view(each.shape)
        for each in contents
    ]
    return arguments(images, *(each.grid for each in contents))
