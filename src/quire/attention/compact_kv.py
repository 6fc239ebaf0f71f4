"""The int8 form of K and V: what all backends store of a vector.

Of a vector x, a token's K or V of one KV head, a byte an element is stored, and one scale:

    scale = bfloat16(max |x| / 127),   code = nearest(x / scale), from -127 to 127
    x is read as code * scale

Both are pure functions of x: nothing is rewritten when a block fills, and a prompt leaves the same
bytes however it was chunked. Roundings are to nearest, ties to even. bfloat16 has the exponents of
fp32, so no vector is out of range; where a scale was rounded down, the largest elements saturate by
at most half a code, which is what any element loses. A vector of zeros has a scale of 0 and is
exact. One with an infinity or a NaN has a scale of NaN: what attends it is NaN, and fails alone.

K, and q alike, are multiplied by an orthogonal matrix first (`rotate_vectors`), which leaves q·k as
it is and spreads the few large elements that some models' keys have over others, so that a scale
leaves more of the rest ("QuaRot", arXiv:2404.00456, section 4.2). Not V, and not a latent layer's
vectors, which are values as well.

Where codes and scales lie in a page is the backend's own. The native kernels compute the same bytes
(`csrc/attention/compact/compact_page.h` of `kernels/cpu`), and so do the Triton kernels
(`rotary_kv_write.py` of `kernels/triton`), from the same K.
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
    """codes [..., D], scales [...] -> what they stand for, [..., D] fp32."""
    return codes.float() * scales.float()[..., None]


def rotate_vectors(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] of any floating dtype -> fp32, each vector times an orthonormal Hadamard matrix.

    It has as many rows as the greatest power of two that divides D, and is applied to so many
    elements after the other. It is its own inverse, and symmetric. Sums are of two terms, their
    partners 1, 2, 4, .. elements away: in this order, so that all backends get the same bits.
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
    """The format with room for the scales behind the codes."""
    num_vectors = (1 if spec.value_dim else 2) * form.block_size * spec.num_kv_heads
    scales_bytes = num_vectors * SCALE_DTYPE.itemsize
    return replace(form, bytes_per_layer=form.bytes_per_layer + scales_bytes)
