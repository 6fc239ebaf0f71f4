"""The image processor of LFM2-VL, which keeps an image's aspect, and cuts large images into tiles.

A small image becomes one content of its own size. A large one becomes square tiles, row by row, and
then the whole image as a thumbnail. Source: LFM2 (arXiv:2511.23404, section 5), and transformers'
processor of the same name, which resizes by torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError, InvalidRequestError
from quire.images.processors.pixels import (
    BICUBIC,
    BILINEAR,
    IMAGENET_STANDARD,
    Normalizer,
    Settings,
    bounded_cells,
    closest_grid,
)
from quire.images.processors.processor import ImageProcessor, Item, Layout, ProcessedImage
from quire.images.processors.torch_resize import resize_as_torch

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_TILES = 64
_MOST_TOKENS = 1024
"""Maximum number of tokens of a content."""
_MOST_RATIO = 200
"""Longer pictures would take too much memory between the two passes of the resize."""


class Lfm2VlProcessor(ImageProcessor):
    """Makes one content of an image, or one of each tile and one of the thumbnail."""

    placeholder = "<image>"
    span_tokens = (placeholder,)
    _START, _END, _THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"

    def __init__(
        self, config: Mapping[str, Any], image_fields: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        """The arguments are those of `Idefics3Processor`. Raises CheckpointError."""
        # First, the settings that are obeyed at few values only. transformers ignores do_resize.
        settings = Settings(image_fields)
        settings.require("do_pad", True)
        settings.require("do_convert_rgb", True)
        Settings(fields).require("use_image_special_tokens", True)
        self._resample = settings.resample(BILINEAR)
        if self._resample not in (BILINEAR, BICUBIC):
            raise settings.wrong("resample", "2 (bilinear) or 3 (bicubic)")
        # Then, the sizes.
        self._patch = settings.whole("encoder_patch_size", 16)
        self._factor = settings.whole("downsample_factor", 2, 64)
        self._tile = settings.whole("tile_size", 512, 4096)
        self._cell = self._patch * self._factor
        _check_encoder(config, self._patch, self._factor)
        if self._tile % self._cell or (self._tile // self._cell) ** 2 > _MOST_TOKENS:
            raise settings.wrong("tile_size", f"a multiple of {self._cell}")
        self._least = settings.whole("min_image_tokens", 64, _MOST_TOKENS)
        self._most = settings.whole("max_image_tokens", 256, _MOST_TOKENS)
        self._tolerance = settings.number("max_pixels_tolerance", 2.0)
        # Last, the tiles.
        self._has_thumbnail = settings.flag("use_thumbnail", True)
        least, most = (
            settings.whole(f"{end}_tiles", count, _MOST_TILES)
            for end, count in (("min", 2), ("max", 10))
        )
        self._grids: list[tuple[int, int]] = []
        if settings.flag("do_image_splitting", True) and most > 1:
            if not 2 <= least <= most:
                raise settings.wrong("min_tiles", f"a whole number from 2 to {most}")
            self._grids = _grids(least, most)
        self._normalize = Normalizer(settings, IMAGENET_STANDARD, IMAGENET_STANDARD)

    @property
    def identity(self) -> tuple[object, ...]:
        """The settings that change a content's values."""
        return *super().identity, self._patch, self._factor

    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture."""
        columns, rows = self._grid(width, height)
        of_tile, (high, wide) = (self._tile // self._cell) ** 2, self._whole(width, height)
        counts = [of_tile] * (columns * rows)
        if not counts or self._has_thumbnail:
            counts.append(high * wide // self._cell**2)
        num_bytes = sum(counts) * self._cell**2 * 3 * 4
        return Layout(max(counts), sum(counts), num_bytes)

    def process(self, image: "Image") -> ProcessedImage:
        """The tiles of a picture, if it is large, and the whole picture."""
        (columns, rows), tile = self._grid(*image.size), self._tile
        items, parts = [], [self._START]
        if columns:
            tiles = resize_as_torch(image, rows * tile, columns * tile, self._resample)
        for row in range(rows):
            for column in range(columns):
                left, top = column * tile, row * tile
                item = self._item(tiles.crop((left, top, left + tile, top + tile)))
                items.append(item)
                parts.append(f"<|img_row_{row + 1}_col_{column + 1}|>")
                parts.append(self.placeholder * item.num_tokens)
        if not columns or self._has_thumbnail:
            item = self._item(resize_as_torch(image, *self._whole(*image.size), self._resample))
            items.append(item)
            parts.append(self._THUMBNAIL if columns else "")
            parts.append(self.placeholder * item.num_tokens)
        return ProcessedImage("".join((*parts, self._END)), tuple(items))

    def _item(self, image: "Image") -> Item:
        """The content of a picture, whose sides are multiples of the patch: [patches, pixels of a
        patch * 3], each pixel's channels side by side."""
        patch, (width, height) = self._patch, image.size
        rows, columns = height // patch, width // patch
        cut = self._normalize(image).reshape(3, rows, patch, columns, patch)
        values = cut.transpose(1, 3, 2, 4, 0).reshape(rows * columns, 3 * patch * patch)
        return Item(self.content(values, (1, rows, columns)), rows * columns // self._factor**2)

    def _whole(self, width: int, height: int) -> tuple[int, int]:
        """Height and width of a whole picture: multiples of a cell, within the bounds of tokens."""
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise InvalidRequestError(
                f"an image has {width} x {height} pixels, but this model reads none that is more"
                f" than {_MOST_RATIO} times as long as it is wide; cut it"
            )
        cell = self._cell
        # Python rounds halves to even here, as transformers does.
        rows, columns = (max(1, round(side / cell)) for side in (height, width))
        bounds = self._least * cell**2, self._most * cell**2
        rows, columns = bounded_cells((rows, columns), (height, width), cell, bounds)
        return rows * cell, columns * cell

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles; 0 of each for a picture that is not cut."""
        cell = self._cell
        high, wide = (max(self._patch, round(side / cell) * cell) for side in (height, width))
        if not self._grids or high * wide <= self._most * cell**2 * self._tolerance:
            return 0, 0
        return closest_grid(self._grids, width, height, self._tile)


def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """The (columns, rows) of all grids of `least` to `most` tiles, those of few tiles first."""
    found = {
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    }
    # Grids of as many tiles stay in the order of the set, as in transformers.
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def _check_encoder(config: Mapping[str, Any], patch: int, factor: int) -> None:
    """Raise CheckpointError unless the encoder of config.json has patches and squares of these
    sizes."""
    vision = config.get("vision_config")
    given = Settings(vision if isinstance(vision, Mapping) else {}).whole("patch_size", 16)
    joined = Settings(config).whole("downsample_factor", 2, 64)
    if (given, joined) != (patch, factor):
        raise CheckpointError(
            f"the image processor has an encoder_patch_size of {patch} and a downsample_factor of"
            f" {factor}, but the encoder of config.json has {given} and {joined}"
        )
