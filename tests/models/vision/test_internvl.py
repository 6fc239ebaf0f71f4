"""InternVL's tower, compared with transformers."""

from pathlib import Path

import pytest
import torch
from tests.models.vision.internvl_files import SIDE, TILE_TOKENS, make_tile, reference
from tests.models.vision.towers import (
    assert_close,
    encoded,
    encoded_with_pauses,
    load,
    num_slices,
    raw_config,
)

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from quire.models.vision.internvl import InternVLConfig

NO_GRID = (1, 1, 1)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", ["internvl", "large"])
def test_embeddings_equal_transformers(family: str, kernels: str, tmp_path: Path) -> None:
    model, values = reference(family), make_tile()
    tower = load(model, tmp_path, kernels=kernels)
    with torch.inference_mode():
        expected = model.model.get_image_features(values[None]).pooler_output[0]
    assert_close(encoded(tower, values, NO_GRID), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pauses_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tower, values = load(reference("large"), tmp_path, dtype), make_tile()
    whole = encoded(tower, values, NO_GRID)
    assert whole.dtype == dtype
    assert torch.equal(encoded_with_pauses(tower, values, NO_GRID), whole)
    encoded(tower, make_tile(1), NO_GRID)
    assert torch.equal(encoded(tower, values, NO_GRID), whole)
    assert num_slices(tower, values, NO_GRID) > 10


def test_tiles_have_one_size(tmp_path: Path) -> None:
    tower = load(reference(), tmp_path)
    assert tower.num_tokens((3, SIDE, SIDE), NO_GRID) == tower.max_content_tokens == TILE_TOKENS
    for shape, grid in (
        ((3, SIDE, SIDE // 2), NO_GRID),
        ((1, SIDE, SIDE), NO_GRID),
        ((3, SIDE, SIDE), (1, 6, 6)),
        ((4,), NO_GRID),
    ):
        with pytest.raises(InvalidRequestError, match=r"must be \[3, 24, 24\] without a grid"):
            tower.num_tokens(shape, grid)


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ({"vision_feature_layer": -2}, {}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, {}, "select_strategy"),
        ({"projector_hidden_act": "relu"}, {}, "projector_hidden_act"),
        ({"downsample_ratio": 0.3}, {}, "1 / n for a whole n"),
        ({"downsample_ratio": 0.25}, {}, "divides 6"),
        ({}, {"patch_size": [4, 2]}, "patch_size of the vision_config"),
        ({}, {"image_size": 25}, "must divide its image_size 25"),
        ({}, {"num_attention_heads": 5}, "num_attention_heads 5"),
        ({}, {"norm_type": "batch_norm"}, "norm_type"),
        ({}, {"use_mask_token": True}, "use_mask_token"),
        ({}, {"use_absolute_position_embeddings": False}, "use_absolute_position_embeddings"),
        ({"vision_config": None}, None, "must be an object"),
    ],
)
def test_other_configs_are_refused(outer: dict, inner: dict | None, message: str) -> None:
    raw = raw_config(reference())
    raw |= outer
    if inner is not None:
        raw["vision_config"] |= inner
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        InternVLConfig.from_hf(raw, 48)
