"""The image processor of Pixtral's encoder, which reads whole images of any size.

Rows of an image are separated by a token in the prompt's text. Source: Pixtral (arXiv:2410.07073,
section 2.2) and transformers' PIL processor of the same name.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidRequestError
from quire.images.processors.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    Normalizer,
    Settings,
    resize,
)
from quire.images.processors.processor import ImageProcessor, Item, Layout, ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image


class PixtralProcessor(ImageProcessor):
    """Makes one content of each image. Its span has a token for each patch, and one at the end of
    each row."""

    placeholder = "[IMG]"
    _ROW_END, _END = "[IMG_BREAK]", "[IMG_END]"
    span_tokens = (placeholder, _ROW_END, _END)
    encoder_ids = (10, 12, 13)  # the encoder's output has the text embeddings of some of these

    def __init__(
        self, config: Mapping[str, Any], image_fields: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        """The arguments are those of `Idefics3Processor`. Raises CheckpointError."""
        settings, around = Settings(image_fields), Settings(fields)
        settings.require("do_resize", True)
        settings.require("do_convert_rgb", True)
        settings.require("do_center_crop", False)
        if set(settings.keys_of("size")) - {"longest_edge"}:
            raise settings.wrong("size", "an object with longest_edge")
        vision = config.get("vision_config")
        encoder = Settings(vision if isinstance(vision, Mapping) else {})
        patch = around.whole("patch_size", encoder.whole("patch_size", 16))
        merge = around.whole("spatial_merge_size", Settings(config).whole("spatial_merge_size", 1))
        #: Pixels of a side of the square that one token stands for.
        self.cell = patch * merge
        self._patch = patch
        self._longest = settings.of_size("size", "longest_edge", 1024)
        self._resample = settings.resample(BICUBIC)
        self._normalize = Normalizer(settings, CLIP_MEAN, CLIP_STD)

    @property
    def identity(self) -> tuple[object, ...]:
        """The settings that change an image's values or rows."""
        return *super().identity, self.cell

    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture."""
        rows, columns = self._cells(width, height)
        num_tokens = rows * (columns + 1)
        return Layout(num_tokens, num_tokens, rows * columns * self.cell**2 * 12)

    def process(self, image: "Image") -> ProcessedImage:
        """The picture, with both sides rounded up to whole cells."""
        rows, columns = self._cells(*image.size)
        resized = resize(image, rows * self.cell, columns * self.cell, self._resample)
        values = self._normalize(resized)
        per_cell = self.cell // self._patch
        content = self.content(values, (1, rows * per_cell, columns * per_cell))
        row = self.placeholder * columns
        text = self._ROW_END.join([row] * rows) + self._END
        return ProcessedImage(text, (Item(content, rows * (columns + 1)),))

    def _cells(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of cells."""
        ratio = max(height / self._longest, width / self._longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if height < 1 or width < 1:
            raise InvalidRequestError(
                f"an image is more than {self._longest} times as long as it is wide, too narrow for"
                " this model; cut it"
            )
        return (height - 1) // self.cell + 1, (width - 1) // self.cell + 1
