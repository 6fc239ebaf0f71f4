"""A forward pass as a list of native operations, run every step.

`recorder.py` writes an `OperationList`; once it is complete its values get their memory, and
`Program.run` executes it in one call, so that no Python runs between a model's layers. Knows no
model and no layer.

Shapes: T tokens of a step, R rows that the caller gives, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import OpKind
from quire.kernels.cpu.adapters.packed_adapters import PackedRows
from quire.kernels.cpu.library import NativeKernels

ALIASED_BYTES = 4096
PADDING_BYTES = 64


@dataclass(frozen=True, slots=True)
class Program:
    """The finished list. output: [most tokens, width], where the last operation leaves its result.
    kept: what the operations point into. adapter_rows: which of them its linears' adapters are of,
    to be set before each run; None: there are no adapters."""

    kernels: NativeKernels
    ops: Any
    output: torch.Tensor
    kept: object
    adapter_rows: PackedRows | None = None

    def run(self, step: abi.Step) -> torch.Tensor:
        """The output of the step's tokens, [T, width], valid until the next run."""
        rows = self.adapter_rows
        assert rows is None or rows.num_tokens == step.num_tokens, "adapters are of another step"
        self.kernels.run(self.ops, len(self.ops), step)
        return self.output[: step.num_tokens]


@dataclass(frozen=True, slots=True)
class OperandPlace:
    """Where an operation says where an operand lies. offset_bytes: from the first column on."""

    op: abi.Op
    address: str
    stride: str
    offset_bytes: int

    def point_to(self, rows: torch.Tensor) -> None:
        """The operand is in these rows [R, width]."""
        setattr(self.op, self.address, rows.data_ptr() + self.offset_bytes)
        setattr(self.op, self.stride, rows.stride(0))


@dataclass(frozen=True, slots=True)
class RowsProgram:
    """A finished list that reads rows of the caller's: the vocabulary projection.

    given: where operations read the caller's rows. results: where they write and read the result's.
    width, dtype: of the result's rows.
    """

    kernels: NativeKernels
    ops: Any
    given: Sequence[OperandPlace]
    results: Sequence[OperandPlace]
    width: int
    dtype: torch.dtype
    kept: object
    step: abi.Step = field(default_factory=abi.Step)

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, H], no more than a step's tokens -> [R, width], which is the caller's."""
        out = torch.empty((len(rows), self.width), dtype=self.dtype)
        for place in self.given:
            place.point_to(rows)
        for place in self.results:
            place.point_to(out)
        self.step.num_tokens = len(rows)
        self.kernels.run(self.ops, len(self.ops), self.step)
        return out


@dataclass(slots=True, eq=False)
class Memory:
    """What a value is kept in, and all that are computed in place of it.

    role: memory of one role and width serves value after value. dense: a row begins where the one
    before it ends. is_given: the caller brings it, and nothing is written there.
    rows: [most tokens, width]; None until the list is finished.
    """

    role: str
    width: int
    dtype: torch.dtype
    dense: bool = False
    is_given: bool = False
    rows: torch.Tensor | None = None

    def allocate(self, num_rows: int) -> torch.Tensor:
        """Rows whose addresses are equal modulo ALIASED_BYTES share few lines of the cache: a
        linear reads them at 70% of the speed, and would copy them first. So they are padded."""
        is_aliased = self.width * self.dtype.itemsize % ALIASED_BYTES == 0
        padding = PADDING_BYTES // self.dtype.itemsize if is_aliased and not self.dense else 0
        rows = torch.empty((num_rows, self.width + padding), dtype=self.dtype)
        return rows[:, : self.width]


@dataclass(frozen=True, slots=True)
class Operand:
    """Columns [offset, offset + width) of what is in the memory, or num_heads such groups of
    columns, each beginning head_stride behind the one before it."""

    memory: Memory
    offset: int
    width: int
    num_heads: int = 1
    head_stride: int = 0

    @property
    def is_adjacent(self) -> bool:
        """Whether its columns lie side by side."""
        return self.num_heads == 1 or self.head_stride == self.width

    @property
    def is_whole(self) -> bool:
        """Whether these are all columns, in order."""
        return self.num_heads * self.width == self.memory.width and self.is_adjacent

    def place(self) -> tuple[int, int]:
        """The first element's address, and elements from a row to the next."""
        rows = self.memory.rows
        assert rows is not None, "the list is not finished"
        return rows.data_ptr() + self.offset_bytes, rows.stride(0)

    @property
    def offset_bytes(self) -> int:
        """From a row's first element to ours."""
        return self.offset * self.memory.dtype.itemsize


