"""Decodes GGUF types whose codes are indices of lattice points: IQ1, IQ2, IQ3.

    IQ2_XXS  factor fp16 | 8 groups of 32: points u8 [4], signs 7 bits [4] and scale 4 bits in u32
    IQ2_XS   factor fp16 | points 9 bits and signs 7 bits, u16 [32] | scales 4 bits [16]
    IQ2_S    factor fp16 | points' lower bits u8 [32] | signs [32] | upper 2 bits [32] | scales [16]
    IQ3_XXS  factor fp16 | points u8 [64] | signs 7 bits [4] and scale 4 bits in u32 [8]
    IQ3_S    factor fp16 | points u8 [64] | upper bit [64] | signs [32] | scales 4 bits [8]
    IQ1_S    factor fp16 | points u8 [32] | upper 3 bits [4], scale 3 bits, shift's sign: u16 [8]
    IQ1_M    points u8 [32] | upper 3 bits and shift's sign, 4 bits [32] | scales 3 bits [16] and
             the factor's 16 bits in four u16

Blocks have 256 values. Seven signs determine the eighth, since the product of all eight is
positive. Shapes: N blocks; G scales, P points and T shifts of a block.
Source: ggml-quants.c of llama.cpp. Called by `decoding`.
"""

import numpy as np

from quire.formats.block_quantized.weights import BlockFormat
from quire.models.checkpoints.gguf.blocks import (
    Array,
    BlockQuantizedType,
    Decoder,
    Unpacked,
    fields,
    halves,
    integers,
    nibbles,
    spread,
)
from quire.models.checkpoints.gguf.lattices import lattice

_SHIFT = np.float32(0.125)
_HALF, _QUARTER = np.float32(0.5), np.float32(0.25)
_SEVEN_BITS = (0, 7, 14, 21)
_EIGHT_SIGNS = np.array([index | (index.bit_count() % 2) << 7 for index in range(128)], np.uint8)


def _iq2_xxs(blocks: Array) -> Array:
    factor, groups = fields(blocks, 2)
    words = integers(groups, 4).reshape(len(blocks), 8, 2)
    points = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    signs = _completed(spread(words[..., 1], *_SEVEN_BITS, width=7))
    scales = _single(factor) * (_HALF + _floats(words[..., 1] >> 28)) * _QUARTER
    return _scaled(scales, lattice("IQ2_XXS")[points], signs)


def _iq2_xs(blocks: Array) -> Array:
    factor, codes, scales = fields(blocks, 2, 64)
    words = integers(codes, 2)
    scales = _single(factor) * (_HALF + _floats(spread(scales, 0, 4, width=4))) * _QUARTER
    return _scaled(scales, lattice("IQ2_XS")[words & 511], _completed(words >> 9))


def _iq2_s(blocks: Array) -> Array:
    factor, low, signs, high, scales = fields(blocks, 2, 32, 32, 8)
    points = low.astype(np.uint16) | spread(high, 0, 2, 4, 6, width=2).astype(np.uint16) << 8
    scales = _single(factor) * (_HALF + _floats(spread(scales, 0, 4, width=4))) * _QUARTER
    return _scaled(scales, lattice("IQ2_S")[points], signs)


def _iq3_xxs(blocks: Array) -> Array:
    factor, points, rest = fields(blocks, 2, 64)
    words = integers(rest, 4)
    signs = _completed(spread(words, *_SEVEN_BITS, width=7))
    scales = _single(factor) * (_HALF + _floats(words >> 28)) * _HALF
    return _scaled(scales, lattice("IQ3_XXS")[points], signs)


def _iq3_s(blocks: Array) -> Unpacked:
    """Unpack IQ3_S to codes of four bits: a sign, and three bits for the odd numbers from 1 to 15.
    Its scales are integers, so `BlockFormat` can describe the type."""
    factor, low, high, signs, scales = fields(blocks, 2, 64, 8, 32)
    points = low.astype(np.uint16) | spread(high, *range(8), width=1).astype(np.uint16) << 8
    numbers = lattice("IQ3_S")[points].reshape(len(blocks), 256).view(np.uint8)
    codes = numbers >> 1 | spread(signs, *range(8), width=1) << 3
    factors = np.zeros((len(blocks), 2), np.float16)
    factors[:, :1] = halves(factor)
    return Unpacked(codes, (1 + 2 * spread(scales, 0, 4, width=4)).view(np.int8), None, factors)


def _iq1_s(blocks: Array) -> Array:
    factor, low, rest = fields(blocks, 2, 32)
    words = integers(rest, 2)
    points = low.astype(np.uint16) | spread(words, 0, 3, 6, 9, width=3) << 8
    scales = _single(factor) * _floats(2 * (words >> 12 & 7) + 1)
    shifts = np.where(words & 0x8000, -_SHIFT, _SHIFT)
    return _shifted(scales, lattice("IQ1_S")[points], shifts)


def _iq1_m(blocks: Array) -> Array:
    low, high, rest = fields(blocks, 32, 16)
    words = integers(rest, 2)
    factor = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    factor = np.bitwise_or.reduce(factor, axis=1, keepdims=True).view(np.float16)
    flags = nibbles(high, 1)
    points = low.astype(np.uint16) | (flags & 7).astype(np.uint16) << 8
    scales = factor.astype(np.float32) * _floats(2 * spread(words, 0, 3, 6, 9, width=3) + 1)
    return _shifted(scales, lattice("IQ1_S")[points], np.where(flags & 8, -_SHIFT, _SHIFT))


def _floats(values: Array) -> Array:
    return values.astype(np.float32)


def _single(field: Array) -> Array:
    """The factor of each block: bytes [N, 2] -> [N, 1]."""
    return _floats(halves(field))


def _completed(signs: Array) -> Array:
    """Complete seven signs, as bits, to the eight signs that they determine."""
    found: Array = _EIGHT_SIGNS[signs]
    return found


def _scaled(scales: Array, points: Array, signs: Array) -> Array:
    """The values [N, 256] from scales [N, G], points [N, P, 4 or 8] and signs [N, 32]. An entry of
    `signs` holds the sign bits of 8 values."""
    turned = spread(signs, *range(8), width=1).astype(np.bool_)
    numbers = points.reshape(len(scales), 256)
    numbers = np.where(turned, -numbers, numbers).astype(np.float32)
    return _multiplied(scales, numbers)


def _shifted(scales: Array, points: Array, shifts: Array) -> Array:
    """The values [N, 256] from scales [N, G], points [N, 32, 8] and shifts [N, T] of the points."""
    numbers = _floats(points).reshape(*shifts.shape, -1) + shifts[..., None]
    return _multiplied(scales, numbers)


def _multiplied(scales: Array, numbers: Array) -> Array:
    count, groups = scales.shape
    found: Array = scales[..., None] * numbers.reshape(count, groups, -1)
    return found.reshape(count, 256)


LATTICE_TYPES: dict[str, Decoder] = {
    "IQ1_M": _iq1_m,
    "IQ1_S": _iq1_s,
    "IQ2_S": _iq2_s,
    "IQ2_XS": _iq2_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ3_XXS": _iq3_xxs,
}
"""The types by their names."""

_ODD = tuple(range(1, 16, 2))
BLOCK_QUANTIZED_LATTICE_TYPES = {
    "IQ3_S": BlockQuantizedType(
        BlockFormat("IQ3_S", 4, 32, table=(*_ODD, *(-each for each in _ODD)), block_size=256),
        _iq3_s,
    )
}
"""The types that a `BlockFormat` describes, by their names."""
