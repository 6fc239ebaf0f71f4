"""Int8 quantization of K and V vectors, bit-identical in all attention backends.

For each vector x (a token's K or V in one KV head), a byte per element and one scale are stored:

    scale = bfloat16(max |x| / 127),   code = nearest(x / scale), from -127 to 127
    x is read as code * scale

Scale and codes are pure functions of x. So nothing is rewritten when a block fills, and all
chunkings of a prompt store the same bytes. Rounding is to nearest, ties to even. bfloat16 has the
exponents of fp32, so every finite vector is in range. If a scale is rounded down, the largest
elements are clipped by at most half a code, which is no more than the rounding error of other
elements. A vector of zeros has a scale of 0 and is exact. A vector with an infinity or a NaN has a
scale of NaN: only queries that see it get NaN.

K and q are first multiplied by an orthogonal matrix (`rotate_vectors`), which preserves q·k. Some
models' keys have a few large elements; the rotation spreads them over all elements, so that the
scale is finer ("QuaRot", arXiv:2404.00456, section 4.2). V is not rotated, and neither are a latent
layer's vectors, because they are also values.

Each backend has its own layout of codes and scales. The native kernels
(`csrc/attention/quantized/quantized_page.h` of `kernels/cpu`) and the Triton kernels
(`rotary_kv_write.py` of `kernels/triton`) compute the same bytes from the same K.
"""

import math
from dataclasses import replace

import torch

from quire.attention.interface import AttentionSpec, KVPageFormat

SCALE_DTYPE = torch.bfloat16
LARGEST_CODE = 127.0


def quantize_vectors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] of any floating dtype -> (codes [..., D] int8, scales [...] bfloat16)."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    is_sound = wide.isfinite().all(-1)
    scales = torch.where(is_sound, largest / LARGEST_CODE, torch.nan).to(SCALE_DTYPE)
    divisors = scales.float()[..., None]
    quotients = torch.where(divisors > 0, wide / divisors, 0.0).round_()
    return quotients.clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scales


def widen_codes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., D], scales [...] -> the dequantized vectors [..., D] fp32."""
    return codes.float() * scales.float()[..., None]


def rotate_vectors(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] of any floating dtype -> fp32, each vector times an orthonormal Hadamard matrix.

    The matrix has n rows, where n is the greatest power of two that divides D, and multiplies each
    group of n elements. It is symmetric and its own inverse. Passes combine pairs of elements at
    distances of 1, 2, 4, .. in this order, so that all backends get the same bits.
    """
    size = x.shape[-1] & -x.shape[-1]
    wide = x.float()
    distance = 1
    while distance < size:
        pairs = (x.shape[-1] // (2 * distance), 2, distance)
        first, second = wide.reshape(*x.shape[:-1], *pairs).unbind(-2)
        wide = torch.stack((first + second, first - second), -2).reshape(x.shape)
        distance *= 2
    return wide * (1.0 / math.sqrt(size))


def with_scales(spec: AttentionSpec, form: KVPageFormat) -> KVPageFormat:
    """`form` enlarged by the bytes of the scales, which follow the codes."""
    num_vectors = (1 if spec.value_dim else 2) * form.block_size * spec.num_kv_heads
    scales_bytes = num_vectors * SCALE_DTYPE.itemsize
    return replace(form, bytes_per_layer=form.bytes_per_layer + scales_bytes)
