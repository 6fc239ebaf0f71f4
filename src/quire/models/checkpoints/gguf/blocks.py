"""Helpers that unpack the blocks of bytes of ggml's quantized types.

A tensor's rows are divided into blocks, and a block consists of fields, one after another, low byte
first. The modules of the types unpack all blocks at once, as numpy arrays.

Shapes: N blocks, S values in a block, G groups in a block; C and L are any sizes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.formats.block_quantized.weights import BlockFormat

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Unpacked blocks. The fields are those of `formats.block_quantized.weights.UnpackedRows`."""

    #: [N, S] uint8.
    codes: Array
    #: [N, G].
    scales: Array
    #: [N, G], or None.
    offsets: Array | None = None
    #: [N, 2] fp16: a factor of all scales and a factor of all offsets, or None.
    factors: Array | None = None


@dataclass(frozen=True, slots=True)
class BlockQuantizedType:
    """A quantized type of ggml whose blocks hold codes and scales."""

    block_format: BlockFormat
    #: Unpacks blocks [N, bytes].
    unpack: Callable[[Array], Unpacked]


Decoder = Callable[[Array], Array]
"""Decodes blocks [N, bytes] to values [N, S]."""


def fields(blocks: Array, *sizes: int) -> Iterator[Array]:
    """Split blocks into fields of `sizes` bytes each, and a last field with the remaining bytes."""
    start = 0
    for size in sizes:
        yield blocks[:, start : start + size]
        start += size
    yield blocks[:, start:]


def halves(field: Array) -> Array:
    """Read fp16 values: bytes [N, 2C] -> [N, C]."""
    return np.ascontiguousarray(field).view("<f2")


def integers(field: Array, size: int) -> Array:
    """Read unsigned integers of `size` bytes: [N, size * C] -> [N, C]."""
    return np.ascontiguousarray(field).view(f"<u{size}")


def pieces(values: Array, *shifts: int, width: int) -> Array:
    """`width` bits of each value from each of `shifts` on: [N, C, L] -> [N, C, len(shifts), L]."""
    lowest = np.array(shifts, values.dtype)[:, None]
    found: Array = (values[:, :, None] >> lowest) & values.dtype.type((1 << width) - 1)
    return found


def spread(values: Array, *shifts: int, width: int) -> Array:
    """The `pieces` of each value, one after another: [N, C] -> [N, C * len(shifts)]."""
    found = pieces(values[..., None], *shifts, width=width)
    return found.reshape(len(values), values.shape[1] * len(shifts))


def nibbles(field: Array, length: int) -> Array:
    """Split bytes into 4 bits, [N, C] -> [N, 2C]: of each `length` bytes first the low halves."""
    count = field.shape[1]
    found = pieces(field.reshape(len(field), count // length, length), 0, 4, width=4)
    return found.reshape(len(field), 2 * count)
