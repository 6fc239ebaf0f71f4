"""LFM2-VL's tower, compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.vision.lfm2_vl_files import WIDTH, arguments, make_patches, reference
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
from quire.models.vision.lfm2_vl import MAX_TOKENS, Lfm2VlVisionConfig
from quire.models.vision.towers import find_tower

GRIDS = [(1, 4, 6), (1, 6, 4), (1, 2, 14), (1, 10, 10)]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(
    "connector",
    [{}, {"projector_use_layernorm": False, "projector_bias": False, "tie_word_embeddings": False}],
)
def test_embeddings_equal_transformers(
    connector: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    model = reference(**connector)
    tower = load(model, tmp_path, kernels=kernels)
    for grid in GRIDS:
        values = make_patches(grid)
        with torch.inference_mode():
            found = model.model.get_image_features(**arguments([values], grid))
        assert_close(encoded(tower, values, grid), found.pooler_output[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pauses_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tower, grid = load(reference(), tmp_path, dtype), GRIDS[-1]
    values = make_patches(grid)
    whole = encoded(tower, values, grid)
    assert whole.dtype == dtype
    assert torch.equal(encoded_with_pauses(tower, values, grid), whole)
    encoded(tower, make_patches(GRIDS[0], 1), GRIDS[0])
    assert torch.equal(encoded(tower, values, grid), whole)
    assert num_slices(tower, values, grid) > 10


def test_old_names_and_the_head_that_pools(tmp_path: Path) -> None:
    """Old files have "vision_model" in names, and some have a head."""
    model, values = reference(), make_patches(GRIDS[0])
    expected = encoded(load(model, tmp_path), values, GRIDS[0])
    path = tmp_path / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed | {"model.vision_tower.vision_model.head.probe": torch.ones(1)}, path)
    source = find_tower(tmp_path, load_config(tmp_path))
    assert source is not None
    shape = tuple(values.shape)
    assert source.outline().num_tokens(shape, GRIDS[0]) == len(expected)
    source._check_match(source.outline())


def test_sizes(tmp_path: Path) -> None:
    tower = load(reference(), tmp_path)
    assert tower.num_tokens((24, WIDTH), (1, 4, 6)) == 6
    assert tower.span_grid((1, 4, 6)) is None
    for shape, grid in (
        ((24, WIDTH), (1, 3, 8)),
        ((24, WIDTH), (2, 2, 6)),
        ((24, WIDTH - 1), (1, 4, 6)),
        ((0, WIDTH), (1, 0, 6)),
        ((8 * MAX_TOKENS, WIDTH), (1, 2, 4 * MAX_TOKENS)),
    ):
        with pytest.raises(InvalidRequestError, match="multiples of 2 rows and columns"):
            tower.num_tokens(shape, grid)


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ({"vision_feature_layer": -2}, {}, "vision_feature_layer"),
        ({"projector_hidden_act": "relu"}, {}, "projector_hidden_act"),
        ({"downsample_factor": 0}, {}, "downsample_factor"),
        ({}, {"num_patches": 24}, "must be a square"),
        ({}, {"num_attention_heads": 7}, "num_attention_heads"),
        ({"vision_config": None}, None, "must be an object"),
    ],
)
def test_other_configs_are_refused(outer: dict, inner: dict | None, message: str) -> None:
    raw = raw_config(reference())
    raw |= outer
    if inner is not None:
        raw["vision_config"] |= inner
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Lfm2VlVisionConfig.from_hf(raw, 64)
