"""The image processor of Qwen's vision models, whose encoder reads a list of patches.

Source: Qwen2-VL (arXiv:2409.12191, section 2.1), which Qwen3-VL and Qwen3.5 keep, and
transformers' PIL processor of Qwen2-VL.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidRequestError
from quire.images.processors.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    Normalizer,
    Settings,
    bounded_cells,
    resize,
)
from quire.images.processors.processor import ImageProcessor, Item, Layout, ProcessedImage
from quire.images.processors.qwen_video import MOST_PIXELS, QwenVideoProcessor, cut_patches

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_RATIO = 200


class QwenProcessor(ImageProcessor):
    """Makes one content of each image, with one token for each group of patches."""

    placeholder = "<|image_pad|>"
    span_tokens: tuple[str, ...] = (placeholder,)

    def __init__(
        self, config: Mapping[str, Any], image_fields: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        """The arguments are those of `Idefics3Processor`. Raises CheckpointError."""
        settings = Settings(image_fields)
        settings.require("do_resize", True)
        settings.require("do_convert_rgb", True)
        if set(settings.keys_of("size")) - {"shortest_edge", "longest_edge"}:
            raise settings.wrong("size", "an object with shortest_edge and longest_edge")
        self._patch = settings.whole("patch_size", 14)
        self._merge = settings.whole("merge_size", 2)
        self._frames = settings.whole("temporal_patch_size", 2)
        least = settings.of_size("size", "shortest_edge", 56 * 56, MOST_PIXELS)
        most = settings.of_size("size", "longest_edge", 28 * 28 * 1280, MOST_PIXELS)
        #: Bounds of an image's pixels after it was resized. Older files name them min_pixels and
        #: max_pixels.
        self.least_pixels = settings.whole("min_pixels", least, MOST_PIXELS)
        self.most_pixels = settings.whole("max_pixels", most, MOST_PIXELS)
        self._resample = settings.resample(BICUBIC)
        self._normalize = Normalizer(settings, CLIP_MEAN, CLIP_STD)
        videos = fields.get("video_processor")
        if isinstance(videos, Mapping) and videos:
            self.video = QwenVideoProcessor(self, videos)
            self.span_tokens = (*self.span_tokens, self.video.placeholder)

    @property
    def identity(self) -> tuple[object, ...]:
        """The settings that change an image's patches."""
        return *super().identity, (self._patch, self._merge, self._frames)

    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture."""
        rows, columns = self._patches(width, height)
        num_tokens = rows * columns // self._merge**2
        num_bytes = rows * columns * 3 * self._frames * self._patch**2 * 4
        return Layout(num_tokens, num_tokens, num_bytes)

    def process(self, image: "Image") -> ProcessedImage:
        """The patches of a picture."""
        rows, columns = self._patches(*image.size)
        resized = resize(image, rows * self._patch, columns * self._patch, self._resample)
        # All frames of a patch are equal, since an image stands still.
        frames = [self._normalize(resized)] * self._frames
        values = cut_patches(frames, self._patch, self._merge)
        grid = 1, rows // self._merge, columns // self._merge
        num_tokens = grid[1] * grid[2]
        item = Item(self.content(values, (1, rows, columns)), num_tokens, grid)
        return ProcessedImage(self.placeholder * num_tokens, (item,))

    def _patches(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches, both multiples of merge_size, such that the image's pixels
        are within the bounds."""
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise InvalidRequestError(
                f"an image has {width} x {height} pixels, but this model reads none that is more"
                f" than {_MOST_RATIO} times as long as it is wide; cut it"
            )
        cell = self._patch * self._merge
        # Python rounds halves to even here, as transformers does.
        rows, columns = round(height / cell), round(width / cell)
        bounds = self.least_pixels, self.most_pixels
        rows, columns = bounded_cells((rows, columns), (height, width), cell, bounds)
        return rows * self._merge, columns * self._merge
