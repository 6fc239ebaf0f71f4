"""Videos are read as frames, from animations and from a caller's pictures, within bounds."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.images.pictures import file_of, random_picture

from quire.errors import InvalidRequestError
from quire.images import video as video_module
from quire.images.video import DEFAULT_FPS, check_video, decode_video

FRAMES = [random_picture(20, 10, seed) for seed in range(5)]


def animation(kind: str, frames: list[Image.Image] = FRAMES, **options: Any) -> bytes:
    """The file of an animation with 200 ms a frame, without losses but for GIF's colours."""
    file = BytesIO()
    given = {"duration": 200, "lossless": True} | options
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], **given)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_all_frames_of_an_animation_are_read(kind: str) -> None:
    found = decode_video(animation(kind), "a")
    assert found.fps == pytest.approx(5.0)
    assert len(found.frames) == len(FRAMES)
    for frame, expected in zip(found.frames, FRAMES, strict=True):
        assert frame.mode == "RGB" and frame.size == (20, 10)
        difference = np.abs(np.asarray(frame, int) - np.asarray(expected, int))
        assert difference.max() == 0 if kind != "GIF" else difference.mean() < 30


def test_the_picture_for_viewers_without_animations_is_no_frame() -> None:
    found = decode_video(animation("PNG", default_image=True), "a")
    assert len(found.frames) == len(FRAMES) - 1
    assert np.array_equal(np.asarray(found.frames[0]), np.asarray(FRAMES[1]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (file_of(FRAMES[0]), "stands still; send it as an image"),
        (b"\0\0\0\x20ftypisom" + bytes(99), "such as MP4, are not decoded"),
        (file_of(FRAMES[0], "JPEG"), "no image of the formats GIF, WEBP, PNG"),
        (animation("WEBP")[:-300], "can't be decoded"),
    ],
)
def test_other_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        decode_video(data, "video messages[0]")
    assert refused.value.param == "messages"
    assert str(refused.value).startswith("the video messages[0] ")


def test_frames_of_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_module, "MAX_FILE_FRAME_PIXELS", 4 * 20 * 10)
    with pytest.raises(InvalidRequestError, match="more than 800 pixels in all its frames"):
        decode_video(animation("GIF"), "a")
    monkeypatch.setattr(video_module, "MAX_FILE_FRAME_PIXELS", 5 * 20 * 10)
    assert len(decode_video(animation("GIF"), "a").frames) == 5
    monkeypatch.setattr(video_module, "MAX_FRAMES", 4)
    for read, given in ((decode_video, animation("GIF")), (check_video, FRAMES)):
        with pytest.raises(InvalidRequestError, match="more than 4 frames"):
            read(given, "a")


@pytest.mark.parametrize(
    ("size", "reason"),
    [((30, 10), "a frame that is larger than its canvas"), ((13000, 13000), "too many pixels")],
)
def test_a_frame_does_not_enlarge_the_canvas(size: tuple[int, int], reason: str) -> None:
    """Pillow would enlarge it for all further frames, beyond the pixels that were counted."""
    data = bytearray(animation("GIF"))
    at = data.rindex(np.array([0, 0, 20, 10], "<u2").tobytes())  # of the last frame
    data[at + 4 : at + 8] = np.array(size, "<u2").tobytes()
    with pytest.raises(InvalidRequestError, match=reason):
        decode_video(bytes(data), "a")


def test_frames_of_a_caller_are_taken() -> None:
    array = np.stack([np.asarray(frame) for frame in FRAMES])
    for given in (FRAMES, array, list(array), (FRAMES, {"fps": None})):
        found = check_video(given, "a")
        assert found.fps == DEFAULT_FPS
        assert np.array_equal(np.stack([np.asarray(frame) for frame in found.frames]), array)
    assert check_video((array, {"fps": 2}), "a").fps == 2.0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "a list of pictures"),
        (3, "a list of pictures"),
        (np.zeros((4, 4, 3), np.uint8), "a list of pictures"),
        ([FRAMES[0], random_picture(3, 3)], "frames of several sizes"),
        ([FRAMES[0], "https://a.b/c.png"], r"a\[1\] has the type str"),
        ((FRAMES, {"fps": 0}), "has the fps 0"),
        ((FRAMES, {"fps": True}), "has the fps True"),
        ((FRAMES, {"frames_indices": [1]}), "of its fields only fps"),
    ],
)
def test_other_frames_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        check_video(given, "a")
