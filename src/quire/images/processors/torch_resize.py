"""The bilinear resize of transformers' processors for torch, for pictures of 8-bit values.

torch rounds the weights of the filter to 16 bits, and Pillow to 22, so their results differ by 1 in
some pixels. This is torch's arithmetic (`UpSampleKernel.cpp` of ATen), whose filter widens with the
reduction. Called by the processor of LFM2-VL.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_MOST_BITS = 22
_WEIGHT_BITS = 15
_PIECE = 1 << 20
"""Values of a result that are computed at once, which bounds the memory beside the result."""


def resize_bilinear(image: "Image", height: int, width: int) -> "Image":
    """The picture in another size."""
    import numpy as np  # a server for text never loads it
    from PIL.Image import fromarray

    columns = _resize_rows(np.asarray(image).swapaxes(0, 1), width)
    return fromarray(_resize_rows(columns.swapaxes(0, 1), height))


def _resize_rows(pixels: "NDArray[np.uint8]", count: int) -> "NDArray[np.uint8]":
    """Resize [rows, columns, channels] to `count` rows."""
    import numpy as np  # a server for text never loads it

    pixels = np.ascontiguousarray(pixels)
    num_rows, num_columns, num_channels = pixels.shape
    if count == num_rows:
        return pixels
    first, weights, num_bits = _taps(num_rows, count)
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


def _taps(size: int, count: int) -> "tuple[NDArray[np.int64], NDArray[np.int32], int]":
    """For each of `count` results over `size` values: the first value [count] that it weighs, and
    the weights [taps, count], which are integers over 2 to the number of bits that is returned."""
    import numpy as np  # a server for text never loads it

    # First, the exact weights: a triangle around each result's centre.
    scale = size / count
    reach = max(scale, 1.0)
    centers = scale * (np.arange(count) + 0.5)
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    counts = np.minimum((centers + reach + 0.5).astype(np.int64), size) - first
    offsets = np.arange(min(2 * math.ceil(reach) + 1, int(counts.max())))[:, None]
    distances = np.abs((offsets + first - centers + 0.5) * (1.0 / reach))
    weights = np.where(offsets < counts, np.maximum(1.0 - distances, 0.0), 0.0)
    weights /= weights.cumsum(axis=0)[-1]  # summed in order, as torch does
    # Then, as many bits as let the largest weight fit into 16, with its sign.
    largest, num_bits = float(weights.max()), 0
    while num_bits < _MOST_BITS and int(0.5 + largest * (1 << (num_bits + 1))) < 1 << _WEIGHT_BITS:
        num_bits += 1
    return first, (0.5 + weights * (1 << num_bits)).astype(np.int32), num_bits
