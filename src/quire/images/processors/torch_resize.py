"""Resizes pictures of 8-bit values as transformers' processors for torch do.

torch rounds the weights of the filter to 16 bits, and Pillow to 22, so their results differ by 1 in
some pixels. This is the arithmetic of torch's kernel for the CPU, whose filter widens with the
reduction. Called by the processors of LFM2-VL's images and of Qwen's videos.
"""

import math
from typing import TYPE_CHECKING

from quire.images.processors.pixels import BICUBIC, BILINEAR

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_REACHES = {BILINEAR: 1.0, BICUBIC: 2.0}
"""Filters, and the distance at which their weights end, in pixels of the smaller picture."""
_SHARPNESS = -0.5
"""The parameter of the cubic filter (Keys, 1981), with torch's value for antialiasing."""
_MOST_BITS = 22
_WEIGHT_BITS = 15
_PIECE = 1 << 20
"""Values of a result that are computed at once, which bounds the memory beside the result."""


def resize_as_torch(image: "Image", height: int, width: int, resample: int) -> "Image":
    """The picture in another size. resample: BILINEAR or BICUBIC."""
    import numpy as np  # a server for text never loads it
    from PIL.Image import fromarray

    columns = _resize_rows(np.asarray(image).swapaxes(0, 1), width, resample)
    return fromarray(_resize_rows(columns.swapaxes(0, 1), height, resample))


def _resize_rows(pixels: "NDArray[np.uint8]", count: int, resample: int) -> "NDArray[np.uint8]":
    """Resize [rows, columns, channels] to `count` rows."""
    import numpy as np  # a server for text never loads it

    pixels = np.ascontiguousarray(pixels)
    num_rows, num_columns, num_channels = pixels.shape
    if count == num_rows:
        return pixels
    first, weights, num_bits = _taps(num_rows, count, resample)
    found = np.empty((count, num_columns, num_channels), np.uint8)
    step = max(1, _PIECE // (num_columns * num_channels))
    for row in range(0, count, step):
        part = found[row : row + step]
        sums = np.full(part.shape, 1 << (num_bits - 1), np.int32)
        for tap, factors in enumerate(weights[:, row : row + step]):
            at = np.minimum(first[row : row + step] + tap, num_rows - 1)
            sums += pixels[at] * factors[:, None, None]
        np.clip(sums >> num_bits, 0, 255, out=part, casting="unsafe")
    return found


def _taps(
    size: int, count: int, resample: int
) -> "tuple[NDArray[np.int64], NDArray[np.int32], int]":
    """The filter that resizes `size` values to `count` results: (first, weights, num_bits).

    first [count] is the index of the first value that each result weighs. weights [taps, count] are
    integers in units of 2**-num_bits.
    """
    import numpy as np  # a server for text never loads it

    # First, the exact weights, by the distances from each result's centre.
    scale = size / count
    reach = _REACHES[resample] * max(scale, 1.0)
    centers = scale * (np.arange(count) + 0.5)
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    counts = np.minimum((centers + reach + 0.5).astype(np.int64), size) - first
    offsets = np.arange(min(2 * math.ceil(reach) + 1, int(counts.max())))[:, None]
    distances = np.abs((offsets + first - centers + 0.5) * (1.0 / max(scale, 1.0)))
    weights = np.where(offsets < counts, _weights(distances, resample), 0.0)
    weights /= weights.cumsum(axis=0)[-1]  # summed in order, as torch does
    # Then, the largest number of bits at which every weight and its sign fit into 16.
    largest, num_bits = float(weights.max()), 0
    while num_bits < _MOST_BITS and int(0.5 + largest * (1 << (num_bits + 1))) < 1 << _WEIGHT_BITS:
        num_bits += 1
    scaled = weights * (1 << num_bits)
    return first, (scaled + np.copysign(0.5, scaled)).astype(np.int32), num_bits


def _weights(distances: "NDArray[np.float64]", resample: int) -> "NDArray[np.float64]":
    """The filter at these distances, before it is divided by its sum."""
    import numpy as np  # a server for text never loads it

    x, a = distances, _SHARPNESS
    if resample == BILINEAR:
        return np.maximum(1.0 - x, 0.0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
