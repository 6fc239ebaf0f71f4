"""The values of a recording: placeholders that a model computes with, and the memory of each.

Called by `operator_recorder.py` and `recorder.py`.
"""

import math
from dataclasses import dataclass

import torch

from quire.kernels.cpu.program import Memory, Operand

_PLACEHOLDER_TOKENS = 2


class UnrecordableError(Exception):
    """A model's `forward` computes a value for which there is no native operation."""


@dataclass(slots=True, eq=False)
class Value:
    """The result of an operation."""

    #: [2, width], the placeholder that the model gets.
    rows: torch.Tensor
    memory: Memory
    #: Whether a later operation overwrites the value.
    is_overwritten: bool = False


class Values:
    """The values of one recording, found by their placeholders and by views of placeholders."""

    def __init__(self) -> None:
        #: The placeholders of a step's token ids and positions.
        self.token_ids = torch.zeros(_PLACEHOLDER_TOKENS, dtype=torch.int64)
        self.positions = torch.zeros(_PLACEHOLDER_TOKENS, dtype=torch.int64)
        self._by_storage: dict[int, Value] = {}

    def new(self, memory: Memory) -> Value:
        """A new value in this memory."""
        rows = torch.empty((_PLACEHOLDER_TOKENS, memory.width), dtype=memory.dtype)
        value = self._by_storage[rows.untyped_storage().data_ptr()] = Value(rows, memory)
        return value

    def in_place_of(self, tensor: torch.Tensor) -> Value:
        """A new value that overwrites another value, which may not be read afterwards."""
        if not self.is_replaceable(tensor):
            raise UnrecordableError("a part of a value, or the caller's rows, would be overwritten")
        replaced = self._by_storage[tensor.untyped_storage().data_ptr()]
        replaced.is_overwritten = True
        return self.new(replaced.memory)

    def is_replaceable(self, tensor: torch.Tensor) -> bool:
        """Whether a new value may overwrite this one. The caller's rows are never overwritten."""
        operand = self.operand(tensor)
        return operand.is_whole and not operand.memory.is_given

    def over(self, x: torch.Tensor) -> torch.Tensor:
        """A placeholder of x's shape for a new value that overwrites x."""
        return self.in_place_of(x).rows.view(x.shape)

    def like(self, x: torch.Tensor, role: str, width: int | None = None) -> torch.Tensor:
        """A placeholder of x's shape and dtype in new memory; `width` replaces x's last size."""
        shape = (*x.shape[:-1], x.shape[-1] if width is None else width)
        return self.new(Memory(role, math.prod(shape[1:]), x.dtype)).rows.view(shape)

    def over_or_like(self, x: torch.Tensor, role: str) -> torch.Tensor:
        """The result of `over` if x is a complete value, which may not be read afterwards; else of
        `like`."""
        return self.over(x) if self.is_replaceable(x) else self.like(x, role)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """The operand for a placeholder or a view of one.

        A view may be columns [T, width], or groups of columns [T, ..., width] at equal distances.
        """
        value = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if value is None:
            raise UnrecordableError(
                "an operator reads a tensor that no recorded operator has computed"
            )
        if value.is_overwritten:
            raise UnrecordableError("an operator reads a value that another has overwritten")
        is_of_tokens = tensor.dim() > 1 and tensor.shape[0] == _PLACEHOLDER_TOKENS
        if not is_of_tokens or tensor.stride(0) != value.memory.width:
            raise UnrecordableError("an operator's operand is not a row for each token")
        width, num_heads, head_stride = tensor.shape[-1], 1, 0
        if width > 1 and tensor.stride(-1) != 1:
            raise UnrecordableError("an operator's columns are not contiguous")
        # From the last dimension to the first, the groups of columns must have equal distances.
        for size, stride in reversed(
            list(zip(tensor.shape[1:-1], tensor.stride()[1:-1], strict=True))
        ):
            if size == 1:
                continue
            if num_heads > 1 and stride != num_heads * head_stride:
                raise UnrecordableError("an operator's heads are not equally spaced")
            head_stride = head_stride or stride
            num_heads *= size
        return Operand(value.memory, int(tensor.storage_offset()), width, num_heads, head_stride)

    def has(self, tensor: object) -> bool:
        """Whether `tensor` is a placeholder, or a view of one."""
        if tensor is self.token_ids or tensor is self.positions:
            return True
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.untyped_storage().data_ptr() in self._by_storage
        )
