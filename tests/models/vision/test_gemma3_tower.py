"""Gemma 3's tower, compared with transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.vision.gemma3_files import NUM_TOKENS, SIDE, make_image, reference
from tests.models.vision.towers import (
    assert_close,
    encoded,
    encoded_with_pauses,
    load,
    num_slices,
    raw_config,
)

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from quire.models.registry import load_config
from quire.models.vision.gemma3_tower import Gemma3VisionConfig
from quire.models.vision.towers import find_tower

NO_GRID = (1, 1, 1)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_embeddings_equal_transformers(kernels: str, tmp_path: Path) -> None:
    model, values = reference(), make_image()
    tower = load(model, tmp_path, kernels=kernels)
    with torch.inference_mode():
        expected = model.model.get_image_features(values[None]).pooler_output[0]
    assert_close(encoded(tower, values, NO_GRID), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pauses_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tower, values = load(reference(), tmp_path, dtype), make_image()
    whole = encoded(tower, values, NO_GRID)
    assert whole.dtype == dtype
    assert torch.equal(encoded_with_pauses(tower, values, NO_GRID), whole)
    assert num_slices(tower, values, NO_GRID) > 10


def test_published_names_of_tensors_are_read(tmp_path: Path) -> None:
    """Published files have "vision_tower.vision_model." and no head."""
    load(reference(), tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value
        for name, value in load_file(path).items()
        if "vision_tower.head." not in name
    }
    save_file(renamed, path, {"format": "pt"})
    source = find_tower(tmp_path, load_config(tmp_path))
    assert source is not None
    source._check_match(source._build(torch.float32, torch.device("meta")))


def test_images_have_one_size(tmp_path: Path) -> None:
    tower = load(reference(), tmp_path)
    assert tower.num_tokens((3, SIDE, SIDE), NO_GRID) == tower.max_content_tokens == NUM_TOKENS
    for shape, grid in (((3, SIDE, 20), NO_GRID), ((3, SIDE, SIDE), (1, 6, 6)), ((4,), NO_GRID)):
        with pytest.raises(InvalidRequestError, match=r"must be \[3, 24, 24\], without a grid"):
            tower.num_tokens(shape, grid)


def test_a_published_config_is_read() -> None:
    vision = {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    raw = {"model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": vision}
    config = Gemma3VisionConfig.from_hf(raw, 2560)
    assert (config.encoder.num_patches_per_side, config.pool_size) == (64, 4)


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ({"mm_tokens_per_image": 8}, {}, "mm_tokens_per_image is 8"),
        ({"mm_tokens_per_image": 16}, {}, "a divisor of 6"),
        ({}, {"num_attention_heads": 5}, "num_attention_heads"),
        ({"vision_config": None}, None, "must be an object"),
    ],
)
def test_other_configs_are_refused(outer: dict, inner: dict | None, message: str) -> None:
    raw = raw_config(reference())
    raw |= outer
    if inner is not None:
        raw["vision_config"] |= inner
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Gemma3VisionConfig.from_hf(raw, 48)
