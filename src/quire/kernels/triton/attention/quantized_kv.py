"""Quantizes K and V vectors to 8-bit codes, and converts codes to floats, in Triton.

K and V of a token are stored, for each KV head, as one code for each element and one scale for each
vector. With a vector x and the largest code `most` (127 for int8, 448 for e4m3):

    scale = bf16(max |x| / most),   code = nearest(x / scale)        number = code * scale

`attention.quantized_kv` says what follows from this, and is the reference, to the bit.

int8 has codes from -127 to 127. K may be rotated first (`rotation.hadamard`). e4m3 codes are 8-bit
floats of 4 exponent and 3 mantissa bits (OCP 8-bit Floating Point Specification; e4m3fn, without
infinities), stored as uint8. They are converted by integer arithmetic, since GPUs before sm_89 have
no conversions. Every code is exact in bf16 and fp16.

`rotary_kv_write.py` quantizes with these functions, and `paged_attention.py` converts codes back.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import is_interpreting

#: The dtype of the codes in the kernels' pages, by the name of a KV format.
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}

IS_INTERPRETED = tl.constexpr(is_interpreting())

# PTX that widens the four codes of one register to two registers of two floats each. Compiled code
# would extract the bytes one by one, with two to three times as many instructions.
INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 low, sign, a, b, c, d, one;
    and.b32 low, $2, 0x7F7F7F7F;
    and.b32 sign, $2, 0x80808080;
    prmt.b32 a, low, 0x43434343, 0x4140;
    prmt.b32 b, low, 0x43434343, 0x4342;
    prmt.b32 c, sign, 0xC3C3C3C3, 0x4140;
    prmt.b32 d, sign, 0xC3C3C3C3, 0x4342;
    mov.b32 one, 0x3F803F80;
    fma.rn.bf16x2 $0, a, one, c;
    fma.rn.bf16x2 $1, b, one, d;
}""")
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 raised, a, b, bias;
    xor.b32 raised, $2, 0x80808080;
    prmt.b32 a, raised, 0x64646464, 0x4140;
    prmt.b32 b, raised, 0x64646464, 0x4342;
    mov.b32 bias, 0xE480E480;
    add.rn.f16x2 $0, a, bias;
    add.rn.f16x2 $1, b, bias;
}""")
E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, power, zero;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 c, a, 0x80008000;
    and.b32 d, b, 0x80008000;
    shr.b32 a, a, 4;
    shr.b32 b, b, 4;
    lop3.b32 a, a, 0x07F007F0, c, 0xEA;
    lop3.b32 b, b, 0x07F007F0, d, 0xEA;
    mov.b32 power, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 $0, a, power, zero;
    fma.rn.bf16x2 $1, b, power, zero;
}""")
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, power;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 c, a, 0x80008000;
    and.b32 d, b, 0x80008000;
    shr.b32 a, a, 1;
    shr.b32 b, b, 1;
    lop3.b32 a, a, 0x3F803F80, c, 0xEA;
    lop3.b32 b, b, 0x3F803F80, d, 0xEA;
    mov.b32 power, 0x5C005C00;
    mul.rn.f16x2 $0, a, power;
    mul.rn.f16x2 $1, b, power;
}""")


@dataclass(frozen=True, slots=True)
class KVPages:
    """A layer's K and V of all blocks."""

    #: [N, 2, Hkv, B, D] of any page stride, K then V. The dtype is the model's dtype, or that of
    #: CODE_DTYPES.
    numbers: torch.Tensor
    #: The scales of codes, [N, Hkv, B] int32 of any page stride; `pack_scales` packs a token's
    #: scales of K and V in one int32. None means that the numbers are not codes.
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


@triton.jit  # type: ignore[untyped-decorator]
def widen(codes, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes converted to `dtype`, exactly. Numbers that are not codes are returned unchanged.

    The inline instructions are declared impure (`False`). Otherwise Triton would move them after
    the change of layout for the tensor core, and read V, which is transposed there, byte by byte.
    """
    if codes.dtype != tl.uint8 and codes.dtype != tl.int8:
        wide = codes
    elif dtype == tl.float32:
        wide = widen(codes, tl.bfloat16).to(tl.float32)
    elif IS_INTERPRETED:
        wide = _widen_each(codes, dtype)
    elif dtype == tl.float16:
        to_fp16: tl.constexpr = E4M3_TO_FP16 if codes.dtype == tl.uint8 else INT8_TO_FP16
        wide = tl.inline_asm_elementwise(to_fp16, "=r,=r,r", [codes], tl.float16, False, 4)
    else:
        to_bf16: tl.constexpr = E4M3_TO_BF16 if codes.dtype == tl.uint8 else INT8_TO_BF16
        wide = tl.inline_asm_elementwise(to_bf16, "=r,=r,r", [codes], tl.bfloat16, False, 4)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def _widen_each(codes, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same results as the PTX, in Triton's own operations."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        sign = (bits & 0x80) << 8
        # Exponents are biased by 7 in e4m3, 15 in fp16 and 127 in bf16; the product corrects that,
        # and is exact for subnormal numbers too.
        if dtype == tl.float16:
            wide = (sign | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        else:
            narrow = (sign | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
            power = tl.full(codes.shape, 0x7B80, tl.uint16).to(tl.bfloat16, bitcast=True)  # 2^120
            wide = narrow * power
    else:
        bits = codes.to(tl.uint8, bitcast=True).to(tl.uint16)
        if dtype == tl.float16:
            wide = (0x6400 | (bits ^ 0x80)).to(tl.float16, bitcast=True) - 1152.0  # 1024 + 128
        else:
            low = (0x4300 | (bits & 0x7F)).to(tl.bfloat16, bitcast=True)  # 128 and seven bits
            bias = (0x4300 | (bits & 0x80)).to(tl.bfloat16, bitcast=True)  # 128, or 256 below 0
            wide = low - bias
    return wide


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
