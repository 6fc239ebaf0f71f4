"""The video processor of Qwen3-VL and Qwen3.5, which makes a content of each pair of frames.

The encoder reads the frames of one patch together, and no frame attends to another pair's. So a
pair is encoded like an image, and the time of each pair stands before it as text. Source:
Qwen3-VL (arXiv:2511.21631, section 2.3), and transformers' video processor of the same name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError, InvalidRequestError
from quire.images.processors.pixels import (
    BICUBIC,
    BILINEAR,
    IMAGENET_STANDARD,
    Normalizer,
    Settings,
)
from quire.images.processors.processor import (
    ImageProcessor,
    Item,
    Layout,
    ProcessedImage,
    VideoProcessor,
)
from quire.images.processors.torch_resize import resize_as_torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

MOST_PIXELS = 1 << 30
"""Maximum value of a bound of pixels."""
_MOST_RATIO = 200


class QwenVideoProcessor(VideoProcessor):
    """Samples frames at a fixed rate, and gives all frames one size."""

    placeholder = "<|video_pad|>"
    _START, _END = "<|vision_start|>", "<|vision_end|>"

    def __init__(self, images: ImageProcessor, fields: Mapping[str, Any]) -> None:
        """images: the processor that names contents. fields: the video processor's settings. Raises
        CheckpointError."""
        # First, the settings that are obeyed at few values only.
        settings = Settings(fields)
        settings.require("do_resize", True)
        settings.require("do_convert_rgb", True)
        if fields.get("num_frames") is not None:
            raise CheckpointError(
                "num_frames of the video processor is set, but only fps is obeyed"
            )
        if set(settings.keys_of("size")) - {"shortest_edge", "longest_edge"}:
            raise settings.wrong("size", "an object with shortest_edge and longest_edge")
        self._resample = settings.resample(BICUBIC)
        if self._resample not in (BILINEAR, BICUBIC):
            raise settings.wrong("resample", "2 (bilinear) or 3 (bicubic)")
        # Then, the sizes.
        self._images = images
        self._patch = settings.whole("patch_size", 16)
        self._merge = settings.whole("merge_size", 2)
        self._together = settings.whole("temporal_patch_size", 2, 64)
        self._least_pixels = settings.of_size("size", "shortest_edge", 128 * 32 * 32, MOST_PIXELS)
        self._most_pixels = settings.of_size("size", "longest_edge", 768 * 32 * 32, MOST_PIXELS)
        self._most_frame_tokens = settings.whole("max_video_tokens", 768)
        self._caps_frames = settings.flag("cap_pixels_per_frame", False)
        # Last, the rate at which frames are sampled.
        self._samples = settings.flag("do_sample_frames", True)
        self._fps = settings.number("fps", 2.0)
        self._least_frames = settings.whole("min_frames", 4)
        self._most_frames = settings.whole("max_frames", 768)
        self._normalize = Normalizer(settings, IMAGENET_STANDARD, IMAGENET_STANDARD)

    def sample(self, num_frames: int, fps: float) -> list[int]:
        if num_frames < self._together:
            raise InvalidRequestError(
                f"a video has {num_frames} frames, but this model reads at least {self._together}"
            )
        if not self._samples:
            return list(range(num_frames))
        import numpy as np  # a server for text never loads it

        count = max(int(num_frames / fps * self._fps), self._least_frames)
        count = min(count, self._most_frames, num_frames)
        places: list[int] = np.linspace(0, num_frames - 1, count).round().astype(int).tolist()
        return places

    def layout(self, num_frames: int, width: int, height: int) -> Layout:
        rows, columns = self._patches(num_frames, width, height)
        num_groups = -(-num_frames // self._together)
        num_tokens = rows * columns // self._merge**2
        num_values = rows * columns * 3 * self._together * self._patch**2
        return Layout(num_tokens, num_groups * num_tokens, num_groups * num_values * 4)

    def process(
        self, frames: "Sequence[Image]", places: Sequence[int], fps: float
    ) -> ProcessedImage:
        rows, columns = self._patches(len(frames), *frames[0].size)
        grid = 1, rows // self._merge, columns // self._merge
        num_tokens = grid[1] * grid[2]
        items, parts = [], []
        for first in range(0, len(frames), self._together):
            # The last frame is repeated until its group is whole.
            group = [min(first + at, len(frames) - 1) for at in range(self._together)]
            pixels = [self._pixels(frames[at], rows, columns) for at in group]
            values = cut_patches(pixels, self._patch, self._merge)
            items.append(Item(self._images.content(values, (1, rows, columns)), num_tokens, grid))
            time_s = (places[group[0]] / fps + places[group[-1]] / fps) / 2
            marks = self.placeholder * num_tokens
            parts.append(f"<{time_s:.1f} seconds>{self._START}{marks}{self._END}")
        return ProcessedImage("".join(parts), tuple(items))

    def _pixels(self, frame: "Image", rows: int, columns: int) -> "NDArray[np.float32]":
        """The numbers of a frame in the size of the patches, [3, height, width]."""
        height, width = rows * self._patch, columns * self._patch
        return self._normalize(resize_as_torch(frame, height, width, self._resample))

    def _patches(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the patches of each frame, such that the pixels of all frames are
        within the bounds."""
        cell, together = self._patch * self._merge, self._together
        most = self._most_pixels
        if self._caps_frames:
            of_frame = min(self._most_frame_tokens * cell**2, most // num_frames)
            most = max(of_frame, int(self._least_pixels * 1.05)) * num_frames
        # A frame below one cell is first enlarged to it.
        if height < cell or width < cell:
            scale = max(cell / height, cell / width)
            height, width = int(height * scale), int(width * scale)
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise InvalidRequestError(
                f"a video has {width} x {height} pixels, but this model reads none that is more"
                f" than {_MOST_RATIO} times as long as it is wide; cut it"
            )
        # Python rounds halves to even here, as transformers does.
        rows, columns = round(height / cell), round(width / cell)
        num_pixels = round(num_frames / together) * together * rows * columns * cell**2
        if num_pixels > most:
            scale = math.sqrt(num_frames * height * width / most)
            rows, columns = (max(1, math.floor(side / scale / cell)) for side in (height, width))
        elif num_pixels < self._least_pixels:
            scale = math.sqrt(self._least_pixels / (num_frames * height * width))
            rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
        return rows * self._merge, columns * self._merge


def cut_patches(
    frames: "Sequence[NDArray[np.float32]]", patch: int, merge: int
) -> "NDArray[np.float32]":
    """The patches of [3, height, width] pixels of each frame, group by group: [patches, 3 * frames
    * patch * patch]."""
    import numpy as np  # a server for text never loads it

    _, height, width = frames[0].shape
    rows, columns = height // patch, width // patch
    shape = (len(frames), 3, rows // merge, merge, patch, columns // merge, merge, patch)
    # From (frame, channel, group row, row, y, group column, column, x) to (group row, group column,
    # row, column, channel, frame, y, x).
    groups = np.stack(frames).reshape(shape).transpose(2, 5, 3, 6, 1, 0, 4, 7)
    return groups.reshape(rows * columns, 3 * len(frames) * patch * patch)
