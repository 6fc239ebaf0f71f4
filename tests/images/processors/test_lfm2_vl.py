"""LFM2-VL's processor: torch's resize to the bit, and transformers' texts and pixels."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from tests.images.pictures import random_picture

from quire.errors import CheckpointError, InvalidRequestError
from quire.images.processors.lfm2_vl import Lfm2VlProcessor
from quire.images.processors.pixels import BICUBIC, BILINEAR
from quire.images.processors.torch_resize import resize_as_torch

_SMALL = {
    "encoder_patch_size": 8,
    "tile_size": 64,
    "max_image_tokens": 16,
    "min_image_tokens": 4,
    "max_tiles": 6,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {},
    "small": _SMALL,
    "no thumbnail": _SMALL | {"max_image_tokens": 9, "max_tiles": 10, "use_thumbnail": False},
    "not cut": _SMALL | {"do_image_splitting": False},
}

# Setting, size, and digests of the text and of the pixels (8 bits each, in the order of the values)
# of transformers 5.23's Lfm2VlProcessor with torchvision 0.28, which the test does not need.
THEIRS = [
    ("small", (37, 53), "58e4fe8f6d625e45", "03bd44a24a7b4571"),
    ("small", (101, 311), "24b676205dbd2e18", "9623b4cf0dcf3706"),
    ("small", (64, 64), "53dc655382e96acc", "b8737c82226f10d6"),
    ("small", (511, 513), "bb7cc39cebbc0b6a", "8b629601daa7a543"),
    ("small", (5, 5), "0071633f0defa5bb", "5dc05173deed4663"),
    ("no thumbnail", (37, 53), "58e4fe8f6d625e45", "03bd44a24a7b4571"),
    ("no thumbnail", (101, 311), "1a7ccbe58a41a5db", "66ab5a60a52d5062"),
    ("no thumbnail", (64, 64), "718cec4419aca583", "55be436b454cf445"),
    ("no thumbnail", (511, 513), "7103ca19e456573a", "d1226b9fc927014a"),
    ("no thumbnail", (5, 5), "0071633f0defa5bb", "5dc05173deed4663"),
    ("not cut", (37, 53), "58e4fe8f6d625e45", "03bd44a24a7b4571"),
    ("not cut", (101, 311), "a9acaa80eb99b574", "4bb5a4caeac6d165"),
    ("not cut", (64, 64), "53dc655382e96acc", "b8737c82226f10d6"),
    ("not cut", (511, 513), "e7551c2977678a57", "bf4f3cb1ea05c90c"),
    ("not cut", (5, 5), "0071633f0defa5bb", "5dc05173deed4663"),
    ("published", (900, 620), "c2e2459853e1f559", "e0e225163abbd39f"),
]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def make_processor(fields: dict[str, Any]) -> Lfm2VlProcessor:
    vision = {"patch_size": fields.get("encoder_patch_size", 16)}
    return Lfm2VlProcessor({"vision_config": vision}, fields, {})


@pytest.mark.parametrize(("setting", "size", "text", "pixels"), THEIRS)
def test_texts_and_pixels_are_those_of_transformers(
    setting: str, size: tuple[int, int], text: str, pixels: str
) -> None:
    processor = make_processor(SETTINGS[setting])
    found = processor.process(random_picture(*size))
    assert digest(found.text.encode()) == text
    values = np.concatenate(
        [np.frombuffer(item.content.values, np.float32) for item in found.items]
    )
    levels = ((values * 0.5 + 0.5) * 255).round()
    assert digest(levels.astype(np.uint8).tobytes()) == pixels
    np.testing.assert_allclose(values, levels / 255 * 2 - 1, atol=1e-5)
    for item in found.items:
        assert item.content.shape[0] == np.prod(item.content.grid) == 4 * item.num_tokens
    layout = processor.layout(*size)
    assert layout.num_tokens == sum(item.num_tokens for item in found.items)
    assert layout.tokens_of_item == max(item.num_tokens for item in found.items)
    assert layout.num_bytes == values.nbytes


@pytest.mark.parametrize(
    ("size", "to"),
    [
        ((37, 53), (64, 96)),
        ((640, 481), (256, 192)),
        ((101, 997), (64, 512)),
        ((511, 513), (512, 512)),
        ((1, 1), (32, 64)),
        ((64, 700), (64, 13)),
    ],
)
@pytest.mark.parametrize(("resample", "mode"), [(BILINEAR, "bilinear"), (BICUBIC, "bicubic")])
def test_resizes_as_torch_does(
    size: tuple[int, int], to: tuple[int, int], resample: int, mode: str
) -> None:
    picture, (width, height) = random_picture(*size), to
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(pixels, (height, width), mode=mode, antialias=True)
    found = np.asarray(resize_as_torch(picture, height, width, resample))
    assert np.array_equal(found, expected[0].permute(1, 2, 0))


@pytest.mark.parametrize(
    ("fields", "config", "around", "named"),
    [
        ({"resample": 1}, {}, {}, "resample"),
        ({"tile_size": 500}, {}, {}, "a multiple of 32"),
        ({"tile_size": 4096}, {}, {}, "tile_size"),
        ({"min_tiles": 1}, {}, {}, "from 2 to 10"),
        ({"do_pad": False}, {}, {}, "do_pad"),
        ({}, {"downsample_factor": 4}, {}, "of config.json has 16 and 4"),
        ({}, {}, {"use_image_special_tokens": False}, "use_image_special_tokens"),
    ],
)
def test_settings_that_are_not_obeyed_are_refused(
    fields: dict[str, Any], config: dict[str, Any], around: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        Lfm2VlProcessor({"vision_config": {"patch_size": 16}} | config, fields, around)


def test_pictures_too_narrow_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="times as long as it is wide"):
        make_processor({}).process(random_picture(900, 4))
