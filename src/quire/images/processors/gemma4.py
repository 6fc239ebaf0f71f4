"""The image processor of Gemma 4, which keeps an image's shape within a number of tokens.

Source: transformers' PIL processor of the same name. The encoder normalizes pixels itself.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.images.processors.pixels import BICUBIC, Normalizer, Settings, resize
from quire.images.processors.processor import ImageProcessor, Item, Layout, ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image

_NUM_TOKENS = (70, 140, 280, 560, 1120)


class Gemma4Processor(ImageProcessor):
    """Makes one content of each image, with a token for each square of patches."""

    placeholder = "<|image|>"
    span_tokens = (placeholder,)
    _BEGIN, _END = "<|image>", "<image|>"

    def __init__(
        self, config: Mapping[str, Any], image_fields: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        """The arguments are those of `Idefics3Processor`. Raises CheckpointError."""
        settings = Settings(image_fields)
        settings.require("do_resize", True)
        settings.require("do_convert_rgb", True)
        patch = settings.whole("patch_size", 16)
        #: Pixels of a side of the square that one token stands for.
        self.cell = patch * settings.whole("pooling_kernel_size", 3)
        self.most_tokens = settings.whole("max_soft_tokens", 280)
        if self.most_tokens not in _NUM_TOKENS:
            raise settings.wrong("max_soft_tokens", f"one of {', '.join(map(str, _NUM_TOKENS))}")
        self._resample = settings.resample(BICUBIC)
        self._normalize = Normalizer(settings, (0.0,) * 3, (1.0,) * 3, do_normalize=False)

    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture."""
        rows, columns = self._cells(width, height)
        return Layout(rows * columns, rows * columns, rows * columns * self.cell**2 * 12)

    def process(self, image: "Image") -> ProcessedImage:
        """The picture, in the largest size of its shape that has few enough tokens."""
        rows, columns = self._cells(*image.size)
        height, width = rows * self.cell, columns * self.cell
        if (width, height) != image.size:
            image = resize(image, height, width, self._resample)
        item = Item(self.content(self._normalize(image)), rows * columns)
        text = f"{self._BEGIN}{self.placeholder * item.num_tokens}{self._END}"
        return ProcessedImage(text, (item,))

    def _cells(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the squares that tokens stand for."""
        factor = math.sqrt(self.most_tokens * self.cell**2 / (height * width))
        rows, columns = (math.floor(factor * side / self.cell) for side in (height, width))
        if not rows:  # then there are more columns than tokens
            rows, columns = 1, min(width // height, self.most_tokens)
        elif not columns:
            rows, columns = min(height // width, self.most_tokens), 1
        return rows, columns
