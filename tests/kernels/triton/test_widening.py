"""Codes of eight bits, over all values: widened as torch does it."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from quire.attention.quantized_kv import FP8, INT8
from quire.kernels.triton import widening
from quire.kernels.triton.attention.quantized_kv import CODE_DTYPES
from quire.kernels.triton.widening import widen

FORMATS = (INT8, FP8)


@triton.jit
def _widen(codes_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    codes = tl.load(codes_ptr + at)
    tl.store(out_ptr + at, widen(codes, out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codes", FORMATS)
def test_every_code_is_widened_exactly(codes, dtype):
    every = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, dtype=dtype)
    _widen[(1,)](every.view(CODE_DTYPES[codes.name]), out, N=256)
    expected = every.view(codes.keys.dtype).double()
    is_number = ~expected.isnan()
    assert is_number.sum() == (256 if codes is INT8 else 254)
    assert torch.equal(out.double()[is_number], expected[is_number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codes", FORMATS)
def test_the_instructions_that_widen_four_codes_do_so(codes, dtype):
    """The interpreter can't run them, so they are carried out here."""
    every = torch.arange(256).to(torch.uint8)
    four = torch.stack([every, every.roll(7), every.flip(0), every.roll(101)], dim=1)
    name = {"int8": "INT8", "fp8": "E4M3"}[codes.name]
    asm = getattr(widening, f"{name}_TO_{'BF16' if dtype == torch.bfloat16 else 'FP16'}").value
    registers = carry_out(asm, words_of(four), dtype)
    found = torch.stack([registers["$0"], registers["$1"]], dim=1).to(torch.int32).view(dtype)
    expected = four.view(codes.keys.dtype).double()
    is_number = ~expected.isnan()
    assert torch.equal(found.double()[is_number], expected[is_number])


def words_of(four):
    """[n, 4] bytes -> [n] words of 32 bits, the first byte lowest."""
    return (four.long() << torch.tensor([0, 8, 16, 24])).sum(1)


def carry_out(asm, word, dtype):
    """The registers after instructions on 32 bits; halves are numbers of dtype."""
    values = {"$2": word}

    def halves(bits):
        return bits.to(torch.int32).view(dtype).view(-1, 2).double()

    def packed(numbers):
        return numbers.to(dtype).view(torch.int32).view(-1).long() & 0xFFFFFFFF

    def chosen_bytes(a, b, selector):
        both = torch.stack([(w >> (8 * at)) & 0xFF for w in (a, b) for at in range(4)])
        picks = [(int(selector[0]) >> (4 * place)) & 7 for place in range(4)]
        return sum(both[pick] << (8 * place) for place, pick in enumerate(picks))

    meanings = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "xor.b32": lambda a, b: a ^ b,
        "shr.b32": lambda a, b: a >> b,
        "prmt.b32": chosen_bytes,
        "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[int(table[0])],
        "add.rn.f16x2": lambda a, b: packed(halves(a) + halves(b)),
        "mul.rn.f16x2": lambda a, b: packed(halves(a) * halves(b)),
        "fma.rn.bf16x2": lambda a, b, c: packed(halves(a) * halves(b) + halves(c)),
    }
    for line in asm.strip("{} \n").splitlines()[1:]:
        operation, _, operands = line.strip().rstrip(";").partition(" ")
        target, *names = operands.split(", ")
        given = [
            values[name] if name in values else torch.full_like(word, int(name, 0))
            for name in names
        ]
        values[target] = meanings[operation](*given)
    return values
