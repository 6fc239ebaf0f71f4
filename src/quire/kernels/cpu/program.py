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
from quire.kernels.cpu.library import NativeKernels

ALIASED_BYTES = 4096
PADDING_BYTES = 64


@dataclass(frozen=True, slots=True)
class Program:
    """The finished list. output: [most tokens, width], where the last operation leaves its result.
    kept: what the operations point into."""

    kernels: NativeKernels
    ops: Any
    output: torch.Tensor
    kept: object

    def run(self, step: abi.Step) -> torch.Tensor:
        """The output of the step's tokens, [T, width], valid until the next run."""
        self.kernels.run(self.ops, len(self.ops), step)
        return self.output[: step.num_tokens]


@dataclass(frozen=True, slots=True)
class RowsProgram:
    """A finished list that reads rows of the caller's: the vocabulary projection.

    ops: the operations at `reads` read the caller's rows, those at `writes` write the result, those
    at `rereads` read what is there of the result. width, dtype: of the result's rows.
    """

    kernels: NativeKernels
    ops: Any
    reads: Sequence[abi.Op]
    writes: Sequence[abi.Op]
    rereads: Sequence[abi.Op]
    width: int
    dtype: torch.dtype
    kept: object
    step: abi.Step = field(default_factory=abi.Step)

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, H], no more than a step's tokens -> [R, width], which is the caller's."""
        out = torch.empty((len(rows), self.width), dtype=self.dtype)
        address = out.data_ptr()
        for op in self.reads:
            op.input, op.in_stride = rows.data_ptr(), rows.stride(0)
        for op in self.writes:
            op.out, op.out_stride = address, self.width
        for op in self.rereads:
            op.input, op.in_stride = address, self.width
        self.step.num_tokens = len(rows)
        self.kernels.run(self.ops, len(self.ops), self.step)
        return out


@dataclass(slots=True, eq=False)
class Memory:
    """What a value is kept in, and all that are computed in place of it.

    role: memory of one role and width serves value after value. dense: a row begins where the one
    before it ends. rows: [most tokens, width]; None until the list is finished.
    """

    role: str
    width: int
    dtype: torch.dtype
    dense: bool = False
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
    """Columns [offset, offset + width) of what is in the memory."""

    memory: Memory
    offset: int
    width: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all columns."""
        return self.width == self.memory.width

    def place(self) -> tuple[int, int]:
        """The first element's address, and elements from a row to the next."""
        rows = self.memory.rows
        assert rows is not None, "the list is not finished"
        return rows.data_ptr() + self.offset * rows.element_size(), rows.stride(0)


@dataclass(slots=True)
class Operation:
    """fields: of abi.Op, beside what the operands say. kept: what they point into."""

    kind: OpKind
    x: Operand | None
    out: Operand
    fields: Mapping[str, Any] = field(default_factory=dict)
    kept: object = None

    @property
    def memories(self) -> list[Memory]:
        """That it reads and writes."""
        return [operand.memory for operand in (self.x, self.out) if operand is not None]

    def reads(self, memory: Memory) -> bool:
        """Whether its x is in this memory."""
        return self.x is not None and self.x.memory is memory

    def lower(self) -> abi.Op:
        """As the native library reads it."""
        op = abi.Op(kind=self.kind, **self.fields)
        op.dtype = op.out_dtype = abi.DTYPES[self.out.memory.dtype]
        op.out, op.out_stride = self.out.place()
        if self.x is not None:
            op.dtype = abi.DTYPES[self.x.memory.dtype]
            op.input, op.in_stride = self.x.place()
        return op


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
            reads=[native for op, native in pairs if op.reads(given)],
            writes=[native for op, native in pairs if op.out.memory is result],
            rereads=[native for op, native in pairs if op.reads(result)],
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
