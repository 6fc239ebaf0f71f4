"""Weights that a checkpoint holds as codes: what their numbers are, and rows of them.

A weight w of output n and input k, in the group g of inputs that k is in, is one of

    scale[n, g] * (value(c[n, k]) - zero)             zero: one number, or zeros[n, g]
    scale[n, g] * value(c[n, k]) - offset[n, g]

where c is a code, not below 0, and value(c) is c itself or an entry of a table of sixteen. Scales
and offsets are 16-bit floats of their own, or integers that are multiplied by factors which a block
of several groups shares (llama.cpp's k-quants: "super-blocks"). `formats.coded` multiplies what is
kept so; readers in `models.checkpoints` bring it. Knows no files and no linears.

Shapes: R rows (outputs), I inputs, G groups, B blocks.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True, repr=False)
class InputOrder:
    """Columns in another order than the inputs, as GPTQ's act-order leaves them."""

    #: The input that each column meets, each once: int32 in the machine's byte order.
    content: bytes

    @classmethod
    def of(cls, inputs: torch.Tensor) -> "InputOrder":
        """inputs [I], a permutation."""
        return cls(inputs.int().contiguous().view(torch.uint8).numpy().tobytes())

    def inputs(self) -> torch.Tensor:
        """[I] int32."""
        return torch.frombuffer(bytearray(self.content), dtype=torch.int32)

    def __repr__(self) -> str:
        """Equal for equal ones alone: it becomes a part of the weights' digest."""
        return f"InputOrder({hashlib.blake2b(self.content, digest_size=16).hexdigest()})"


@dataclass(frozen=True, slots=True)
class Coding:
    """How a tensor's numbers are held."""

    #: As messages call the coding, such as Q4_K.
    name: str

    #: Bits that hold a code: 4, 5, 6 or 8.
    width: int

    #: Inputs that share a scale; 0: all of a row.
    group_size: int

    #: Subtracted from the values of all codes.
    zero: int = 0

    #: Values of the codes; None: a code is its own value.
    table: tuple[int, ...] | None = None

    #: Whether each group has its own `zero`.
    has_zeros: bool = False

    #: Whether groups have offsets.
    has_offsets: bool = False

    #: Inputs that share factors; 0: scales and offsets are floats of `scale_dtype`.
    block_size: int = 0

    scale_dtype: torch.dtype = torch.float16

    #: Order of the columns; None: the order of the inputs.
    input_order: InputOrder | None = None

    @property
    def alignment(self) -> int:
        """Inputs that are kept or left together where columns are cut; 0: all of a row are."""
        return 0 if self.input_order is not None else self.block_size or self.group_size or 1

    @property
    def is_int8(self) -> bool:
        """Whether these are int8 levels (code - 128) with one fp32 scale for each output, which are
        multiplied by activations of eight bits."""
        return self == Coding(self.name, 8, 0, zero=128, scale_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of codes, one in a byte."""

    coding: Coding

    #: [R, I] uint8.
    codes: torch.Tensor

    #: [R, G], floats, or int8 where there are factors.
    scales: torch.Tensor

    #: [R, G] uint8; None where the coding has no zeros.
    zeros: torch.Tensor | None = None

    #: [R, G], floats, or uint8 where there are factors; None where the coding has no offsets.
    offsets: torch.Tensor | None = None

    #: [R, B, 2] fp16: each block's factor of scales, then its factor of offsets, which is zero
    #: without offsets. None where the coding has no blocks.
    factors: torch.Tensor | None = None

    def numbers(self) -> torch.Tensor:
        """[R, I] fp32, each operation rounded once."""
        coding, rows = self.coding, len(self.codes)
        values = self.values().float()
        groups = self.scales.shape[1]
        values = values.view(rows, groups, -1)
        if self.zeros is not None:
            values = values - self.zeros.float()[..., None]
        scales, offsets = self.float_scales(), self.float_offsets()
        numbers = scales[..., None] * (values - coding.zero if coding.zero else values)
        if offsets is not None:
            numbers = numbers - offsets[..., None]
        numbers = numbers.view(rows, -1)
        if coding.input_order is None:
            return numbers
        inputs = coding.input_order.inputs().to(numbers.device, torch.int64)
        return torch.empty_like(numbers).index_copy_(1, inputs, numbers)

    def values(self) -> torch.Tensor:
        """[R, I] int16, before anything is subtracted."""
        if self.coding.table is None:
            return self.codes.short()
        table = torch.tensor(self.coding.table, dtype=torch.int16, device=self.codes.device)
        return table[self.codes.int()]

    def float_scales(self) -> torch.Tensor:
        """[R, G] fp32."""
        return self._scaled(self.scales, 0)

    def float_offsets(self) -> torch.Tensor | None:
        """[R, G] fp32, or None."""
        return None if self.offsets is None else self._scaled(self.offsets, 1)

    def _scaled(self, of_groups: torch.Tensor, which: int) -> torch.Tensor:
        numbers = of_groups.float()
        if self.factors is None:
            return numbers
        rows, blocks, _ = self.factors.shape
        factors = self.factors[:, :, which, None].float()
        return (factors * numbers.view(rows, blocks, -1)).view(rows, -1)

    def rows(self, start: int, stop: int) -> "Codes":
        """Rows [start, stop) of these."""
        return self.mapped(lambda tensor: tensor[start:stop])

    def columns(self, start: int, stop: int) -> "Codes":
        """Inputs [start, stop), both multiples of the coding's alignment."""
        width, alignment = self.codes.shape[1], self.coding.alignment
        assert alignment and not start % alignment and not stop % alignment, self.coding

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            count = tensor.shape[1]
            return tensor[:, start * count // width : -(-stop * count // width)]

        return self.mapped(cut)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Codes":
        """With each of the tensors changed."""
        changed = {
            each.name: change(value)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), torch.Tensor)
        }
        return Codes(self.coding, **changed)


