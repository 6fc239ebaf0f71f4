"""Pixtral's tower and its two connectors, compared with transformers."""

from pathlib import Path

import pytest
import torch
from tests.models.vision.pixtral_files import BREAK, END, make_image, reference
from tests.models.vision.towers import (
    assert_close,
    encoded,
    encoded_with_pauses,
    load,
    num_slices,
    raw_config,
)

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from quire.models.vision.pixtral import PixtralConfig

FAMILIES = ["mistral3", "llava", "early layer"]
NO_GRID = (1, 1, 1)


@pytest.mark.parametrize(
    ("size", "kernels"), [((6, 4), "auto"), ((2, 24), "torch"), ((16, 18), "auto")], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_transformers(
    family: str, size: tuple[int, int], kernels: str, tmp_path: Path
) -> None:
    model = reference(family)
    tower = load(model, tmp_path, kernels=kernels)
    values = make_image(*size)
    with torch.inference_mode():
        features = model.model.get_image_features(
            values[None],
            image_sizes=torch.tensor([values.shape[1:]]),
            vision_feature_layer=model.config.vision_feature_layer,
        ).pooler_output[0]
        breaks = model.get_input_embeddings()(torch.tensor([BREAK, END]))
    num_rows = size[0] // (2 if family == "mistral3" else 1)
    found = encoded(tower, values, NO_GRID).unflatten(0, (num_rows, -1))
    assert_close(found[:, :-1].flatten(0, 1), features)
    assert torch.equal(found[:-1, -1], breaks[:1].expand(num_rows - 1, -1))
    assert torch.equal(found[-1, -1], breaks[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pauses_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tower = load(reference(), tmp_path, dtype)
    values = make_image(16, 18)
    whole = encoded(tower, values, NO_GRID)
    assert whole.dtype == dtype
    assert torch.equal(encoded_with_pauses(tower, values, NO_GRID), whole)
    encoded(tower, make_image(2, 4), NO_GRID)
    assert torch.equal(encoded(tower, values, NO_GRID), whole)
    assert num_slices(tower, values, NO_GRID) > 20


@pytest.mark.parametrize("shape", [(3, 12, 16), (3, 104, 8), (3, 0, 8), (1, 16, 16), (16, 48)])
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    tower = load(reference(), tmp_path)
    with pytest.raises(InvalidRequestError, match="in multiples of 8 up to 96"):
        tower.num_tokens(shape, NO_GRID)
    with pytest.raises(InvalidRequestError, match="4 rows and 6 columns of patches"):
        tower.num_tokens((3, 16, 24), (1, 2, 3))
    assert tower.num_tokens((3, 16, 24), (1, 4, 6)) == tower.num_tokens((3, 16, 24), NO_GRID) == 8


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llava", {"vision_feature_select_strategy": "default"}, "must be 'full'"),
        ("llava", {"vision_feature_layer": [-1, -2]}, "one number of a layer"),
        ("mistral3", {"vision_feature_layer": 4}, "from -3 to 2"),
        ("mistral3", {"image_token_index": 11}, "only id of"),
        ("mistral3", {"projector_hidden_act": "relu"}, "projector_hidden_act"),
    ],
)
def test_other_connectors_are_refused(family: str, change: dict, message: str) -> None:
    raw = raw_config(reference(family)) | change
    with pytest.raises(UnsupportedModelError, match=message):
        PixtralConfig.from_hf(raw, 48)


def test_heads_must_have_the_tower_s_width() -> None:
    raw = raw_config(reference())
    raw["vision_config"]["head_dim"] = 8
    with pytest.raises(CheckpointError, match="head_dim of the vision_config"):
        PixtralConfig.from_hf(raw, 48)
