"""Random pictures, and their files in the formats that are read."""

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def random_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random colours."""
    numbers = np.random.default_rng(seed)
    return Image.fromarray(numbers.integers(0, 256, (height, width, 3), dtype=np.uint8))


def file_of(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture's file."""
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()
