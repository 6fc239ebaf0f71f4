"""Device functions that convert codes of eight bits to bf16, fp16 or fp32, exactly.

Codes are int8, or e4m3 floats of 4 exponent and 3 mantissa bits (OCP 8-bit Floating Point
Specification; e4m3fn, without infinities), stored as uint8. They are converted by integer
arithmetic, since GPUs before sm_89 have no conversions. Every code is exact in bf16 and fp16; the
two NaNs of e4m3 become 480 and -480. Called by kernels that multiply pages or weights of codes.
"""

import triton
import triton.language as tl

from quire.kernels.triton.support import is_interpreting

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


@triton.jit  # type: ignore[untyped-decorator]
def widen(  # type: ignore[no-untyped-def]
    codes, dtype: tl.constexpr, IS_MOVABLE: tl.constexpr = False
):
    """Codes converted to `dtype`, exactly. Numbers that are not codes are returned unchanged.

    If IS_MOVABLE, the inline instructions are declared pure, so that Triton may move them after the
    change of layout for the tensor core. It would then read V, which is transposed there, byte by
    byte. But impure instructions can't be in a pipelined loop on sm_100.
    """
    if codes.dtype != tl.uint8 and codes.dtype != tl.int8:
        wide = codes
    elif dtype == tl.float32:
        wide = widen(codes, tl.bfloat16, IS_MOVABLE).to(tl.float32)
    elif IS_INTERPRETED:
        wide = _widen_each(codes, dtype)
    elif dtype == tl.float16:
        to_fp16: tl.constexpr = E4M3_TO_FP16 if codes.dtype == tl.uint8 else INT8_TO_FP16
        wide = tl.inline_asm_elementwise(to_fp16, "=r,=r,r", [codes], tl.float16, IS_MOVABLE, 4)
    else:
        to_bf16: tl.constexpr = E4M3_TO_BF16 if codes.dtype == tl.uint8 else INT8_TO_BF16
        wide = tl.inline_asm_elementwise(to_bf16, "=r,=r,r", [codes], tl.bfloat16, IS_MOVABLE, 4)
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
