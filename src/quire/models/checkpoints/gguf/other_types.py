"""Decodes the remaining GGUF types: TQ1_0, TQ2_0, NVFP4, Q1_0, and unquantized values.

    TQ1_0  five numbers -1, 0, 1 in a byte: 32 bytes, 16 bytes, then four numbers in each of 4
           bytes | scale fp16
    TQ2_0  codes 2 bits | scale fp16
    NVFP4  scales, unsigned floats of 4 + 3 bits [4] | codes 4 bits
    Q1_0   scale fp16 | signs

Source: ggml-quants.c of llama.cpp. Called by `decoding`.
"""

from functools import partial

import numpy as np

from quire.models.checkpoints.gguf.blocks import (
    Array,
    Decoder,
    fields,
    halves,
    nibbles,
    pieces,
    spread,
)
from quire.models.checkpoints.gguf.legacy_types import DOUBLED_E2M1

_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
_E2M1 = np.array(DOUBLED_E2M1, np.float32)


def _tq1_0(blocks: Array) -> Array:
    large, small, last, scale = fields(blocks, 32, 16, 4)
    digits = [
        (field[:, None] * _POWERS[:count]).reshape(len(blocks), -1)
        for field, count in ((large, 5), (small, 5), (last, 4))
    ]
    # A byte is a fraction of 256. Multiplied by 3, it carries the next digit in base 3.
    trits = np.concatenate(digits, 1).astype(np.uint16) * 3 >> 8
    return _scaled(scale, trits.astype(np.float32) - 1)


def _tq2_0(blocks: Array) -> Array:
    codes, scale = fields(blocks, 64)
    found = pieces(codes.reshape(-1, 2, 32), 0, 2, 4, 6, width=2).reshape(-1, 256)
    return _scaled(scale, found.astype(np.float32) - 1)


def _q1_0(blocks: Array) -> Array:
    scale, signs = fields(blocks, 2)
    return _scaled(scale, spread(signs, *range(8), width=1).astype(np.float32) * 2 - 1)


def _scaled(scale: Array, numbers: Array) -> Array:
    found: Array = halves(scale).astype(np.float32) * numbers
    return found


def _nvfp4(blocks: Array) -> Array:
    scales, codes = fields(blocks, 4)
    exponents, fractions = (scales >> 3) & 15, (scales & 7).astype(np.float32)
    normal = (1 + fractions / 8) * np.exp2(exponents.astype(np.float32) - 7)
    found = np.where(exponents == 0, fractions * np.float32(2**-9), normal)
    found = np.where(scales == 127, np.float32(0), found) / 2  # the codes' values are doubled
    numbers = _E2M1[nibbles(codes, 8)].reshape(-1, 4, 16)
    return (found[..., None] * numbers).reshape(len(blocks), 64)


def _bf16(blocks: Array) -> Array:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _plain(letters: str, blocks: Array) -> Array:
    return np.ascontiguousarray(blocks).view(letters).astype(np.float32)


OTHER_TYPES: dict[str, Decoder] = {
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "BF16": _bf16,
    "F16": partial(_plain, "<f2"),
    "F32": partial(_plain, "<f4"),
    "F64": partial(_plain, "<f8"),
    "I8": partial(_plain, "<i1"),
    "I16": partial(_plain, "<i2"),
    "I32": partial(_plain, "<i4"),
    "I64": partial(_plain, "<i8"),
}
"""The types by their names."""
