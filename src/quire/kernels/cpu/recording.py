"""The base of recorders: a recording's values and operations, and methods that add operations.

`recorder.py` explains recording.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from quire.kernels.cpu.abi import OpKind
from quire.kernels.cpu.program import Memory, Operand, Operation, OperationList
from quire.kernels.cpu.recorded_values import UnrecordableError, Value, Values


class Recording:
    """The base class of recorders of operators, of attention and of states."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` is the model's dtype."""
        self._dtype = dtype
        self._values = Values()
        self._ops = OperationList()

    def _pair(self, x: torch.Tensor, other: torch.Tensor) -> tuple[Operand, Operand]:
        """The operands of `x` and `other`, which must have one dtype and equally many heads."""
        first, second = self._values.operand(x), self._values.operand(other)
        if first.memory.dtype != second.memory.dtype or first.num_heads != second.num_heads:
            raise UnrecordableError("an operator's two operands differ in dtype or heads")
        return first, second

    def _weight_of(self, operand: Operand, weight: torch.Tensor) -> int:
        """The address of a parameter with one element for each element of the operand."""
        if operand.memory.dtype != self._dtype or weight.shape != (operand.width,):
            raise UnrecordableError("a weight's dtype or shape does not fit its operand")
        return self._dense(weight)

    def _new(self, role: str, width: int, dtype: torch.dtype | None = None) -> Value:
        return self._values.new(Memory(role, width, dtype or self._dtype))

    def _dense(self, parameter: torch.Tensor) -> int:
        """The address of a parameter in the model's dtype."""
        if parameter.dtype != self._dtype or not parameter.is_contiguous():
            raise UnrecordableError(f"a parameter is {parameter.dtype}, or not contiguous")
        return parameter.data_ptr()

    def _add(
        self,
        kind: OpKind,
        x: Operand | None,
        out: Value,
        fields: Mapping[str, Any],
        kept: object = None,
    ) -> None:
        whole = Operand(out.memory, 0, out.memory.width)
        self._ops.append(Operation(kind, x, whole, fields, kept))

    def _compute(
        self,
        kind: OpKind,
        x: Operand,
        out: torch.Tensor,
        fields: Mapping[str, Any],
        second: Operand | None = None,
        kept: object = None,
    ) -> None:
        self._ops.append(Operation(kind, x, self._values.operand(out), fields, kept, second))


def address_of(struct: ctypes.Structure) -> int:
    """The address of a structure, which must outlive all pointers to it."""
    return ctypes.addressof(struct)
