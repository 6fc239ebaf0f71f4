"""Opens GIF files, whose frames may enlarge the canvas, within a bound on its pixels.

Pillow enlarges the canvas to hold each frame, and allocates it before any pixel is decoded: 66
bytes would take 650 MiB. Imports Pillow, so `decode` imports it at its first call.
"""

from typing import BinaryIO

from PIL.GifImagePlugin import GifImageFile
from PIL.Image import DecompressionBombError


class BoundedGif(GifImageFile):
    """A GIF file. Raises DecompressionBombError when its canvas would exceed `max_pixels`."""

    def __init__(self, file: BinaryIO, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        super().__init__(file)

    @property
    def _size(self) -> tuple[int, int]:
        return self._canvas

    @_size.setter
    def _size(self, size: tuple[int, int]) -> None:
        if size[0] * size[1] > self._max_pixels:
            raise DecompressionBombError
        self._canvas = size
