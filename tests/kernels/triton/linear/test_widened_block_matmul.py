"""The PTX that makes fp32 numbers of codes, which the interpreter doesn't run, carried out.

Products are tested in tests/formats/block_quantized/test_triton_method.py.
"""

import random
import re
import struct

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.linear.test_block_quantized_layout import OPERATIONS

from quire.kernels.triton.linear.block_quantized_layout import BlockQuantizedWeight
from quire.kernels.triton.linear.widened_block_matmul import (
    BYTES_TO_FP32,
    HALVES_TO_FP32,
    tile_of,
    widened_block_matmul,
)

OPERATIONS = OPERATIONS | {"xor.b32": lambda a, b: a ^ b}


def _numbers(program: str, word: int, count: int) -> list[float]:
    """The fp32 numbers in the registers $0, $1, ... after a program whose input is `word`."""
    registers = {f"${count}": word}
    for name, operands in re.findall(r"(\w+\.[bu]32) ([^;]+);", program.replace(".reg .b32", "")):
        target, *given = operands.split(", ")
        values = [registers[each] if each in registers else int(each, 0) for each in given]
        registers[target] = OPERATIONS[name](*values)
    return [struct.unpack("f", struct.pack("I", registers[f"${at}"]))[0] for at in range(count)]


def test_codes_become_floats_with_a_bias() -> None:
    numbers = random.Random(5)
    for word in [numbers.getrandbits(32) for _ in range(50)] + [0xF7E6D5C4, 0xB3A29180]:
        codes = [word >> 8 * byte & 255 for byte in range(4)]
        halves = [code & 15 for code in codes] + [code >> 4 for code in codes]
        assert _numbers(HALVES_TO_FP32.value, word, 8) == [128.0 + half for half in halves]
        signed = [(code ^ 128) - 128 for code in codes]
        assert _numbers(BYTES_TO_FP32.value, word, 4) == [32896.0 + value for value in signed]


def test_all_rows_up_to_64_share_a_tile() -> None:
    assert [tile_of(rows).rows for rows in (9, 16, 17, 32, 33, 64, 128)] == [
        16,
        16,
        32,
        32,
        *[64] * 3,
    ]


def test_wrong_operands_are_named() -> None:
    weight = BlockQuantizedWeight(None, torch.zeros(2, 4, 128), torch.zeros(2, 1, 4), None)
    with pytest.raises(ValueError, match=r"x is \(9, 256\) torch.bfloat16, but weight has 2"):
        widened_block_matmul(torch.zeros(9, 256).bfloat16(), weight)
    with pytest.raises(ValueError, match=r"x is \(9, 512\) torch.float32, but .* must be one of"):
        widened_block_matmul(torch.zeros(9, 512), weight)
