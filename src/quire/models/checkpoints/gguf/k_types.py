"""Unpacks GGUF types whose scales are integers times a factor: Q2_K to Q6_K, IQ4_XS.

    Q2_K    scales, minima 4 + 4 bits [16] | codes 2 bits | factors fp16 [2]
    Q3_K    codes' highest bit | lower 2 bits | scales 6 bits [16] | factor fp16
    Q4_K    factors fp16 [2] | scales, minima 6 + 6 bits [8] | codes 4 bits
    Q5_K    factors fp16 [2] | scales, minima 6 + 6 bits [8] | codes' highest bit | lower 4 bits
    Q6_K    codes' lower 4 bits | upper 2 bits | scales int8 [16] | factor fp16
    IQ4_XS  factor fp16 | scales' upper 2 bits u16 | lower 4 bits [8] | codes 4 bits

Blocks have 256 values, groups 16 or 32. Source: ggml-quants.c of llama.cpp. Called by `decoding`.
"""

import numpy as np

from quire.formats.block_quantized.weights import BlockFormat
from quire.models.checkpoints.gguf.blocks import (
    Array,
    BlockQuantizedType,
    Unpacked,
    fields,
    halves,
    integers,
    nibbles,
    pieces,
    spread,
)
from quire.models.checkpoints.gguf.legacy_types import NONLINEAR

_SIZE = 256
_EVEN_BITS = (0, 2, 4, 6)


def _q2_k(blocks: Array) -> Unpacked:
    scales, codes, factors = fields(blocks, 16, 64)
    codes = _unfolded(codes, *_EVEN_BITS, width=2)
    return Unpacked(codes, (scales & 15).astype(np.int8), scales >> 4, halves(factors))


def _q3_k(blocks: Array) -> Unpacked:
    high, low, scales, factor = fields(blocks, 32, 64, 12)
    codes = _unfolded(low, *_EVEN_BITS, width=2) | (_unfolded(high, *range(8), width=1) << 2)
    low_scales, high_scales = fields(scales, 8)
    upper = pieces(high_scales[:, None], *_EVEN_BITS, width=2).reshape(-1, 16)
    return Unpacked(codes, _centred(nibbles(low_scales, 8), upper), None, _one_factor(factor))


def _q4_k(blocks: Array) -> Unpacked:
    factors, scales, codes = fields(blocks, 4, 12)
    return Unpacked(nibbles(codes, 32), *_six_bits(scales), halves(factors))


def _q5_k(blocks: Array) -> Unpacked:
    factors, scales, high, codes = fields(blocks, 4, 12, 32)
    codes = nibbles(codes, 32) | (_unfolded(high, *range(8), width=1) << 4)
    return Unpacked(codes, *_six_bits(scales), halves(factors))


def _q6_k(blocks: Array) -> Unpacked:
    low, high, scales, factor = fields(blocks, 128, 64, 16)
    codes = nibbles(low, 64) | (_unfolded(high, *_EVEN_BITS, width=2) << 4)
    return Unpacked(codes, scales.view(np.int8), None, _one_factor(factor))


def _iq4_xs(blocks: Array) -> Unpacked:
    factor, high, low, codes = fields(blocks, 2, 2, 4)
    upper = spread(integers(high, 2), *range(0, 16, 2), width=2).astype(np.uint8)
    scales = _centred(spread(low, 0, 4, width=4), upper)
    return Unpacked(nibbles(codes, 16), scales, None, _one_factor(factor))


def _unfolded(field: Array, *shifts: int, width: int) -> Array:
    """Unpack bytes. Each has bits of the codes i, i + 32, i + 64 and so on: [N, C] -> [N, 256]."""
    found = pieces(field.reshape(len(field), -1, 32), *shifts, width=width)
    return found.reshape(len(field), _SIZE)


def _six_bits(field: Array) -> tuple[Array, Array]:
    """The scales and minima of eight groups, of 6 bits each.

    In the layout, a are the bits of groups 0 to 3; B and b are the upper and lower bits of groups 4
    to 7:

        bytes 0-3: scales BBaaaaaa | 4-7: minima BBaaaaaa | 8-11: minima, then scales: bbbb bbbb
    """
    scales, minima, both = fields(field, 4, 4)
    later_scales = (both & 15) | ((scales >> 2) & 48)
    later_minima = (both >> 4) | ((minima >> 2) & 48)
    return (
        np.concatenate((scales & 63, later_scales), 1).view(np.int8),
        np.concatenate((minima & 63, later_minima), 1),
    )


def _centred(low: Array, high: Array) -> Array:
    """Signed scales, from -32 to 31, from their lower 4 and upper 2 bits."""
    found: Array = (low | (high << 4)).view(np.int8) - np.int8(32)
    return found


def _one_factor(field: Array) -> Array:
    """The factor of scales, and 0 as the factor of offsets: [N, 2]."""
    found = np.zeros((len(field), 2), np.float16)
    found[:, :1] = halves(field)
    return found


K_TYPES = {
    "Q2_K": BlockQuantizedType(
        BlockFormat("Q2_K", 4, 16, has_offsets=True, block_size=_SIZE), _q2_k
    ),
    "Q3_K": BlockQuantizedType(BlockFormat("Q3_K", 4, 16, zero=4, block_size=_SIZE), _q3_k),
    "Q4_K": BlockQuantizedType(
        BlockFormat("Q4_K", 4, 32, has_offsets=True, block_size=_SIZE), _q4_k
    ),
    "Q5_K": BlockQuantizedType(
        BlockFormat("Q5_K", 5, 32, has_offsets=True, block_size=_SIZE), _q5_k
    ),
    "Q6_K": BlockQuantizedType(BlockFormat("Q6_K", 6, 16, zero=32, block_size=_SIZE), _q6_k),
    "IQ4_XS": BlockQuantizedType(
        BlockFormat("IQ4_XS", 4, 32, table=NONLINEAR, block_size=_SIZE), _iq4_xs
    ),
}
"""Types by name."""
