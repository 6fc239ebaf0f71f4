"""Unpacks GGUF types with one scale for each block: Q4_0 to Q8_0, IQ4_NL, MXFP4.

    Q4_0    scale fp16 | codes 4 bits         Q4_1    scale fp16 | minimum fp16 | codes 4 bits
    Q5_0    scale fp16 | highest bits u32 | codes' lower 4 bits        Q5_1    with a minimum
    Q8_0    scale fp16 | numbers int8
    IQ4_NL  scale fp16 | codes 4 bits         MXFP4   exponent u8 | codes 4 bits

A byte of 4-bit codes holds the code of value i in its lower bits and of value i + 16 in its upper
bits. Source: ggml-quants.c of llama.cpp. Called by `decoding`.
"""

import numpy as np
import torch

from quire.formats.block_quantized.weights import BlockFormat
from quire.models.checkpoints.gguf.blocks import (
    Array,
    BlockQuantizedType,
    Unpacked,
    fields,
    halves,
    integers,
    nibbles,
    spread,
)

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of IQ4_NL and IQ4_XS."""
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values of the 4-bit floats of MXFP4 and NVFP4, doubled."""


def _q4_0(blocks: Array) -> Unpacked:
    scale, codes = fields(blocks, 2)
    return Unpacked(nibbles(codes, 16), halves(scale))


def _q4_1(blocks: Array) -> Unpacked:
    scale, minimum, codes = fields(blocks, 2, 2)
    return Unpacked(nibbles(codes, 16), halves(scale), -halves(minimum))


def _q5_0(blocks: Array) -> Unpacked:
    scale, high, codes = fields(blocks, 2, 4)
    return Unpacked(_five_bits(codes, high), halves(scale))


def _q5_1(blocks: Array) -> Unpacked:
    scale, minimum, high, codes = fields(blocks, 2, 2, 4)
    return Unpacked(_five_bits(codes, high), halves(scale), -halves(minimum))


def _five_bits(low: Array, high: Array) -> Array:
    highest = spread(integers(high, 4), *range(32), width=1).astype(np.uint8)
    codes: Array = nibbles(low, 16) | (highest << 4)
    return codes


def _q8_0(blocks: Array) -> Unpacked:
    scale, numbers = fields(blocks, 2)
    return Unpacked(numbers ^ np.uint8(128), halves(scale))


def _mxfp4(blocks: Array) -> Unpacked:
    exponents, codes = fields(blocks, 1)
    # The bits of 2 ** (exponent - 128) as a bf16. The smallest two are subnormal.
    scales = exponents.astype(np.int16)
    scales = np.where(scales < 2, np.int16(32) << scales, (scales - 1) << 7)
    return Unpacked(nibbles(codes, 16), scales)


LEGACY_TYPES = {
    "Q4_0": BlockQuantizedType(BlockFormat("Q4_0", 4, 32, zero=8), _q4_0),
    "Q4_1": BlockQuantizedType(BlockFormat("Q4_1", 4, 32, has_offsets=True), _q4_1),
    "Q5_0": BlockQuantizedType(BlockFormat("Q5_0", 5, 32, zero=16), _q5_0),
    "Q5_1": BlockQuantizedType(BlockFormat("Q5_1", 5, 32, has_offsets=True), _q5_1),
    "Q8_0": BlockQuantizedType(BlockFormat("Q8_0", 8, 32, zero=128), _q8_0),
    "IQ4_NL": BlockQuantizedType(BlockFormat("IQ4_NL", 4, 32, table=NONLINEAR), _q4_0),
    "MXFP4": BlockQuantizedType(
        BlockFormat("MXFP4", 4, 32, table=DOUBLED_E2M1, scale_dtype=torch.bfloat16), _mxfp4
    ),
}
"""Types by name. The scales of MXFP4 are stored as the bits of its scale_dtype."""