@dataclass(frozen=True, slots=True)
class CodeWords:
    """Codes of rows that lie several in a word, as GPTQ and AWQ store them."""

    #: [A, B] int32, the words of a row side by side.
    words: torch.Tensor

    #: Bits of a code.
    width: int

    #: The rows that are meant begin here in the words, and are `count`.
    first: int
    count: int

    #: None: a word has 32 / width inputs of one row, from the lowest bits up, and A is
    #: I * width / 32. Else a word has eight rows of one input, four bits each: row order[i] has the
    #: i-th lowest bits, and A is I.
    order: tuple[int, ...] | None = None

    @property
    def num_inputs(self) -> int:
        return len(self.words) * (32 // self.width if self.order is None else 1)

    def unpacked(self) -> torch.Tensor:
        """[count, I] uint8."""
        words = self.words.T.contiguous()
        if self.order is None:
            return unpack_inputs(words, self.width)[self.first : self.first + self.count]
        codes = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
        for place, row in enumerate(self.order):
            codes[:, row] = words.bitwise_right_shift(4 * place).bitwise_and_(15)
        return codes.flatten(0, 1)[self.first : self.first + self.count]


def unpack_inputs(words: torch.Tensor, width: int) -> torch.Tensor:
    """words [R, W] int32 or uint8, packed from the lowest bits up -> codes [R, W * bits / width]
    uint8, of memory of their own. width: 4 or 8."""
    packed = torch.empty(words.shape, dtype=words.dtype).copy_(words).view(torch.uint8)
    if width == 8:
        return packed
    codes = torch.empty(*packed.shape, 2, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[..., 0])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1])
    return codes.flatten(-2)


class CodedRows(ABC):
    """Some rows of a coded tensor, as they are lent: valid as long as what they were read from."""

    @property
    @abstractmethod
    def coding(self) -> Coding: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(R, I)."""

    @property
    @abstractmethod
    def stored(self) -> tuple[torch.Tensor, ...]:
        """All that determines the numbers, as it is stored, for a digest."""

    @property
    def blocks(self) -> tuple[str, torch.Tensor] | None:
        """The name of the blocks' type and the blocks of a GGUF file's rows, [R, bytes] uint8,
        which kernels may read as they are; None: there is no more than `codes`."""
        return None

    @abstractmethod
    def codes(self) -> Codes: ...

    def numbers(self) -> torch.Tensor:
        """[R, I] fp32: what the format says that they are."""
        return self.codes().numbers()

    @abstractmethod
    def rows(self, start: int, stop: int) -> "CodedRows":
        """Rows [start, stop) of these."""

    @abstractmethod
    def picked(self, rows: torch.Tensor) -> "CodedRows":
        """rows [any] int64 -> those of these rows."""

    def columns(self, start: int, stop: int) -> "CodedRows":
        """Inputs [start, stop) of all rows, both multiples of the coding's alignment."""
        return PlainCodedRows(self.codes().columns(start, stop))

    def __len__(self) -> int:
        return self.shape[0]


class PlainCodedRows(CodedRows):
    """Made of tensors that are there already."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes

    @property
    def coding(self) -> Coding:
        return self._codes.coding

    @property
    def shape(self) -> tuple[int, int]:
        rows, inputs = self._codes.codes.shape
        return rows, inputs

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        codes = self._codes
        found = (codes.codes, codes.scales, codes.zeros, codes.offsets, codes.factors)
        return tuple(tensor for tensor in found if tensor is not None)

    def codes(self) -> Codes:
        return self._codes

    def rows(self, start: int, stop: int) -> "PlainCodedRows":
        return PlainCodedRows(self._codes.rows(start, stop))

    def picked(self, rows: torch.Tensor) -> "PlainCodedRows":
        return PlainCodedRows(self._codes.mapped(lambda tensor: tensor[rows]))


class WordRows(CodedRows):
    """Rows whose codes share words, which kernels may unpack for `with_codes`. complete: codes [R,
    I] uint8, as they lie in the words -> the rows with all that belongs to them. coding: theirs."""

    def __init__(
        self, words: CodeWords, coding: Coding, complete: Callable[[torch.Tensor], Codes]
    ) -> None:
        self._words, self._coding, self._complete = words, coding, complete

    @property
    def coding(self) -> Coding:
        return self._coding

    @property
    def shape(self) -> tuple[int, int]:
        return self._words.count, self._words.num_inputs

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return PlainCodedRows(self.codes()).stored

    @property
    def words(self) -> CodeWords:
        return self._words

    def with_codes(self, codes: torch.Tensor) -> Codes:
        """`codes()`. codes: those of `words`, unpacked, [R, I] uint8."""
        return self._complete(codes)

    def codes(self) -> Codes:
        return self.with_codes(self._words.unpacked())

    def rows(self, start: int, stop: int) -> PlainCodedRows:
        return PlainCodedRows(self.codes()).rows(start, stop)

    def picked(self, rows: torch.Tensor) -> PlainCodedRows:
        return PlainCodedRows(self.codes()).picked(rows)
