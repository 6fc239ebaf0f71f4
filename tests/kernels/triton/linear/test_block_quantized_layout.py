"""How levels come apart on a GPU: the program that the interpreter has no use for, carried out."""

import random
import re

import pytest

pytest.importorskip("triton")

from tests.formats.block_quantized_samples import E2M1_TWICE

from quire.kernels.triton.linear.block_quantized_layout import ptx_of

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _permuted(first: int, second: int, selector: int) -> int:
    places = [selector >> 4 * place & 15 for place in range(4)]
    assert max(places) < 8, "the top bit repeats a sign"
    both = first | second << 32
    return sum((both >> 8 * place & 255) << 8 * at for at, place in enumerate(places))


def _chosen(a: int, b: int, c: int, table: int) -> int:
    """lop3: of each bit of the result, the bit of the table that the operands' bits number."""
    bits = ((a >> at & 1) << 2 | (b >> at & 1) << 1 | (c >> at & 1) for at in range(32))
    return sum((table >> index & 1) << at for at, index in enumerate(bits))


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "lop3.b32": _chosen,
}


def _carry_out(program: str, word: int) -> tuple[int, int]:
    registers = {"$2": word}
    for name, operands in re.findall(r"(\w+\.[bu]32) ([^;]+);", program.replace(".reg .b32", "")):
        target, *given = operands.split(", ")
        values = [registers[each] if each in registers else int(each, 0) for each in given]
        registers[target] = OPERATIONS[name](*values)
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("table", [None, E2M1_TWICE, IQ4], ids=["none", "e2m1", "iq4"])
def test_halves_are_entries_of_the_table(table: tuple[int, ...] | None) -> None:
    program = ptx_of(table)
    entries = table or tuple(range(16))
    numbers = random.Random(5)
    for word in [numbers.getrandbits(32) for _ in range(50)] + [0xF7E6D5C4, 0xB3A29180]:
        low, high = _carry_out(program, word)
        for byte in range(4):
            code = word >> 8 * byte & 255
            assert low >> 8 * byte & 255 == entries[code & 15] & 255
            assert high >> 8 * byte & 255 == entries[code >> 4] & 255
