"""What the types of ggml have in common: blocks of bytes.

A tensor's rows are cut into blocks, and a block's bytes are fields, one behind the other, low byte
first. The modules beside this one take them apart as numpy arrays, all blocks at once.

Shapes: N blocks, S numbers in a block, G groups of a block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.formats.codes import Coding

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Blocks as `formats.codes.Codes` has rows of them.

    codes: [N, S] uint8. scales, offsets: [N, G]. factors: [N, 2] fp16, of scales and of offsets.
    """

    codes: Array
    scales: Array
    offsets: Array | None = None
    factors: Array | None = None


@dataclass(frozen=True, slots=True)
class CodedType:
    """A type whose blocks are codes with scales. unpack: its blocks [N, bytes]."""

    coding: Coding
    unpack: Callable[[Array], Unpacked]


Decoder = Callable[[Array], Array]
"""Blocks of a type [N, bytes] -> their numbers [N, S]."""


def fields(blocks: Array, *sizes: int) -> Iterator[Array]:
    """The fields of such sizes, in bytes, and what is behind them."""
    start = 0
    for size in sizes:
        yield blocks[:, start : start + size]
        start += size
    yield blocks[:, start:]


def halves(field: Array) -> Array:
    """[N, 2C] -> [N, C]."""
    return np.ascontiguousarray(field).view("<f2")


def integers(field: Array, size: int) -> Array:
    """Unsigned ones of `size` bytes: [N, size * C] -> [N, C]."""
    return np.ascontiguousarray(field).view(f"<u{size}")


def pieces(values: Array, *shifts: int, width: int) -> Array:
    """The `width` bits from each shift on: [N, C, L] -> [N, C, len(shifts), L]."""
    lowest = np.array(shifts, values.dtype)[:, None]
    found: Array = (values[:, :, None] >> lowest) & values.dtype.type((1 << width) - 1)
    return found


def spread(values: Array, *shifts: int, width: int) -> Array:
    """The same of values one by one: [N, C] -> [N, C * len(shifts)]."""
    found = pieces(values[..., None], *shifts, width=width)
    return found.reshape(len(values), values.shape[1] * len(shifts))


def nibbles(field: Array, length: int) -> Array:
    """Of `length` bytes each, the low halves, then the high ones: [N, C] -> [N, 2C]."""
    count = field.shape[1]
    found = pieces(field.reshape(len(field), count // length, length), 0, 4, width=4)
    return found.reshape(len(field), 2 * count)
