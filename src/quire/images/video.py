"""Reads videos as frames: animations that Pillow decodes, and frames that a Python caller gives.

Files of other formats, such as MP4, are refused. Called by `reader`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.images.decode import MAX_PIXELS, check_image, opened_image, to_rgb
from quire.images.wrong_media import wrong_media

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("GIF", "WEBP", "PNG")
"""Formats of animations."""

MAX_FRAMES = 4096
"""Frames of one video, before a processor samples them."""

MAX_FILE_FRAME_PIXELS = MAX_PIXELS
"""Pixels of all frames of a file together, which are held until they are sampled."""

DEFAULT_FPS = 24.0
"""Frames of each second where a caller says nothing, as in transformers."""

_FRAME_MS = 100.0
"""Milliseconds of a frame of a file that says nothing, as in browsers."""

_ADVICE = "other files, such as MP4, are not decoded: send their frames as one of these"


class Video(NamedTuple):
    """The frames of a video, RGB pictures of one size."""

    frames: "Sequence[Image]"
    #: Frames of each second.
    fps: float


def decode_video(data: bytes, where: str) -> Video:
    """All frames of an animation. where: names the video in errors. Raises InvalidRequestError for
    a file that is too large, is of another format, or is broken."""
    with opened_image(data, where, FORMATS, _ADVICE) as opened:
        width, height = opened.size
        # The first picture of an animated PNG may be one for viewers that show no animation.
        first = int(getattr(opened, "default_image", False))
        frames: list[Image] = []
        length_ms = 0.0
        while True:
            try:
                opened.seek(first + len(frames))
            except EOFError:
                break
            if opened.size != (width, height):  # Pillow enlarges the canvas of a GIF file
                raise wrong_media(where, "has a frame that is larger than its canvas; save it anew")
            if (len(frames) + 1) * width * height > MAX_FILE_FRAME_PIXELS:
                raise wrong_media(
                    where,
                    f"has more than {MAX_FILE_FRAME_PIXELS} pixels in all its frames; send fewer"
                    " or smaller ones",
                )
            _check_count(len(frames) + 1, where)
            opened.load()
            length_ms += opened.info.get("duration") or _FRAME_MS
            frames.append(to_rgb(opened.copy()))
    if len(frames) < 2:
        raise wrong_media(where, "is a picture that stands still; send it as an image")
    return Video(frames, 1000.0 * len(frames) / length_ms)


def check_video(given: Any, where: str) -> Video:
    """A video that a caller of the offline API gives: a list of pictures or an array [frames,
    height, width, channels], or a tuple of these and {"fps": number}. Raises
    InvalidRequestError."""
    # First, read the rate.
    fps: Any = DEFAULT_FPS
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, fields = given
        unknown = [name for name in fields if name != "fps" and fields[name] is not None]
        if unknown:
            raise wrong_media(where, f"has {unknown[0]!r:.80}, but of its fields only fps is read")
        fps = DEFAULT_FPS if fields.get("fps") is None else fields["fps"]
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1e-3 <= fps <= 1e3:
        raise wrong_media(
            where, f"has the fps {fps!r:.80}, but must have 0.001 to 1000 frames a second"
        )
    # Then check the frames.
    is_list = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 4
    if not is_list or not len(given):
        raise wrong_media(
            where, "must be a list of pictures, an array with four axes, or the URL of an animation"
        )
    _check_count(len(given), where)
    frames = [check_image(frame, f"{where}[{at}]") for at, frame in enumerate(given)]
    if len({frame.size for frame in frames}) > 1:
        raise wrong_media(where, "has frames of several sizes; give all one size")
    return Video(frames, float(fps))


def _check_count(num_frames: int, where: str) -> None:
    if num_frames > MAX_FRAMES:
        raise wrong_media(where, f"has more than {MAX_FRAMES} frames; send fewer")