_FIELDS = {"x": "in", "second": "second", "third": "third", "out": "out"}
"""Operand -> what its fields of abi.Op begin with."""


@dataclass(slots=True)
class Operation:
    """fields: of abi.Op, beside what the operands say. kept: what they point into."""

    kind: OpKind
    x: Operand | None
    out: Operand
    fields: Mapping[str, Any] = field(default_factory=dict)
    kept: object = None
    second: Operand | None = None
    third: Operand | None = None

    def operands(self) -> dict[str, Operand]:
        """By the names of ours."""
        found = {"x": self.x, "second": self.second, "third": self.third, "out": self.out}
        return {name: operand for name, operand in found.items() if operand is not None}

    @property
    def memories(self) -> list[Memory]:
        """That it reads and writes."""
        return [operand.memory for operand in self.operands().values()]

    def reads(self, memory: Memory) -> bool:
        """Whether one of its inputs is in this memory."""
        inputs = (self.x, self.second, self.third)
        return any(operand is not None and operand.memory is memory for operand in inputs)

    def lower(self) -> abi.Op:
        """As the native library reads it."""
        op = abi.Op(kind=self.kind, **self.fields)
        op.dtype = op.out_dtype = abi.DTYPES[self.out.memory.dtype]
        op.num_heads = self.out.num_heads
        if self.x is not None:
            op.dtype = abi.DTYPES[self.x.memory.dtype]
        for name, operand in self.operands().items():
            address, stride = _address_and_stride(name)
            for field_name, value in zip((address, stride), operand.place(), strict=True):
                setattr(op, field_name, value)
            setattr(op, f"{_FIELDS[name]}_head_stride", operand.head_stride)
        return op

    def places(self, op: abi.Op, memory: Memory) -> list[OperandPlace]:
        """Where `op`, which was lowered from this, points into the memory."""
        return [
            OperandPlace(op, *_address_and_stride(name), operand.offset_bytes)
            for name, operand in self.operands().items()
            if operand.memory is memory
        ]


def _address_and_stride(name: str) -> tuple[str, str]:
    begin = _FIELDS[name]
    return "input" if begin == "in" else begin, f"{begin}_stride"


class OperationList(list[Operation]):
    """Operations in the order in which they will run."""

    def finish(self, kernels: NativeKernels, result: Memory, max_num_tokens: int) -> Program:
        """The program that leaves what its caller reads in `result`."""
        self._allocate(max_num_tokens, {result})
        assert result.rows is not None
        return Program(kernels, self._lowered(), result.rows, self._kept())

    def finish_rows(
        self, kernels: NativeKernels, given: Memory, result: Memory, max_num_tokens: int
    ) -> RowsProgram:
        """The program that reads its caller's rows for `given` and writes new ones for `result`."""
        for memory in (given, result):
            memory.rows = memory.allocate(0)  # each run brings its own
        self._allocate(max_num_tokens, set())
        ops = self._lowered()
        pairs = list(zip(self, ops, strict=True))
        return RowsProgram(
            kernels,
            ops,
            given=[place for op, native in pairs for place in op.places(native, given)],
            results=[place for op, native in pairs for place in op.places(native, result)],
            width=result.width,
            dtype=result.dtype,
            kept=self._kept(),
        )

    def _allocate(self, num_rows: int, results: set[Memory]) -> None:
        """Rows are used again once no operation reads what is in them, but for `results`."""
        last = {memory: index for index, op in enumerate(self) for memory in op.memories}
        pools: dict[tuple[object, ...], list[tuple[int, torch.Tensor]]] = {}
        for index, op in enumerate(self):
            for memory in op.memories:
                if memory.rows is not None:
                    continue
                pool = pools.setdefault((memory.role, memory.width, memory.dtype), [])
                spare = next((entry for entry in pool if entry[0] < index), None)
                if spare is not None:
                    pool.remove(spare)
                memory.rows = memory.allocate(num_rows) if spare is None else spare[1]
                if memory not in results:
                    pool.append((last[memory], memory.rows))

    def _lowered(self) -> Any:
        return (abi.Op * len(self))(*(op.lower() for op in self))

    def _kept(self) -> list[object]:
        return [(op.kept, [memory.rows for memory in op.memories]) for op in self]
