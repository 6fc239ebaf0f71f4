"""The image processor of Gemma 3, which squeezes each image into one square.

Source: Gemma 3 (arXiv:2503.19786, section 2.1), and transformers' PIL processor of the same name.
The cutting of long images into crops (pan and scan) is off there, and refused here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.images.processors.pixels import (
    BILINEAR,
    IMAGENET_STANDARD,
    Normalizer,
    Settings,
    resize,
)
from quire.images.processors.processor import ImageProcessor, Item, Layout, ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image


class Gemma3Processor(ImageProcessor):
    """Makes one content of each image, with the same number of tokens for all."""

    placeholder = "<start_of_image>"
    span_tokens = ("<image_soft_token>",)
    _END = "<end_of_image>"

    def __init__(
        self, config: Mapping[str, Any], image_fields: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        """The arguments are those of `Idefics3Processor`. Raises CheckpointError."""
        settings = Settings(image_fields)
        settings.require("do_resize", True)
        settings.require("do_convert_rgb", True)
        settings.require("do_pan_and_scan", False)
        if set(settings.keys_of("size")) - {"height", "width"}:
            raise settings.wrong("size", "an object with height and width")
        self._height = settings.of_size("size", "height", 224)
        self._width = settings.of_size("size", "width", 224)
        tokens = Settings(config).whole("mm_tokens_per_image", 256)
        self.num_tokens = Settings(fields).whole("image_seq_length", tokens)
        self._resample = settings.resample(BILINEAR)
        self._normalize = Normalizer(settings, IMAGENET_STANDARD, IMAGENET_STANDARD)

    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture, the same for all."""
        return Layout(self.num_tokens, self.num_tokens, 12 * self._height * self._width)

    def process(self, image: "Image") -> ProcessedImage:
        """The picture as a square."""
        values = self._normalize(resize(image, self._height, self._width, self._resample))
        marks = self.span_tokens[0] * self.num_tokens
        text = f"\n\n{self.placeholder}{marks}{self._END}\n\n"
        return ProcessedImage(text, (Item(self.content(values), self.num_tokens),))
