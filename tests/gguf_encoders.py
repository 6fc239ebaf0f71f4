"""Rounds numbers to the types of GGUF files, each to the nearest code, without any search.

llama.cpp searches for scales that lose less; its package gguf has the plain rounding of the older
types. The layouts are those that `quire.models.checkpoints.gguf` reads.

Shapes: N blocks, G groups of a block, L numbers of a group.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from quire.models.checkpoints.gguf.legacy_types import NONLINEAR

Array = npt.NDArray[np.generic]
_EVEN_BITS = (0, 2, 4, 6)
_VALUES = np.array(NONLINEAR, np.float32)
_MIDDLES = (_VALUES[1:] + _VALUES[:-1]) / 2


def encode(kind: str, weight: Array) -> Array:
    """weight [R, I] fp32 -> its blocks [R, bytes] uint8."""
    if kind not in _ENCODERS:
        found: Array = quants.quantize(weight, GGMLQuantizationType[kind])
        return found
    size, encoder = _ENCODERS[kind]
    return encoder(weight.reshape(-1, size)).reshape(len(weight), -1)


def _q2_k(blocks: Array) -> Array:
    codes, scales, minima, factors = _with_minima(blocks, 16, most=3, most_scale=15)
    return _joined(scales | minima << 4, _folded(codes, *_EVEN_BITS), factors)


def _q3_k(blocks: Array) -> Array:
    codes, scales, factor = _centred(blocks, 16, half=4, most_scale=31)
    places = (scales + 32).view(np.uint8)
    upper = (places >> 4).reshape(-1, 4, 4) << np.array(_EVEN_BITS, np.uint8)[:, None]
    return _joined(
        _folded(codes >> 2, *range(8)),
        _folded(codes & 3, *_EVEN_BITS),
        _nibbles(places & 15, 8),
        upper.sum(1, dtype=np.uint8),
        factor,
    )


def _q4_k(blocks: Array) -> Array:
    codes, scales, minima, factors = _with_minima(blocks, 32, most=15, most_scale=63)
    return _joined(factors, _six_bits(scales, minima), _nibbles(codes, 32))


def _q5_k(blocks: Array) -> Array:
    codes, scales, minima, factors = _with_minima(blocks, 32, most=31, most_scale=63)
    high = _folded(codes >> 4, *range(8))
    return _joined(factors, _six_bits(scales, minima), high, _nibbles(codes & 15, 32))


def _q6_k(blocks: Array) -> Array:
    codes, scales, factor = _centred(blocks, 16, half=32, most_scale=127)
    return _joined(
        _nibbles(codes & 15, 64), _folded(codes >> 4, *_EVEN_BITS), scales.view(np.uint8), factor
    )


def _iq4_nl(blocks: Array) -> Array:
    scale = (_signed_largest(blocks) / _VALUES[0]).astype(np.float16)
    return _joined(scale, _nibbles(_nearest(blocks, scale), 16))


def _iq4_xs(blocks: Array) -> Array:
    groups = blocks.reshape(len(blocks), -1, 32)
    scales, factor = _whole_scales(_signed_largest(groups) / _VALUES[0], 31)
    codes = _nearest(groups, factor[..., None] * scales).reshape(len(blocks), -1)
    places = (scales[..., 0] + 32).astype(np.uint8)
    upper = (places >> 4).astype("<u2") << np.arange(0, 16, 2, dtype="<u2")
    high = upper.sum(1, dtype="<u2").view(np.uint8).reshape(-1, 2)
    return _joined(factor, high, _nibbles(places & 15, 1), _nibbles(codes, 16))


def _with_minima(
    blocks: Array, length: int, *, most: int, most_scale: int
) -> tuple[Array, Array, Array, Array]:
    """-> codes [N, 256], scales and minima [N, G] uint8, factors of both [N, 2]."""
    groups = blocks.reshape(len(blocks), -1, length)
    low = -np.minimum(groups.min(-1, keepdims=True), 0)
    scales, factor = _whole_scales((groups.max(-1, keepdims=True) + low) / most, most_scale)
    minima, second = _whole_scales(low, most_scale)
    above = groups + second[..., None].astype(np.float32) * minima
    codes = _divided(above, factor[..., None] * scales).round().clip(0, most).astype(np.uint8)
    of_groups = (each[..., 0].astype(np.uint8) for each in (scales, minima))
    return codes.reshape(len(blocks), -1), *of_groups, np.concatenate((factor, second), 1)


def _centred(
    blocks: Array, length: int, *, half: int, most_scale: int
) -> tuple[Array, Array, Array]:
    """-> codes [N, 256] around `half`, scales [N, G] int8, their factor [N, 1]."""
    groups = blocks.reshape(len(blocks), -1, length)
    scales, factor = _whole_scales(_signed_largest(groups) / -half, most_scale)
    levels = _divided(groups, factor[..., None] * scales).round().clip(-half, half - 1)
    codes = (levels + half).astype(np.uint8).reshape(len(blocks), -1)
    return codes, scales[..., 0].astype(np.int8), factor


def _whole_scales(scales: Array, most: int) -> tuple[Array, Array]:
    """scales [N, G, 1] -> integers of at most `most`, as fp32, and their factor [N, 1] fp16."""
    factor = (np.abs(scales).max(1) / most).astype(np.float16)
    whole = _divided(scales, factor[..., None]).round().clip(-most, most)
    return whole, factor


def _signed_largest(groups: Array) -> Array:
    """[..., L] -> [..., 1]: the number of the largest magnitude."""
    at = np.abs(groups).argmax(-1, keepdims=True)
    found: Array = np.take_along_axis(groups, at, -1)
    return found


def _divided(numbers: Array, scales: Array) -> Array:
    """As fp32; zero where a scale is."""
    scales = scales.astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)
    found: Array = np.where(scales == 0, np.float32(0), numbers / safe)
    return found.astype(np.float32)


def _nearest(numbers: Array, scales: Array) -> Array:
    """Which of the sixteen values each number is next to."""
    return np.searchsorted(_MIDDLES, _divided(numbers, scales)).astype(np.uint8)


def _joined(*fields: Array) -> Array:
    """Fields of each block, one behind the other, as bytes."""
    return np.concatenate([np.ascontiguousarray(field).view(np.uint8) for field in fields], 1)


def _nibbles(codes: Array, length: int) -> Array:
    """Of each two times `length` codes the first are low halves, the others high ones."""
    pairs = codes.reshape(len(codes), -1, 2, length)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(codes), -1)


def _folded(bits: Array, *shifts: int) -> Array:
    """Bits of numbers i, i + 32, i + 64, and so on, in one byte: [N, 256] -> [N, C]."""
    pieces = bits.reshape(len(bits), -1, len(shifts), 32) << np.array(shifts, np.uint8)[:, None]
    return pieces.sum(2, dtype=np.uint8).reshape(len(bits), -1)


def _six_bits(scales: Array, minima: Array) -> Array:
    """Of eight groups: the first four have six bits of a byte each, the others share the rest."""
    (scale, later_scale), (minimum, later_minimum) = (
        (each[:, :4], each[:, 4:]) for each in (scales, minima)
    )
    both = (later_scale & 15) | (later_minimum & 15) << 4
    upper = (
        first | later >> 4 << 6
        for first, later in zip((scale, minimum), (later_scale, later_minimum), strict=True)
    )
    return np.concatenate((*upper, both), 1)


_ENCODERS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "Q2_K": (256, _q2_k),
    "Q3_K": (256, _q3_k),
    "Q4_K": (256, _q4_k),
    "Q5_K": (256, _q5_k),
    "Q6_K": (256, _q6_k),
    "IQ4_NL": (32, _iq4_nl),
    "IQ4_XS": (256, _iq4_xs),
}
