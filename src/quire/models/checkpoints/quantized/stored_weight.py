"""A linear's quantized weight, stored in several tensors.

This module holds what all methods share: codes with a scale for each group of inputs, and the
checks of tensors. The module of each method unpacks its tensors.

Shapes: O outputs, I inputs, R rows (outputs), G groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from quire.errors import CheckpointError
from quire.formats.block_quantized.weights import (
    BlockFormat,
    BlockQuantizedRows,
    CodeWords,
    InputOrder,
    UnpackedRows,
    WordRows,
)
from quire.hub.model_files import shown_name
from quire.models.checkpoints.safetensors_files import SafetensorsFiles

SCALES = (torch.float16, torch.bfloat16, torch.float32)
_GROUP_SIZES = (128, 64, 32)
"""Group sizes that kernels support. A larger group is presented as several groups of the first of
these sizes that divides it, with equal scales."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one linear in the files. Each is checked before it is read."""

    files: SafetensorsFiles
    #: The prefix of the tensors' names: X for X.qweight and X.scales.
    module: str

    def name(self, part: str) -> str:
        return f"{self.module}.{part}"

    def has(self, part: str) -> bool:
        return self.name(part) in self.files.names

    def shape(self, part: str, dtypes: Sequence[torch.dtype], num_dimensions: int) -> list[int]:
        """The tensor's shape. Raises CheckpointError for a tensor that is missing or empty, or has
        another dtype or number of dimensions."""
        name = self.name(part)
        if name not in self.files.names:
            raise CheckpointError(
                f"the weights have tensors of {shown_name(self.module)}, but not"
                f" {shown_name(name)}; the download is not whole: fetch it again"
            )
        shape, dtype = self.files.shape(name), self.files.stored_dtype(name)
        if dtype not in dtypes:
            wanted = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            found = str(dtype).removeprefix("torch.")
            raise _broken(name, f"is stored as {found}, but must be {wanted}")
        if len(shape) != num_dimensions or not all(shape):
            raise _broken(
                name, f"has the shape {list(shape)}, but must have {num_dimensions} dimensions"
            )
        return list(shape)

    def check(self, part: str, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> list[int]:
        """The tensor's shape. Raises CheckpointError unless it is one of `shapes`."""
        found = self.files.shape(self.name(part)) if self.has(part) else shapes[0]
        found = list(self.shape(part, dtypes, len(found)))
        if found not in [list(shape) for shape in shapes]:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise _broken(self.name(part), f"has the shape {found}, but must have {wanted}")
        return found

    def dtype(self, part: str) -> torch.dtype:
        dtype = self.files.stored_dtype(self.name(part))
        assert dtype is not None
        return dtype

    def rows(self, part: str, span: range) -> AbstractContextManager[torch.Tensor]:
        """Yields rows in their stored dtype."""
        return self.files.stored_rows(self.name(part), span)

    def whole(self, part: str) -> AbstractContextManager[torch.Tensor]:
        """Yields the whole tensor."""
        return self.rows(part, range((self.files.shape(self.name(part)) or (1,))[0]))

    def copy_rows(self, part: str, span: range) -> torch.Tensor:
        """A copy of some rows."""
        with self.rows(part, span) as lent:
            return lent.clone()

    def copy(self, part: str) -> torch.Tensor:
        """A copy of a small tensor."""
        with self.whole(part) as lent:
            return lent.clone()


def _broken(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the weights' tensor {shown_name(name)} {reason}; the download is not whole, or"
        " config.json describes another model"
    )


class StoredWeight(ABC):
    """A quantized weight. Its rows can be read dequantized, and as codes if it has a block
    format."""

    #: The format's name in messages.
    kind: str
    #: (O, I)
    shape: tuple[int, int]

    @property
    @abstractmethod
    def block_format(self) -> BlockFormat | None:
        """The block format of rows that are read as codes; None if rows can only be read
        dequantized."""

    def codes(self, span: range) -> UnpackedRows:
        """Some rows as codes, if the weight has a block format."""
        raise NotImplementedError

    @contextmanager
    def quantized_rows(self, span: range) -> Iterator[BlockQuantizedRows]:
        """Yields some rows as codes, if the weight has a block format."""
        yield self.codes(span)

    @abstractmethod
    def numbers(self, span: range) -> torch.Tensor:
        """Dequantize some rows to [R, I] fp32."""


class GroupedWeight(StoredWeight):
    """A weight of unsigned codes, with a scale and a zero for each group of inputs."""

    #: Number of bits of a code.
    width: int
    #: The shared zero of the groups; None if each group has its own zero.
    zero: int | None
    #: Maps each code to its value; None if the value is the code itself.
    table: tuple[int, ...] | None = None
    num_groups: int
    scale_dtype: torch.dtype

    @abstractmethod
    def read_codes(self, span: range) -> torch.Tensor:
        """The codes of some rows: [R, I] uint8."""

    @abstractmethod
    def read_scales(self, span: range) -> torch.Tensor:
        """The scales of some rows: [R, G]."""

    def read_zeros(self, span: range) -> torch.Tensor:
        """The zeros of some rows, if `zero` is None: [R, G] uint8."""
        raise NotImplementedError

    def read_group_index(self) -> torch.Tensor | None:
        """The group of each input, from 0 to G - 1: [I] int64. None if groups are contiguous and of
        equal size."""
        return None

    @cached_property
    def _groups(self) -> "_Groups | None":
        """The groups of the block format; None if the stored groups have unequal sizes."""
        return _arrange(self.read_group_index(), self.shape[1], self.num_groups)

    @cached_property
    def block_format(self) -> BlockFormat | None:
        groups = self._groups
        # A block format needs 16-bit scales and a group size that kernels support.
        if groups is None or groups.size is None or self.scale_dtype is torch.float32:
            return None
        return BlockFormat(
            self.kind,
            self.width,
            groups.size,
            zero=self.zero or 0,
            table=self.table,
            has_zeros=self.zero is None,
            scale_dtype=self.scale_dtype,
            input_order=groups.order,
        )

    def codes(self, span: range) -> UnpackedRows:
        return self._complete(span, self.read_codes(span))

    def _complete(self, span: range, codes: torch.Tensor) -> UnpackedRows:
        """Complete the `codes` of the rows `span` with their scales and zeros."""
        block_format, groups = self.block_format, self._groups
        assert block_format is not None and groups is not None and groups.size is not None
        scales = self.read_scales(span)
        zeros = self.read_zeros(span) if self.zero is None else None
        if groups.order is not None:
            codes = codes[:, groups.order.inputs().long()]
        repeats = self.shape[1] // (groups.size * self.num_groups)
        if repeats > 1:
            scales = scales.repeat_interleave(repeats, 1)
            zeros = None if zeros is None else zeros.repeat_interleave(repeats, 1)
        return UnpackedRows(block_format, codes, scales, zeros)

    def numbers(self, span: range) -> torch.Tensor:
        if self.block_format is not None:
            return self.codes(span).numbers()
        # Without a block format, find the scale of each input by the index of its group.
        index = self.read_group_index()
        if index is None:
            index = torch.arange(self.shape[1]) // (self.shape[1] // self.num_groups)
        values = self.read_codes(span).float()
        if self.table is not None:
            values = torch.tensor(self.table, dtype=torch.float32)[values.int()]
        if self.zero is None:
            values -= self.read_zeros(span).float()[:, index]
        elif self.zero:
            values -= self.zero
        return values.mul_(self.read_scales(span).float()[:, index])


class WordWeight(GroupedWeight):
    """A weight with several codes packed in each word of the stored tensor."""

    @abstractmethod
    def lent_words(self, span: range) -> AbstractContextManager[CodeWords]:
        """Yields the codes of some rows."""

    def read_codes(self, span: range) -> torch.Tensor:
        with self.lent_words(span) as words:
            return words.unpacked()

    @contextmanager
    def quantized_rows(self, span: range) -> Iterator[BlockQuantizedRows]:
        assert self.block_format is not None
        with self.lent_words(span) as words:
            yield WordRows(words, self.block_format, partial(self._complete, span))


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a weight's block format, which may be smaller than the stored groups."""

    #: Number of inputs in a group; None if no supported size divides the stored groups.
    size: int | None
    #: The order of the columns; None if columns have the order of the inputs.
    order: InputOrder | None


def _arrange(index: torch.Tensor | None, num_inputs: int, num_groups: int) -> _Groups | None:
    """The groups of the block format; None if the stored groups have unequal sizes. `index` is the
    group of each input, or None if groups are contiguous."""
    if num_inputs % num_groups:
        return None
    size = num_inputs // num_groups
    presented = next((each for each in _GROUP_SIZES if size % each == 0), None)
    if index is None or torch.equal(index, torch.arange(num_inputs) // size):
        return _Groups(presented, None)
    if not (index.bincount(minlength=num_groups) == size).all():
        return None
    return _Groups(presented, InputOrder.of(index.argsort(stable=True)))
