"""The image processor of InternVL, which cuts an image into a grid of square tiles.

An image becomes its tiles, row by row, and then the whole image at the size of one tile. The grid
is the one whose aspect ratio is closest to the image's. Source: InternVL 1.5 (arXiv:2404.16821,
section 3.2), and transformers' PIL processor of GOT-OCR 2, which InternVL's processor calls.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError
from quire.images.processors.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    Normalizer,
    Settings,
    closest_grid,
    resize,
)
from quire.images.processors.processor import ImageProcessor, Item, Layout, ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_TILES = 256


class InternVLProcessor(ImageProcessor):
    """Splits images into tiles of one size; each tile is one content of `tokens_of_tile` tokens."""

    placeholder = "<IMG_CONTEXT>"
    span_tokens = (placeholder,)
    _START, _END = "<img>", "</img>"

    def __init__(
        self, config: Mapping[str, Any], image_fields: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        """The arguments are those of `Idefics3Processor`. Raises CheckpointError."""
        settings = Settings(image_fields)
        settings.require("do_resize", True)
        settings.require("do_convert_rgb", True)
        if set(settings.keys_of("size")) - {"height", "width"}:
            raise settings.wrong("size", "an object with height and width")
        self._tile = settings.of_size("size", "height", 384)
        if settings.of_size("size", "width", 384) != self._tile:
            raise settings.wrong("size", "an object with an equal height and width")
        # transformers' InternVLProcessor always cuts, whatever crop_to_patches says.
        least = settings.whole("min_patches", 1, _MOST_TILES)
        self._grids = _grids(least, settings.whole("max_patches", 12, _MOST_TILES))
        self._resample = settings.resample(BICUBIC)
        self._normalize = Normalizer(settings, CLIP_MEAN, CLIP_STD)
        self.tokens_of_tile = _tokens_of_tile(config, self._tile)
        given = Settings(fields).whole("image_seq_length", 256)
        if given != self.tokens_of_tile:
            raise CheckpointError(
                f"image_seq_length is {given}, but a tile of {self._tile} pixels gets"
                f" {self.tokens_of_tile} tokens"
            )

    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture; every tile costs the same."""
        columns, rows = self._grid(width, height)
        count = columns * rows + (columns * rows > 1)
        num_bytes = count * 3 * self._tile * self._tile * 4
        return Layout(self.tokens_of_tile, count * self.tokens_of_tile, num_bytes)

    def process(self, image: "Image") -> ProcessedImage:
        """The tiles of a picture and then, if there are several, the whole picture as one tile."""
        (columns, rows), tile = self._grid(*image.size), self._tile
        whole, tiles = resize(image, rows * tile, columns * tile, self._resample), []
        for top in range(0, rows * tile, tile):
            for left in range(0, columns * tile, tile):
                tiles.append(whole.crop((left, top, left + tile, top + tile)))
        if len(tiles) > 1:
            tiles.append(resize(image, tile, tile, self._resample))
        contents = [self.content(self._normalize(each)) for each in tiles]
        marks = self.placeholder * (self.tokens_of_tile * len(tiles))
        items = tuple(Item(content, self.tokens_of_tile) for content in contents)
        return ProcessedImage(f"{self._START}{marks}{self._END}", items)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles."""
        return closest_grid(self._grids, width, height, self._tile)


def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """The (columns, rows) of all grids of `least` to `most` tiles, those of few tiles first."""
    sides = range(1, most + 1)
    found = [(x, y) for x in sides for y in sides if least <= x * y <= most]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def _tokens_of_tile(config: Mapping[str, Any], tile: int) -> int:
    """Tokens of one tile: the connector joins each square of its patches into one.

    Raises CheckpointError if the encoder takes no tiles of this size."""
    vision = config.get("vision_config")
    given = vision if isinstance(vision, Mapping) else {}
    patch, side = _side(given, "patch_size", 14), _side(given, "image_size", 448)
    ratio = Settings(config).number("downsample_ratio", 0.5)
    scale = round(min(1 / ratio, tile))
    if tile != side or tile % patch or scale * ratio != 1.0 or (tile // patch) % scale:
        raise CheckpointError(
            f"a tile of {tile} pixels can't be cut into patches of {patch} and groups of {scale}"
            f" for an encoder of {side} pixels"
        )
    return (tile // patch // scale) ** 2


def _side(vision: Mapping[str, Any], name: str, default: int) -> int:
    """A side of a square, which configs have once or twice."""
    value = vision.get(name)
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        value = value[0]
    return Settings({name: value}).whole(name, default)
