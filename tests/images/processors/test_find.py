"""Which processor a model's folder gets, and which settings are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError
from quire.images.processors.find import _PROCESSORS, find_processor
from quire.images.processors.gemma3 import Gemma3Processor
from quire.images.processors.gemma4 import Gemma4Processor
from quire.images.processors.idefics3 import Idefics3Processor
from quire.images.processors.internvl import InternVLProcessor
from quire.images.processors.lfm2_vl import Lfm2VlProcessor
from quire.images.processors.pixtral import PixtralProcessor
from quire.images.processors.qwen_video import QwenVideoProcessor
from quire.images.processors.qwen_vl import QwenProcessor
from quire.models.vision.towers import TOWERS

TILES = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
VISION = {"patch_size": 16}


def folder_with(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("kind", "vision", "expected"),
    [
        ("smolvlm", VISION, Idefics3Processor),
        ("idefics3", VISION, Idefics3Processor),
        ("internvl", {"image_size": [448, 448]}, InternVLProcessor),
        ("lfm2_vl", VISION, Lfm2VlProcessor),
        ("mistral3", VISION, PixtralProcessor),
        ("llava", {"model_type": "pixtral"}, PixtralProcessor),
        ("llava", {"model_type": "clip_vision_model"}, None),
        ("qwen3_vl", VISION, QwenProcessor),
        ("qwen3_5", VISION, QwenProcessor),
        ("qwen3_5", None, None),
        ("gemma3", VISION, Gemma3Processor),
        ("gemma4", VISION, Gemma4Processor),
        ("llama", None, None),
    ],
)
def test_the_config_names_the_processor(
    tmp_path: Path, kind: str, vision: Any, expected: type | None
) -> None:
    fields: dict[str, Any] = TILES if expected is Idefics3Processor else {"do_resize": True}
    if expected is InternVLProcessor:
        fields = {"size": {"height": 448, "width": 448}}
    folder = folder_with(
        tmp_path,
        config={"model_type": kind, "vision_config": vision},
        preprocessor_config=fields,
    )
    found = find_processor(folder)
    assert type(found) is (expected or type(None))


def test_each_processor_has_an_encoder() -> None:
    def plain(name: str) -> str:
        return name.removesuffix("ForConditionalGeneration").replace("_", "").lower()

    towers = set(map(plain, TOWERS))
    assert set(map(plain, _PROCESSORS)) <= towers


def test_the_settings_may_stand_in_one_file(tmp_path: Path) -> None:
    config = {"model_type": "smolvlm", "vision_config": VISION, "scale_factor": 2}
    assert find_processor(tmp_path) is None
    assert find_processor(folder_with(tmp_path, config=config)) is None
    around = {"image_processor": TILES, "image_seq_len": 4}
    found = find_processor(folder_with(tmp_path, processor_config=around))
    assert isinstance(found, Idefics3Processor) and found.tokens_of_tile == 4
    with pytest.raises(CheckpointError, match="image_seq_len is 5, but a tile of 64 pixels gets 4"):
        find_processor(folder_with(tmp_path, processor_config={**around, "image_seq_len": 5}))


def test_changes_replace_the_settings_of_the_files(tmp_path: Path) -> None:
    """A change replaces a setting of images, of videos, or of both."""
    folder = folder_with(
        tmp_path,
        config={"model_type": "qwen3_vl", "vision_config": VISION},
        preprocessor_config={"min_pixels": 5000, "max_pixels": 90000},
        video_preprocessor_config={"fps": 2.0},
    )
    mean = [0.1, 0.2, 0.3]
    found = find_processor(folder, None, {"max_pixels": 70000, "fps": 4.0, "image_mean": mean})
    assert isinstance(found, QwenProcessor) and isinstance(found.video, QwenVideoProcessor)
    assert (found.least_pixels, found.most_pixels, found.video._fps) == (5000, 70000, 4.0)
    assert found._normalize.mean == found.video._normalize.mean == tuple(mean)
    plain = find_processor(folder, None, {})
    assert plain is not None and plain.identity != found.identity
    with pytest.raises(CheckpointError, match=r"max_pixles is no setting of .* QwenProcessor"):
        find_processor(folder, None, {"max_pixles": 70000})
    with pytest.raises(CheckpointError, match="max_pixels of the image processor is 'x'"):
        find_processor(folder, None, {"max_pixels": "x"})


@pytest.mark.parametrize("kind", [kind for kind in _PROCESSORS if kind != "mistral3"])
def test_no_family_takes_a_setting_that_it_does_not_read(tmp_path: Path, kind: str) -> None:
    size = {"height": 448, "width": 448}
    fields = {"internvl": {"size": size}, "idefics3": TILES, "smolvlm": TILES}
    vision = {"image_size": [448, 448]} if kind == "internvl" else VISION
    folder = folder_with(
        tmp_path,
        config={"model_type": kind, "vision_config": vision},
        preprocessor_config=fields.get(kind, {"do_resize": True}),
    )
    assert find_processor(folder, None, {"rescale_factor": 0.01}) is not None
    with pytest.raises(CheckpointError, match="do_pan is no setting of the model's image"):
        find_processor(folder, None, {"do_pan": True})


@pytest.mark.parametrize(
    ("config", "size", "around", "named"),
    [
        ({}, {"height": 448, "width": 336}, {}, "an equal height and width"),
        ({}, {"shortest_edge": 448}, {}, "an object with height and width"),
        ({}, {"height": 392, "width": 392}, {}, "for an encoder of 448 pixels"),
        ({"downsample_ratio": 0.3}, {"height": 448, "width": 448}, {}, "groups of 3"),
        ({"downsample_ratio": 1e-9}, {"height": 448, "width": 448}, {}, "groups of 448"),
        ({}, {"height": 448, "width": 448}, {"image_seq_length": 64}, "gets 256 tokens"),
    ],
)
def test_tiles_of_internvl_fit_the_encoder(
    tmp_path: Path, config: Any, size: Any, around: Any, named: str
) -> None:
    folder = folder_with(
        tmp_path,
        config={"model_type": "internvl", "vision_config": {}, **config},
        preprocessor_config={"size": size},
        processor_config=around,
    )
    with pytest.raises(CheckpointError, match=named):
        find_processor(folder)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"size": {"height": 3}}, "size"),
        ({"size": {"longest_edge": 0}}, "size"),
        ({"resample": 9}, "resample"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"image_mean": [1, 2]}, "image_mean"),
        ({"rescale_factor": True}, "rescale_factor"),
        ({"max_image_size": {"longest_edge": 50}}, "a tile of 50 pixels"),
    ],
)
def test_settings_that_are_not_obeyed_are_refused(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    config = {"model_type": "smolvlm", "vision_config": VISION}
    folder = folder_with(tmp_path, config=config, preprocessor_config={**TILES, **changed})
    with pytest.raises(CheckpointError, match=named):
        find_processor(folder)
