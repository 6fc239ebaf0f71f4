"""Quantizes K and V vectors to 8-bit codes, and converts codes to floats, in Triton.

K and V of a token are stored, for each KV head, as one code for each element and one scale for each
vector. With a vector x and the largest code `most` (127 for int8, 448 for e4m3):

    scale = bf16(max |x| / most),   code = nearest(x / scale)        number = code * scale

`attention.quantized_kv` is the reference, with the same bits, and discusses the format.

int8 has codes from -127 to 127. K may be rotated first (`rotation.hadamard`). e4m3 codes are 8-bit
floats of 4 exponent and 3 mantissa bits (OCP 8-bit Floating Point Specification; e4m3fn, without
infinities), stored as uint8.

`rotary_kv_write.py` quantizes with these functions. `paged_attention.py` converts codes back, by
`widening.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: The dtype of the codes in the kernels' pages, by the name of a KV format.
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}


@dataclass(frozen=True, slots=True)
class KVPages:
    """A layer's K and V of all blocks."""

    #: [N, 2, Hkv, B, D] of any page stride, K then V. The dtype is the model's dtype, or one of
    #: CODE_DTYPES for quantized KV.
    numbers: torch.Tensor
    #: The scales of codes, [N, Hkv, B] int32 of any page stride; `pack_scales` packs a token's
    #: scales of K and V in one int32. None if KV is not quantized.
    scales: torch.Tensor | None = None
    #: Whether queries and keys are multiplied by the Hadamard matrix before keys are stored.
    rotates_keys: bool = False


def check_scales(pages: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Raises ValueError unless pages [N, 2, Hkv, B, D] of codes have scales [N, Hkv, B] int32, each
    page contiguous, and pages without codes have no scales."""
    if (scales is not None) != (pages.dtype in CODE_DTYPES.values()):
        kind = "none" if scales is None else "some"
        raise ValueError(
            f"pages of {pages.dtype} came with scales: {kind}, but codes need scales, "
            "and other pages have none"
        )
    if scales is None:
        return
    expected = (pages.shape[0], *pages.shape[2:4])
    is_page = scales.shape == expected and scales[0].is_contiguous()
    if not is_page or scales.dtype != torch.int32 or scales.device != pages.device:
        raise ValueError(
            f"scales are {tuple(scales.shape)} {scales.dtype} on {scales.device}, but must be "
            f"{expected} torch.int32 on {pages.device}, each page contiguous"
        )


@triton.jit
def nearest_e4m3(x):  # type: ignore[no-untyped-def]
    """x, fp32 and not NaN -> the bytes of the nearest e4m3 numbers, ties to even, at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, e4m3 has steps of 2^-9, as fp32 has from 2^14 on: adding 2^14 rounds to them.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def scales_of(low, high, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales [n] of vectors given as two parts [n, D/2]: bf16 values as fp32. `kind` is the
    dtype of the codes."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    unsound = tl.maximum(_unsound(low), _unsound(high))
    top = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    is_sound = tl.max(unsound, axis=1) == 0
    top = tl.where(is_sound, top, 0.0)
    most: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    scales = tl.div_rn(top, tl.full(top.shape, most, tl.float32)).to(tl.bfloat16).to(tl.float32)
    return tl.where(is_sound, scales, float("nan"))


@triton.jit
def _unsound(x):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(x) < float("inf"), 0, 1)  # the comparison is false for a NaN


@triton.jit  # type: ignore[untyped-decorator]
def quantize(x, scales, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of x [n, any] with scales [n]."""
    is_usable = (scales > 0.0)[:, None]
    divisor = tl.broadcast_to(tl.where(is_usable, scales[:, None], 1.0), x.shape)
    quotient = tl.where(is_usable, tl.div_rn(x.to(tl.float32), divisor), 0.0)
    if kind == tl.int8:
        bounded = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
        # Adding 1.5 * 2^23 leaves no bits for a fraction, so it rounds to integers, ties to even.
        codes = ((bounded + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        codes = nearest_e4m3(quotient)
    return codes


@triton.jit
def pack_scales(k_scales, v_scales):  # type: ignore[no-untyped-def]
    """Two scales in one int32: K's bf16 in the lower half, V's in the upper half."""
    k_bits = k_scales.to(tl.uint32, bitcast=True) >> 16
    v_bits = v_scales.to(tl.uint32, bitcast=True) & 0xFFFF0000
    return (k_bits | v_bits).to(tl.int32, bitcast=True)


@triton.jit
def unpack_scales(pairs):  # type: ignore[no-untyped-def]
    """The scales of K and of V, fp32."""
    bits = pairs.to(tl.uint32, bitcast=True)
    k_scales = (bits << 16).to(tl.float32, bitcast=True)
    v_scales = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return k_scales, v_scales
