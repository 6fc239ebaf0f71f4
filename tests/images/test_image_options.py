"""The options about images."""

from typing import Any

import pytest

from quire.errors import ConfigurationError
from quire.images.image_options import MAX_IMAGES, MAX_VIDEOS, ImageOptions


def test_the_number_of_images() -> None:
    assert ImageOptions().max_images == MAX_IMAGES
    assert ImageOptions(limit_mm_per_prompt={"image": 0, "video": 0}).max_images == 0
    assert ImageOptions(limit_mm_per_prompt={"audio": 0}).max_images == MAX_IMAGES
    assert ImageOptions(limit_mm_per_prompt={"video": 2}).max_videos == 2
    assert ImageOptions(limit_mm_per_prompt={"image": 1}).max_videos == MAX_VIDEOS
    described = ImageOptions(limit_mm_per_prompt={"image": {"count": 3, "width": 9}, "video": {}})
    assert (described.max_images, described.max_videos) == (3, MAX_VIDEOS)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_mm_per_prompt": {"image": -1}},
        {"limit_mm_per_prompt": {"image": True}},
        {"limit_mm_per_prompt": {"video": -1}},
        {"limit_mm_per_prompt": {"audio": 1}},
        {"limit_mm_per_prompt": {"images": 1}},
        {"limit_mm_per_prompt": {"image": {"count": -1}}},
        {"limit_mm_per_prompt": {"image": {"number": 1}}},
        {"limit_mm_per_prompt": {"audio": {"count": 0}}},
        {"allowed_local_media_path": "/no/such/folder"},
    ],
)
def test_other_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ImageOptions(**options)
