"""The values of a recording: placeholders that a model computes with, and where each will lie.

Called by `operator_recorder.py` and `recorder.py`.
"""

from dataclasses import dataclass

import torch

from quire.kernels.cpu.program import Memory, Operand

_PLACEHOLDER_TOKENS = 2


class UnrecordableError(Exception):
    """`forward` computes something for which there is no native operation."""


@dataclass(slots=True, eq=False)
class Value:
    """What an operation computes. rows: the placeholder that the model gets for it, [2, width].
    is_overwritten: another value was computed in its memory."""

    rows: torch.Tensor
    memory: Memory
    is_overwritten: bool = False


class Values:
    """The values of one recording, found by their placeholders and by views of these.

    token_ids, positions: placeholders of a step's.
    """

    def __init__(self) -> None:
        self.token_ids = torch.zeros(_PLACEHOLDER_TOKENS, dtype=torch.int64)
        self.positions = torch.zeros(_PLACEHOLDER_TOKENS, dtype=torch.int64)
        self._by_storage: dict[int, Value] = {}

    def new(self, memory: Memory) -> Value:
        """A value in this memory."""
        rows = torch.empty((_PLACEHOLDER_TOKENS, memory.width), dtype=memory.dtype)
        value = self._by_storage[rows.untyped_storage().data_ptr()] = Value(rows, memory)
        return value

    def in_place_of(self, tensor: torch.Tensor) -> Value:
        """A value that is computed where another is, which is not read afterwards."""
        if not self.operand(tensor).is_whole:
            raise UnrecordableError("a part of a value is replaced")
        replaced = self._by_storage[tensor.untyped_storage().data_ptr()]
        replaced.is_overwritten = True
        return self.new(replaced.memory)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """Where the value is of which this is a placeholder, or some columns of one."""
        value = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if value is None or tensor.dim() != 2 or tensor.stride(1) != 1:
            raise UnrecordableError("an operator is given what no operator has computed")
        if value.is_overwritten:
            raise UnrecordableError("an operator is given what another has overwritten")
        return Operand(value.memory, int(tensor.storage_offset()), tensor.shape[1])

    def has(self, tensor: object) -> bool:
        """Whether it is a placeholder, or a view of one."""
        if tensor is self.token_ids or tensor is self.positions:
            return True
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.untyped_storage().data_ptr() in self._by_storage
        )
