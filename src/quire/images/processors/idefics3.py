"""The image processor of Idefics3 and SmolVLM, which cut a large image into square tiles.

An image becomes its tiles, row by row, and then the whole image at the size of one tile. Source:
Idefics3 (arXiv:2408.12637, section 2) and transformers' PIL processor of the same name.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError
from quire.images.processors.pixels import IMAGENET_STANDARD, LANCZOS, Normalizer, Settings, resize
from quire.images.processors.processor import ImageProcessor, Item, Layout, ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST = 4096
"""The longest edge, in pixels, to which any image is resized."""


class Idefics3Processor(ImageProcessor):
    """Splits images into tiles of one size; each tile is one content of `tokens_of_tile` tokens."""

    placeholder = "<image>"
    span_tokens = ("<image>",)
    _FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"

    def __init__(
        self, config: Mapping[str, Any], image_fields: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        """config: config.json. image_fields: the image processor's settings. fields: the settings
        of the processor around it. Raises CheckpointError."""
        settings = Settings(image_fields)
        settings.require("do_resize", True)
        settings.require("do_pad", True)
        settings.require("do_convert_rgb", True)
        for name in ("size", "max_image_size"):
            if set(settings.keys_of(name)) - {"longest_edge"}:
                raise settings.wrong(name, "an object with longest_edge")
        self._longest = settings.of_size("size", "longest_edge", 4 * 364)
        self._tile = settings.of_size("max_image_size", "longest_edge", 364, 4096)
        self._splits = settings.flag("do_image_splitting", True)
        self._resample = settings.resample(LANCZOS)
        self._normalize = Normalizer(settings, IMAGENET_STANDARD, IMAGENET_STANDARD)
        self.tokens_of_tile = _tokens_of_tile(config, self._tile)
        given = fields.get("image_seq_len")
        if given is not None and given != self.tokens_of_tile:
            raise CheckpointError(
                f"image_seq_len is {given!r:.80}, but a tile of {self._tile} pixels gets"
                f" {self.tokens_of_tile} tokens"
            )

    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture; every tile costs the same."""
        _, rows, columns = self._sizes(width, height)
        count = rows * columns + 1
        num_bytes = count * 3 * self._tile * self._tile * 4
        return Layout(self.tokens_of_tile, count * self.tokens_of_tile, num_bytes)

    def process(self, image: "Image") -> ProcessedImage:
        """The tiles of a picture, and then the whole picture as one tile."""
        (height, width), rows, columns = self._sizes(*image.size)
        image = resize(image, height, width, self._resample)
        tile, tiles = self._tile, []
        if self._splits:
            # A second resize makes both sides multiples of the tile, as in transformers.
            whole = (max(rows, 1) * tile, max(columns, 1) * tile)
            image = resize(image, *whole, self._resample)
        for row in range(rows):
            for column in range(columns):
                left, top = column * tile, row * tile
                tiles.append(image.crop((left, top, left + tile, top + tile)))
        tiles.append(resize(image, tile, tile, self._resample))
        contents = [self.content(self._normalize(each)) for each in tiles]
        items = tuple(Item(content, self.tokens_of_tile) for content in contents)
        return ProcessedImage(self._text(rows, columns), items)

    def _sizes(self, width: int, height: int) -> tuple[tuple[int, int], int, int]:
        """The (height, width) of the first resize, and the rows and columns of tiles; 0 of each if
        the image is not split."""
        ratio = width / height
        # First, the longest edge becomes `_longest`, and the other edge even.
        if width >= height:
            width, height = self._longest, int(self._longest / ratio)
            height += height % 2
        else:
            width, height = int(self._longest * ratio), self._longest
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        # Then no edge is above _MOST.
        ratio = width / height
        if width >= height and width > _MOST:
            width, height = _MOST, int(_MOST / ratio)
        elif height > width and height > _MOST:
            width, height = int(_MOST * ratio), _MOST
        first = max(height, 1), max(width, 1)
        if not self._splits:
            return first, 0, 0
        # Last, both edges are rounded up to whole tiles.
        height, width = first
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self._tile)
            rows = math.ceil(int(columns * self._tile / ratio) / self._tile)
        else:
            rows = math.ceil(height / self._tile)
            columns = math.ceil(int(rows * self._tile * ratio) / self._tile)
        rows, columns = max(rows, 1), max(columns, 1)
        return first, *((rows, columns) if rows * columns > 1 else (0, 0))

    def _text(self, rows: int, columns: int) -> str:
        marks = self.placeholder * self.tokens_of_tile
        whole = f"{self._FAKE}{self._GLOBAL}{marks}{self._FAKE}"
        if not rows:
            return whole
        lines = (
            "".join(f"{self._FAKE}<row_{r}_col_{c}>{marks}" for c in range(1, columns + 1))
            for r in range(1, rows + 1)
        )
        return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


def _tokens_of_tile(config: Mapping[str, Any], tile: int) -> int:
    """Tokens of one tile: the connector joins scale_factor squared of its patches into one."""
    vision = config.get("vision_config")
    given = Settings(vision if isinstance(vision, Mapping) else {})
    patch = given.whole("patch_size", 32)
    scale = Settings(config).whole("scale_factor", 2)
    if tile % patch or (tile // patch) % scale:
        raise CheckpointError(
            f"a tile of {tile} pixels can't be cut into patches of {patch} and groups of {scale}"
        )
    return (tile // patch // scale) ** 2
