"""Block-quantized weights of a checkpoint: codes with scales, and how they are dequantized.

A weight w of output n and input k, where k is in the group g of inputs, is one of

    scale[n, g] * (value(c[n, k]) - zero)             zero: one number, or zeros[n, g]
    scale[n, g] * value(c[n, k]) - offset[n, g]

where c is a non-negative code, and value(c) is c itself, the entry of a table with 16 entries, or
the float of 8 bits (e4m3) that c encodes. Scales and offsets are either floats, or small numbers
that are multiplied by factors. These are integers with factors that the groups of a block share
("super-blocks" in llama.cpp's k-quants), or e4m3 floats with a factor for each output (NVFP4).
Readers in `models.checkpoints` create these weights from files, and
`formats.block_quantized.linear_methods` multiplies them.

Shapes: R rows (outputs), I inputs, G groups, B blocks.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch


@dataclass(frozen=True, slots=True, repr=False)
class InputOrder:
    """An order of columns that differs from the order of the inputs, as in GPTQ's act-order."""

    #: The input of each column, a permutation, as bytes of int32 in the machine's byte order.
    content: bytes

    @classmethod
    def of(cls, inputs: torch.Tensor) -> "InputOrder":
        """Create the order from inputs [I], a permutation."""
        return cls(inputs.int().contiguous().view(torch.uint8).numpy().tobytes())

    def inputs(self) -> torch.Tensor:
        """The input of each column, [I] int32."""
        return torch.frombuffer(bytearray(self.content), dtype=torch.int32)

    def __repr__(self) -> str:
        """Differs between different orders, since it is a part of the weights' digest."""
        return f"InputOrder({hashlib.blake2b(self.content, digest_size=16).hexdigest()})"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The quantization of a tensor: the width of codes, and the numbers that groups share."""

    #: The name in messages, such as Q4_K.
    name: str

    #: Number of bits of a code: 4, 5, 6 or 8.
    width: int

    #: Number of inputs that share a scale; 0 if a whole row shares one.
    group_size: int

    #: The number subtracted from the values of all codes.
    zero: int = 0

    #: The value of each code; None if a code is its own value.
    table: tuple[int, ...] | None = None

    #: Whether each code is a float of 8 bits, float8_e4m3fn.
    is_float8: bool = False

    #: Whether each group has its own `zero`.
    has_zeros: bool = False

    #: Whether groups have offsets.
    has_offsets: bool = False

    #: Number of inputs that share factors; 0 if scales and offsets are floats of `scale_dtype`.
    block_size: int = 0

    scale_dtype: torch.dtype = torch.float16

    #: The order of the columns; None if it is the order of the inputs.
    input_order: InputOrder | None = None

    @property
    def alignment(self) -> int:
        """A slice of columns must begin and end at multiples of this number; 0 if rows can't be
        sliced."""
        if self.input_order is not None:
            return 0
        # Kernels take four inputs at a time if codes are floats of 8 bits.
        return self.block_size or self.group_size or (4 if self.is_float8 else 1)

    @property
    def has_output_factors(self) -> bool:
        """Whether scales are e4m3 floats, multiplied by a factor for each output."""
        return self.scale_dtype == torch.float8_e4m3fn

    @property
    def is_int8(self) -> bool:
        """Whether weights are int8 levels (code - 128) with one fp32 scale for each output, for
        products with int8 activations."""
        return self == BlockFormat(self.name, 8, 0, zero=128, scale_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class CodeWords:
    """Codes of rows, with several codes in each int32 word, as GPTQ and AWQ store them."""

    #: [A, B] int32. `order` says how rows and inputs are packed.
    words: torch.Tensor

    #: Number of bits of a code.
    width: int

    #: The object has only rows [first, first + count) of the rows in `words`.
    first: int
    count: int

    #: If None, a word packs 32 / width inputs of one row, from the lowest bits up, and A is I *
    #: width / 32. Otherwise a word packs one input of eight rows, in four bits each: row order[i]
    #: has the i-th lowest bits, and A is I.
    order: tuple[int, ...] | None = None

    @property
    def num_inputs(self) -> int:
        return len(self.words) * (32 // self.width if self.order is None else 1)

    def unpacked(self) -> torch.Tensor:
        """Unpack the codes to [count, I] uint8."""
        words = self.words.T.contiguous()
        if self.order is None:
            return unpack_inputs(words, self.width)[self.first : self.first + self.count]
        codes = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
        for place, row in enumerate(self.order):
            codes[:, row] = words.bitwise_right_shift(4 * place).bitwise_and_(15)
        return codes.flatten(0, 1)[self.first : self.first + self.count]


def unpack_inputs(words: torch.Tensor, width: int) -> torch.Tensor:
    """Unpack words [R, W] int32 or uint8 to new codes [R, W * bits / width] uint8. `width` is 4 or
    8; the first code is in the lowest bits."""
    packed = torch.empty(words.shape, dtype=words.dtype).copy_(words).view(torch.uint8)
    if width == 8:
        return packed
    codes = torch.empty(*packed.shape, 2, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[..., 0])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1])
    return codes.flatten(-2)


class BlockQuantizedRows(ABC):
    """Rows of a block-quantized tensor, valid only while the checkpoint that they view is open."""

    @property
    @abstractmethod
    def block_format(self) -> BlockFormat: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(R, I)."""

    @property
    @abstractmethod
    def stored(self) -> tuple[torch.Tensor, ...]:
        """All tensors that determine the dequantized weights, for a digest."""

    @property
    def blocks(self) -> tuple[str, torch.Tensor] | None:
        """(GGUF's type name, the rows' bytes [R, bytes] uint8 as stored), which kernels may read
        directly. None if the rows must be unpacked."""
        return None

    @abstractmethod
    def unpacked(self) -> "UnpackedRows":
        """The rows with one code per byte."""

    def numbers(self) -> torch.Tensor:
        """Dequantize to [R, I] fp32, as the file's format defines."""
        return self.unpacked().numbers()

    @abstractmethod
    def rows(self, start: int, stop: int) -> "BlockQuantizedRows":
        """Rows from `start` to `stop`, exclusive."""

    @abstractmethod
    def picked(self, rows: torch.Tensor) -> "BlockQuantizedRows":
        """The rows with these indices, int64."""

    def columns(self, start: int, stop: int) -> "BlockQuantizedRows":
        """Inputs [start, stop) of all rows, both multiples of the block format's alignment."""
        return self.unpacked().columns(start, stop)

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class UnpackedRows(BlockQuantizedRows):
    """Block-quantized rows in memory, with one code per byte."""

    # Without `field()`, the inherited property would be the default.
    block_format: BlockFormat = field()

    #: [R, I] uint8.
    codes: torch.Tensor

    #: [R, G], floats, or int8 if there are factors.
    scales: torch.Tensor

    #: [R, G] uint8; None if the block format has no zeros.
    zeros: torch.Tensor | None = None

    #: [R, G], floats, or uint8 if there are factors; None if the block format has no offsets.
    offsets: torch.Tensor | None = None

    #: [R, B, 2] fp16: each block's factor of scales, then its factor of offsets, which is zero
    #: without offsets. [R, 1, 1] fp32 with `has_output_factors`. None without factors.
    factors: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, inputs = self.codes.shape
        return rows, inputs

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        found = (self.codes, self.scales, self.zeros, self.offsets, self.factors)
        return tuple(tensor for tensor in found if tensor is not None)

    def unpacked(self) -> "UnpackedRows":
        return self

    def numbers(self) -> torch.Tensor:
        """Dequantize to [R, I] fp32. Each operation rounds once."""
        block_format, rows = self.block_format, len(self.codes)
        values = self.values().float()
        groups = self.scales.shape[1]
        values = values.view(rows, groups, -1)
        if self.zeros is not None:
            values = values - self.zeros.float()[..., None]
        scales, offsets = self.float_scales(), self.float_offsets()
        numbers = scales[..., None] * (values - block_format.zero if block_format.zero else values)
        if offsets is not None:
            numbers = numbers - offsets[..., None]
        numbers = numbers.view(rows, -1)
        if block_format.input_order is None:
            return numbers
        inputs = block_format.input_order.inputs().to(numbers.device, torch.int64)
        return torch.empty_like(numbers).index_copy_(1, inputs, numbers)

    def values(self) -> torch.Tensor:
        """The values of the codes, [R, I] int16 or float8_e4m3fn, before zeros are subtracted."""
        if self.block_format.is_float8:
            return self.codes.view(torch.float8_e4m3fn)
        if self.block_format.table is None:
            return self.codes.short()
        table = torch.tensor(self.block_format.table, dtype=torch.int16, device=self.codes.device)
        return table[self.codes.int()]

    def float_scales(self) -> torch.Tensor:
        """The scales multiplied by their factors, [R, G] fp32."""
        return self._scaled(self.scales, 0)

    def float_offsets(self) -> torch.Tensor | None:
        """The offsets multiplied by their factors, [R, G] fp32; None without offsets."""
        return None if self.offsets is None else self._scaled(self.offsets, 1)

    def _scaled(self, of_groups: torch.Tensor, which: int) -> torch.Tensor:
        numbers = of_groups.float()
        if self.factors is None:
            return numbers
        rows, blocks, _ = self.factors.shape
        factors = self.factors[:, :, which, None].float()
        return (factors * numbers.view(rows, blocks, -1)).view(rows, -1)

    def rows(self, start: int, stop: int) -> "UnpackedRows":
        return self.mapped(lambda tensor: tensor[start:stop])

    def picked(self, rows: torch.Tensor) -> "UnpackedRows":
        return self.mapped(lambda tensor: tensor[rows])

    def columns(self, start: int, stop: int) -> "UnpackedRows":
        width, alignment = self.codes.shape[1], self.block_format.alignment
        assert alignment and not start % alignment and not stop % alignment, self.block_format

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            count = tensor.shape[1]
            return tensor[:, start * count // width : -(-stop * count // width)]

        return self.mapped(cut)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "UnpackedRows":
        """A copy with `change` applied to each tensor."""
        changed = {
            each.name: change(value)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), torch.Tensor)
        }
        return UnpackedRows(self.block_format, **changed)


class WordRows(BlockQuantizedRows):
    """Rows whose codes are packed in words. Kernels may unpack the words and pass the codes to
    `with_codes`. `complete` adds scales, zeros and offsets to unpacked codes [R, I] uint8."""

    def __init__(
        self,
        words: CodeWords,
        block_format: BlockFormat,
        complete: Callable[[torch.Tensor], UnpackedRows],
    ) -> None:
        self._words, self._block_format, self._complete = words, block_format, complete

    @property
    def block_format(self) -> BlockFormat:
        return self._block_format

    @property
    def shape(self) -> tuple[int, int]:
        return self._words.count, self._words.num_inputs

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.unpacked().stored

    @property
    def words(self) -> CodeWords:
        return self._words

    def with_codes(self, codes: torch.Tensor) -> UnpackedRows:
        """The result of `unpacked()`, given the codes unpacked from `words`, [R, I] uint8."""
        return self._complete(codes)

    def unpacked(self) -> UnpackedRows:
        return self.with_codes(self._words.unpacked())

    def rows(self, start: int, stop: int) -> UnpackedRows:
        return self.unpacked().rows(start, stop)

    def picked(self, rows: torch.Tensor) -> UnpackedRows:
        return self.unpacked().picked(rows)
