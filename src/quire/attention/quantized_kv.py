"""KV formats of 8-bit codes (int8, fp8), bit-identical in all attention backends.

For each vector x (a token's K or V in one KV head), a byte per element and one scale are stored.
`most` is the largest code: 127 for int8, 448 for the 8-bit floats e4m3.

    scale = bfloat16(max |x| / most),   code = nearest(x / scale), from -most to most
    x is read as code * scale

Scale and codes are pure functions of x. So nothing is rewritten when a block fills, and all
chunkings of a prompt store the same bytes. Rounding is to nearest, ties to even. bfloat16 has the
exponents of fp32, so every finite vector is in range. If a scale is rounded down, the largest
elements are clipped by at most half a code, which is no more than the rounding error of other
elements. A vector of zeros has a scale of 0 and is exact. A vector with an infinity or a NaN has a
scale of NaN: only queries that see it get NaN.

In int8, K and q are first multiplied by an orthogonal matrix (`kv_format.rotate_vectors`), which
preserves q·k. Some models' keys have a few large elements; the rotation spreads them over all
elements, so that the scale is finer ("QuaRot", arXiv:2404.00456, section 4.2). V is not rotated,
and neither are a latent layer's vectors, because they are also values.

Each backend has its own layout of codes and scales. The native kernels
(`csrc/attention/quantized/quantized_page.h` of `kernels/cpu`) and the Triton kernels
(`rotary_kv_write.py` of `kernels/triton`) compute the same bytes from the same K.
"""

from dataclasses import dataclass

import torch

from quire.attention.kv_format import Arrays, KVFormat, VectorFormat


@dataclass(frozen=True, slots=True)
class Coded(VectorFormat):
    """Codes [D] of `dtype`, int8 or float8_e4m3fn, and one bfloat16 scale []."""

    dtype: torch.dtype

    def arrays(self, head_dim: int) -> Arrays:
        return (self.dtype, (head_dim,)), (torch.bfloat16, ())

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        is_float = self.dtype.is_floating_point
        most = float((torch.finfo if is_float else torch.iinfo)(self.dtype).max)
        wide = x.float()
        largest = wide.abs().amax(-1)
        is_sound = wide.isfinite().all(-1)
        scales = torch.where(is_sound, largest / most, torch.nan).bfloat16()
        divisors = scales.float()[..., None]
        quotients = torch.where(divisors > 0, wide / divisors, 0.0)
        quotients = quotients if is_float else quotients.round_()
        return quotients.clamp_(-most, most).to(self.dtype), scales

    def decode(self, *arrays: torch.Tensor) -> torch.Tensor:
        codes, scales = arrays
        return codes.float() * scales.float()[..., None]


INT8 = KVFormat("int8", Coded(torch.int8), Coded(torch.int8), rotates_keys=True)
FP8 = KVFormat("fp8", Coded(torch.float8_e4m3fn), Coded(torch.float8_e4m3fn))
