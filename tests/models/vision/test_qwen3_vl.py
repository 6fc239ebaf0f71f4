"""The tower of Qwen3-VL and Qwen3.5, compared with transformers."""

from pathlib import Path

import pytest
import torch
from tests.models.vision.qwen3_vl_files import WIDTH, make_patches, reference
from tests.models.vision.towers import (
    assert_close,
    encoded,
    encoded_with_pauses,
    load,
    num_slices,
    raw_config,
)

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from quire.models.vision.qwen3_vl import Qwen3VLVisionConfig

GRID = (1, 14, 18)


@pytest.mark.parametrize(
    ("grid", "kernels"), [((1, 2, 6), "auto"), ((1, 12, 2), "torch"), (GRID, "auto")], ids=str
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_embeddings_equal_transformers(
    family: str, grid: tuple[int, int, int], kernels: str, tmp_path: Path
) -> None:
    model = reference(family)
    tower = load(model, tmp_path, kernels=kernels)
    values = make_patches(grid)
    with torch.inference_mode():
        found = model.model.get_image_features(values, torch.tensor([grid]))
    parts = [found.pooler_output[0]]
    if family == "qwen3_vl":
        parts += [each[0] for each in found.deepstack_features]
    assert tower.num_parts == len(parts) == (3 if family == "qwen3_vl" else 1)
    for part, expected in zip(encoded(tower, values, grid).split(48, 1), parts, strict=True):
        assert_close(part, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pauses_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tower, values = load(reference(), tmp_path, dtype), make_patches(GRID)
    whole = encoded(tower, values, GRID)
    assert whole.dtype == dtype
    assert torch.equal(encoded_with_pauses(tower, values, GRID), whole)
    encoded(tower, make_patches((1, 2, 6)), (1, 2, 6))
    assert torch.equal(encoded(tower, values, GRID), whole)
    assert num_slices(tower, values, GRID) > 20


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((12, WIDTH), (1, 3, 4)),
        ((12, WIDTH), (1, 2, 8)),
        ((12, WIDTH + 1), (1, 2, 6)),
        ((24, WIDTH), (2, 2, 6)),
        ((0, WIDTH), (1, 0, 6)),
        ((70000, WIDTH), (1, 2, 35000)),
    ],
)
def test_images_that_do_not_fit_are_refused(
    shape: tuple[int, ...], grid: tuple[int, int, int], tmp_path: Path
) -> None:
    tower = load(reference(), tmp_path)
    with pytest.raises(InvalidRequestError, match="a row of 96 numbers for each patch"):
        tower.num_tokens(shape, grid)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision_config", {"deepstack_visual_indexes": [1, 0]}, "ascending list of layers"),
        ("vision_config", {"deepstack_visual_indexes": [3]}, "from 0 to 2"),
        ("vision_config", {"num_position_embeddings": 35}, "must be a square"),
        ("vision_config", {"num_heads": 5}, "a multiple of"),
        ("vision_config", {"out_hidden_size": 64}, "hidden_size of the text_config, 48"),
        ("text_config", {"rope_parameters": {"mrope_section": [16]}}, "a list of 3 numbers"),
    ],
)
def test_sizes_must_fit(part: str, change: dict, message: str) -> None:
    raw = raw_config(reference())
    raw[part] |= change
    with pytest.raises(CheckpointError, match=message):
        Qwen3VLVisionConfig.from_hf(raw, 48)


def test_positions_in_sections_side_by_side_are_refused() -> None:
    raw = raw_config(reference())
    raw["text_config"]["rope_parameters"]["mrope_interleaved"] = False
    with pytest.raises(UnsupportedModelError, match="mrope_interleaved"):
        Qwen3VLVisionConfig.from_hf(raw, 48)


def test_sections_are_those_of_the_text_config(tmp_path: Path) -> None:
    assert load(reference(), tmp_path).rotary_sections == (6, 5, 5)
    raw = raw_config(reference("qwen3_5"))
    assert Qwen3VLVisionConfig.from_hf(raw, 48).sections == (2, 1, 1)
    del raw["text_config"]["rope_parameters"]["mrope_section"]
    assert Qwen3VLVisionConfig.from_hf(raw, 48).sections == (11, 11, 10)
