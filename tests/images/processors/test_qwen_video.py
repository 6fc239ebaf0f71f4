"""Qwen's video processor: transformers' texts and pixels, for odd numbers of frames."""

import hashlib
from typing import Any

import numpy as np
import pytest
from tests.images.pictures import random_picture

from quire.errors import CheckpointError, InvalidRequestError
from quire.images.processors.processor import VideoProcessor
from quire.images.processors.qwen_vl import QwenProcessor

SETTINGS: dict[str, dict[str, Any]] = {
    "published": {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "small": {"size": {"longest_edge": 60000, "shortest_edge": 4096}, "patch_size": 8},
    "capped": {
        "size": {"longest_edge": 60000, "shortest_edge": 1024},
        "patch_size": 8,
        "cap_pixels_per_frame": True,
        "max_video_tokens": 9,
    },
    "whole": {
        "size": {"longest_edge": 60000, "shortest_edge": 4096},
        "patch_size": 8,
        "do_sample_frames": False,
    },
}

# Setting, number of frames, frames each second, size, and digests of the text and of the pixels (8
# bits each, in the order of the values) of transformers 5.23's Qwen3VLVideoProcessor with
# torchvision 0.28, which the test does not need.
THEIRS = [
    ("published", 5, 7.5, (37, 53), "8735647b59f792ba", "a744740206471644"),
    ("published", 9, 3.0, (64, 64), "ae15fddf3813e58d", "7fc8799f9565430a"),
    ("published", 2, 1.0, (90, 20), "6c845d7bc0ac83d5", "37279aa21820a92e"),
    ("small", 5, 7.5, (37, 53), "5c74d01ab34f5906", "c0160775129baa11"),
    ("small", 9, 3.0, (64, 64), "284e2fd94867b3b5", "a4a20c8c632b1cce"),
    ("small", 2, 1.0, (90, 20), "2ef4d1ce15a282b8", "491c8af8d527e0a7"),
    ("capped", 5, 7.5, (37, 53), "5c74d01ab34f5906", "c0160775129baa11"),
    ("capped", 9, 3.0, (64, 64), "a562d57b42b6b603", "bf82d4c98bca9e84"),
    ("capped", 2, 1.0, (90, 20), "c8f7b5734aaa6c2f", "fd65b3931db00ce9"),
    ("whole", 5, 7.5, (37, 53), "aaefd94b6349c44a", "722714ab80ae8c83"),
    ("whole", 9, 3.0, (64, 64), "a92456bfc0d46824", "84ab27b764988204"),
    ("whole", 2, 1.0, (90, 20), "2ef4d1ce15a282b8", "491c8af8d527e0a7"),
]


def make_processor(fields: dict[str, Any]) -> VideoProcessor:
    patch = {"patch_size": fields.get("patch_size", 16)}
    found = QwenProcessor({}, patch, {"video_processor": fields}).video
    assert found is not None
    return found


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@pytest.mark.parametrize(("setting", "count", "fps", "size", "text", "pixels"), THEIRS)
def test_texts_and_pixels_are_those_of_transformers(
    setting: str, count: int, fps: float, size: tuple[int, int], text: str, pixels: str
) -> None:
    processor = make_processor(SETTINGS[setting])
    frames = [random_picture(*size, seed) for seed in range(count)]
    places = processor.sample(count, fps)
    found = processor.process([frames[place] for place in places], places, fps)
    assert digest(found.text.encode()) == text
    values = np.concatenate(
        [np.frombuffer(item.content.values, np.float32) for item in found.items]
    )
    levels = ((values * 0.5 + 0.5) * 255).round()
    assert digest(levels.astype(np.uint8).tobytes()) == pixels
    np.testing.assert_allclose(values, levels / 255 * 2 - 1, atol=1e-5)
    layout = processor.layout(len(places), *size)
    assert layout.num_tokens == sum(item.num_tokens for item in found.items)
    assert layout.tokens_of_item == found.items[0].num_tokens
    assert layout.num_bytes == values.nbytes
    assert found.text.count(processor.placeholder) == layout.num_tokens


def test_long_videos_are_sampled() -> None:
    processor = make_processor({"max_frames": 6})
    assert processor.sample(100, 10.0) == [0, 20, 40, 59, 79, 99]
    assert len(processor.sample(20, 10.0)) == 4
    assert processor.sample(3, 10.0) == [0, 1, 2]


def test_videos_that_cannot_be_read_are_refused() -> None:
    processor = make_processor({"patch_size": 16})
    with pytest.raises(InvalidRequestError, match="has 1 frames, but this model reads at least 2"):
        processor.sample(1, 10.0)
    with pytest.raises(InvalidRequestError, match="times as long as it is wide"):
        processor.layout(4, 64 * 201, 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_frames": 8},
        {"size": {"height": 3}},
        {"resample": 1},
        {"do_resize": False},
        {"fps": 0},
    ],
)
def test_settings_that_are_not_obeyed_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(fields))):
        make_processor(fields)
