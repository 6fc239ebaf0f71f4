"""The formats of block-quantized weights that native kernels multiply, and their GGUF block types.

`csrc/block_quantized/layout.h` has the formula.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import DTYPES, WeightLayout

BLOCK_SIZE = 256
FLAT_WIDTHS = (4, 5, 8)
FLAT_GROUPS = (32, 64, 128)
TWO_LEVEL_FORMS = ((4, 16), (4, 32), (5, 32), (6, 16))
"""(width, group size) of the supported formats with blocks."""


@dataclass(frozen=True, slots=True)
class KernelBlockFormat:
    """The format of a linear's codes. `abi.h` explains the fields (struct CodeFormat)."""

    width: int
    group_size: int
    zero: int = 0
    block: int = 0
    scale_dtype: torch.dtype = torch.float16
    has_zeros: bool = False
    has_offsets: bool = False
    #: The sixteen values of four-bit codes, from -128 to 127; None if codes are their own values.
    table: tuple[int, ...] | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether the native library has kernels for this format."""
        if self.table is not None and (self.width != 4 or len(self.table) != 16):
            return False
        if self.has_zeros and (self.has_offsets or self.zero or self.block or self.table):
            return False
        if self.block:
            is_known = (self.width, self.group_size) in TWO_LEVEL_FORMS
            return (
                self.block == BLOCK_SIZE and is_known and (not self.table or self.group_size > 16)
            )
        is_half = self.scale_dtype in (torch.float16, torch.bfloat16)
        return self.width in FLAT_WIDTHS and self.group_size in FLAT_GROUPS and is_half


class BlockType(NamedTuple):
    """A type of blocks in GGUF files."""

    #: ggml's number of the type.
    number: int
    #: The number of inputs in a block.
    size: int
    num_bytes: int


BLOCK_TYPES = {
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
    "IQ4_NL": BlockType(20, 32, 18),
    "IQ4_XS": BlockType(23, 256, 136),
    "MXFP4": BlockType(39, 32, 17),
}
"""The GGUF block types that `BlockQuantizedLinear.pack_blocks` supports, by their names."""


def code_format_struct(
    form: KernelBlockFormat, table: torch.Tensor | None, dtype: torch.dtype
) -> abi.CodeFormat:
    """The structure of a format. `dtype` is the dtype of unpacked rows.

    The caller keeps `table` [16] int8 alive.
    """
    return abi.CodeFormat(
        width=form.width,
        zero=form.zero,
        block=form.block,
        has_bf16=form.scale_dtype is torch.bfloat16,
        has_zeros=form.has_zeros,
        has_offsets=form.has_offsets,
        row_dtype=DTYPES[dtype],
        table=None if table is None else table.data_ptr(),
    )


def weights_struct(
    form: KernelBlockFormat, code_format: abi.CodeFormat, num_outputs: int, num_inputs: int
) -> abi.Weights:
    """The structure of a linear whose memory is not allocated yet. The caller keeps `code_format`
    alive."""
    return abi.Weights(
        format=WeightLayout.BLOCK_QUANTIZED,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        group_size=form.group_size,
        code_format=ctypes.addressof(code_format),
    )
