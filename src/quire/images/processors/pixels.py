"""Resizing and normalization of pictures, equal to the PIL processors of transformers.

Called by the processors of all families. Pictures are RGB images of Pillow; arrays are fp32 with
the shape [3, height, width].
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

IMAGENET_STANDARD = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

NEAREST, LANCZOS, BILINEAR, BICUBIC = range(4)
"""Pillow's numbers for the filters of a resize, which preprocessor_config.json uses."""

_MAX_SIDE = 1 << 15
_LEAST, _MOST = 1e-9, 1e9
"""Bounds of numbers that need not be whole. Within them, the numbers of pixels are finite."""


class Settings:
    """Reads the fields of an image processor's configuration, and refuses unsupported values. A
    field that is missing or null has the default."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def whole(self, name: str, default: int, most: int = _MAX_SIDE) -> int:
        """A whole number from 1 to `most`."""
        value = self._get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(name, f"a whole number from 1 to {most}")
        return value

    def of_size(self, name: str, key: str, default: int, most: int = _MAX_SIDE) -> int:
        """One number of a field that is an object, such as size.longest_edge."""
        value = self._get(name, {})
        found = value.get(key, default) if isinstance(value, Mapping) else None
        if type(found) is not int or not 1 <= found <= most:
            raise self.wrong(name, f"an object whose {key} is a whole number from 1 to {most}")
        return found

    def keys_of(self, name: str) -> list[str]:
        """The keys of a field that is an object; empty if the field is missing."""
        value = self._get(name, {})
        return [key for key in value if value[key] is not None] if isinstance(value, dict) else []

    def flag(self, name: str, default: bool) -> bool:
        """A truth value."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def require(self, name: str, value: bool) -> None:
        """Refuse the other value of a flag."""
        if self.flag(name, value) is not value:
            raise self.wrong(name, str(value).lower())

    def triple(self, name: str, default: Sequence[float]) -> tuple[float, float, float]:
        """A number for each of the three channels."""
        value = self._get(name, default)
        if isinstance(value, int | float):
            value = [value] * 3
        is_triple = isinstance(value, list | tuple) and len(value) == 3
        if not is_triple or not all(_is_number(each) and abs(each) <= _MOST for each in value):
            raise self.wrong(name, f"three numbers from -{_MOST:g} to {_MOST:g}")
        return float(value[0]), float(value[1]), float(value[2])

    def number(self, name: str, default: float) -> float:
        """A number above 0, and not so small or large that products with it overflow."""
        value = self._get(name, default)
        if not _is_number(value) or not _LEAST <= value <= _MOST:
            raise self.wrong(name, f"a number from {_LEAST:g} to {_MOST:g}")
        return float(value)

    def resample(self, default: int) -> int:
        """The number of the filter with which pictures are resized."""
        value = self._get("resample", default)
        if value not in (NEAREST, LANCZOS, BILINEAR, BICUBIC):
            raise self.wrong("resample", "0 (nearest), 1 (lanczos), 2 (bilinear) or 3 (bicubic)")
        return int(value)

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a field with an unsupported value."""
        return CheckpointError(
            f"{name} of the image processor is {self._fields.get(name)!r:.80}, but must be"
            f" {expected}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        return default if value is None else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Normalizer:
    """Converts pictures to normalized numbers by a table of each channel's 256 values.

    A value v becomes (v * rescale_factor - mean) / std. As in transformers, the product is rounded
    to fp32, and the other operations are computed in fp32.
    """

    def __init__(
        self,
        settings: Settings,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        do_normalize: bool = True,
    ) -> None:
        """mean, std, do_normalize: the defaults of the family's processor."""
        import numpy as np  # a server for text never loads it

        is_rescaled = settings.flag("do_rescale", True)
        self.factor = settings.number("rescale_factor", 1 / 255) if is_rescaled else 1.0
        is_normalized = settings.flag("do_normalize", do_normalize)
        self.mean = settings.triple("image_mean", mean) if is_normalized else (0.0,) * 3
        self.std = settings.triple("image_std", std) if is_normalized else (1.0,) * 3
        if any(abs(each) < _LEAST for each in self.std):
            raise settings.wrong(
                "image_std", f"three numbers, none of them nearer to 0 than {_LEAST:g}"
            )
        values = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        means, stds = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        self._tables = (values[None] - means[:, None]) / stds[:, None]

    @property
    def identity(self) -> tuple[object, ...]:
        """The settings that determine the numbers."""
        return self.factor, self.mean, self.std

    def __call__(self, image: "Image") -> "NDArray[np.float32]":
        """The numbers of a picture, [3, height, width]."""
        import numpy as np  # a server for text never loads it

        pixels = np.asarray(image)
        found = np.empty((3, *pixels.shape[:2]), np.float32)
        for channel, table in enumerate(self._tables):
            np.take(table, pixels[:, :, channel], out=found[channel], mode="clip")
        return found


def resize(image: "Image", height: int, width: int, resample: int) -> "Image":
    """The picture in another size, as 8-bit values. Pillow's filters widen with the reduction, so
    they don't alias."""
    from PIL.Image import Resampling  # a server for text never loads it

    return image.resize((width, height), Resampling(resample))


def bounded_cells(
    cells: tuple[int, int], size: tuple[int, int], cell: int, bounds: tuple[int, int]
) -> tuple[int, int]:
    """The number of rows and columns of square cells for a picture of the size (height, width).

    Returns `cells` if their number of pixels is within `bounds` (least, most). Otherwise the
    picture is scaled to the bound that it violates, and cut into cells with sides of `cell` pixels.
    """
    (height, width), (least, most) = size, bounds
    pixels = cells[0] * cells[1] * cell**2
    if pixels > most:
        scale = math.sqrt(height * width / most)
        return max(1, math.floor(height / scale / cell)), max(1, math.floor(width / scale / cell))
    if pixels < least:
        scale = math.sqrt(least / (height * width))
        return math.ceil(height * scale / cell), math.ceil(width * scale / cell)
    return cells


def closest_grid(
    grids: Sequence[tuple[int, int]], width: int, height: int, tile: int
) -> tuple[int, int]:
    """The (columns, rows) in `grids` whose ratio is closest to the picture's. Among equally close
    grids, a later one is chosen if it has less than twice the picture's pixels."""
    best, least = (1, 1), float("inf")
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        is_small = width * height > 0.5 * tile * tile * columns * rows
        if difference < least or (difference == least and is_small):
            best, least = (columns, rows), difference
    return best
