"""A forward pass as a list of native operations, run every step.

`recorder.py` writes an `OperationList`. When the list is complete, its values get their memory, and
`Program.run` executes it in one call, so that no Python runs between a model's layers.

Shapes: T tokens of a step, R rows that the caller gives, H hidden size.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import OpKind
from quire.kernels.cpu.adapters.packed_adapters import PackedRows
from quire.kernels.cpu.library import NativeKernels

ALIASED_BYTES = 4096
PADDING_BYTES = 64


@dataclass(frozen=True, slots=True)
class PutPlace:
    """A place in a program at which a caller's rows may replace rows of a value, or be added."""

    #: The operations from this place to the next one, in the memory of `Program.ops`.
    behind: Any
    #: [most tokens, width], the memory of the value.
    rows: torch.Tensor
    #: The first of the columns of the caller's rows that are put or added here.
    first: int
    #: Whether the rows are added to those of the value instead of replacing them.
    adds: bool

    def put(self, index: torch.Tensor, given: torch.Tensor) -> None:
        """Put or add the caller's rows [N, W] at index [N]."""
        new = given[:, self.first : self.first + self.rows.shape[1]].to(self.rows.dtype)
        self.rows.index_copy_(0, index, self.rows[index] + new if self.adds else new)


@dataclass(frozen=True, slots=True)
class Program:
    """A finished list of operations over a step's tokens."""

    kernels: NativeKernels
    #: An array of abi.Op.
    ops: Any
    #: [most tokens, width], the memory of the result.
    output: torch.Tensor
    #: The objects to which operations point, kept alive.
    kept: object
    #: The operations before the first of `put_places`, in the memory of `ops`.
    before: Any
    #: In their order. Empty if the recorded model puts no rows.
    put_places: Sequence[PutPlace] = ()
    #: The adapter slot of each row of a step, set before each run; None if there are no adapters.
    adapter_rows: PackedRows | None = None

    def run(
        self, step: abi.Step, put: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The output of the step's tokens, [T, width], valid until the next run.

        `put` are the index and the rows of `Operators.put_rows` and `add_rows`.
        """
        rows = self.adapter_rows
        assert rows is None or rows.num_tokens == step.num_tokens, "adapters are of another step"
        if put is None:
            self.kernels.run(self.ops, len(self.ops), step)
            return self.output[: step.num_tokens]
        assert self.put_places, "the recorded model puts no rows"
        self.kernels.run(self.before, len(self.before), step)
        for place in self.put_places:
            place.put(*put)
            self.kernels.run(place.behind, len(place.behind), step)
        return self.output[: step.num_tokens]


@dataclass(frozen=True, slots=True)
class OperandPlace:
    """The fields of an operation that hold the address and the stride of an operand."""

    op: abi.Op
    address: str
    stride: str
    #: The number of bytes from a row's first column to the operand.
    offset_bytes: int

    def point_to(self, rows: torch.Tensor) -> None:
        """Set the operand to columns of these rows [R, width]."""
        setattr(self.op, self.address, rows.data_ptr() + self.offset_bytes)
        setattr(self.op, self.stride, rows.stride(0))


@dataclass(frozen=True, slots=True)
class RowsProgram:
    """A finished list of operations over rows that the caller gives: the vocabulary projection, or
    a part of a layer of an encoder of images."""

    kernels: NativeKernels
    ops: Any
    #: For each of the caller's arguments, the operands that are its rows.
    given: Sequence[Sequence[OperandPlace]]
    #: The operands that are the result's rows.
    results: Sequence[OperandPlace]
    #: The width and dtype of the result's rows.
    width: int
    dtype: torch.dtype
    kept: object
    step: abi.Step = field(default_factory=abi.Step)

    def run(self, *rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """rows [R, H], at most as many as a step's tokens -> [R, width], `out` or a new tensor. All
        have contiguous columns, and one number of rows."""
        if out is None:
            out = self.empty(len(rows[0]))
        for given, places in zip(rows, self.given, strict=True):
            for place in places:
                place.point_to(given)
        for place in self.results:
            place.point_to(out)
        self.step.num_tokens = len(out)
        self.kernels.run(self.ops, len(self.ops), self.step)
        return out

    def empty(self, num_rows: int) -> torch.Tensor:
        """Memory for a result."""
        return torch.empty((num_rows, self.width), dtype=self.dtype)


@dataclass(slots=True, eq=False)
class Memory:
    """The memory of a value, and of values computed in place of it."""

    #: The use of the value. Values of equal role, width and dtype may use the same rows, one after
    #: the other.
    role: str
    width: int
    dtype: torch.dtype
    #: Whether rows must follow each other without padding.
    dense: bool = False
    #: Whether the caller gives the rows, which are never written to.
    is_given: bool = False
    #: [most tokens, width]; None until the list is finished.
    rows: torch.Tensor | None = None

    def allocate(self, num_rows: int) -> torch.Tensor:
        """New rows, padded if their addresses would be equal modulo ALIASED_BYTES.

        Without padding, such rows would compete for few lines of the cache. A linear would read
        them at 70% of the speed, and would therefore copy them first.
        """
        is_aliased = self.width * self.dtype.itemsize % ALIASED_BYTES == 0
        padding = PADDING_BYTES // self.dtype.itemsize if is_aliased and not self.dense else 0
        rows = torch.empty((num_rows, self.width + padding), dtype=self.dtype)
        return rows[:, : self.width]


@dataclass(frozen=True, slots=True)
class Operand:
    """Columns [offset, offset + width) of a memory's rows, or num_heads such groups of columns that
    begin head_stride columns apart."""

    memory: Memory
    offset: int
    width: int
    num_heads: int = 1
    head_stride: int = 0

    @property
    def is_adjacent(self) -> bool:
        """Whether the columns are contiguous."""
        return self.num_heads == 1 or self.head_stride == self.width

    @property
    def is_whole(self) -> bool:
        """Whether the operand has all columns of the memory, in order."""
        return self.num_heads * self.width == self.memory.width and self.is_adjacent

    def place(self) -> tuple[int, int]:
        """The first element's address, and the stride of rows in elements."""
        rows = self.memory.rows
        assert rows is not None, "the list is not finished"
        return rows.data_ptr() + self.offset_bytes, rows.stride(0)

    @property
    def offset_bytes(self) -> int:
        """The number of bytes from a row's first element to the operand."""
        return self.offset * self.memory.dtype.itemsize


SpareRows = dict[tuple[object, ...], list[torch.Tensor]]
"""The rows of programs by role, width and dtype of the values that have used them."""

_FIELDS = {"x": "in", "second": "second", "third": "third", "out": "out"}
"""The prefix of each operand's fields in abi.Op."""


@dataclass(slots=True)
class Operation:
    """A recorded operation, before its operands have memory."""

    kind: OpKind
    x: Operand | None
    out: Operand
    #: The fields of abi.Op that the operands don't determine.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: The objects to which the fields point, kept alive.
    kept: object = None
    second: Operand | None = None
    third: Operand | None = None

    def operands(self) -> dict[str, Operand]:
        """The operands that the operation has, by their names."""
        found = {"x": self.x, "second": self.second, "third": self.third, "out": self.out}
        return {name: operand for name, operand in found.items() if operand is not None}

    @property
    def memories(self) -> list[Memory]:
        """The memory that the operation reads and writes."""
        return [operand.memory for operand in self.operands().values()]

    def reads(self, memory: Memory) -> bool:
        """Whether one of the operation's inputs is in this memory."""
        inputs = (self.x, self.second, self.third)
        return any(operand is not None and operand.memory is memory for operand in inputs)

    def lower(self) -> abi.Op:
        """The structure for the native library."""
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
        """The operands of `op` that are in this memory. `op` is the result of `lower`."""
        return [
            OperandPlace(op, *_address_and_stride(name), operand.offset_bytes)
            for name, operand in self.operands().items()
            if operand.memory is memory
        ]


def _part(ops: Any, first: int, end: int) -> Any:
    """Operations [first, end) of an array, in the array's memory."""
    return (abi.Op * (end - first)).from_buffer(ops, first * ctypes.sizeof(abi.Op))


def _address_and_stride(name: str) -> tuple[str, str]:
    begin = _FIELDS[name]
    return "input" if begin == "in" else begin, f"{begin}_stride"


@dataclass(frozen=True, slots=True)
class NotedPlace:
    """A `PutPlace` before its value has memory."""

    #: The number of operations before it.
    num_before: int
    memory: Memory
    first: int
    adds: bool


class OperationList(list[Operation]):
    """Operations in the order in which they will run."""

    def __init__(self) -> None:
        super().__init__()
        #: The places at which a caller's rows may be put, in ascending order.
        self.put_places: list[NotedPlace] = []

    @property
    def last(self) -> Operation | None:
        """The last operation, if a change of it still changes what follows. It does not if the
        caller's rows may be put into its result."""
        num_fixed = self.put_places[-1].num_before if self.put_places else 0
        return self[-1] if len(self) > num_fixed else None

    def finish(self, kernels: NativeKernels, result: Memory, max_num_tokens: int) -> Program:
        """The program whose output is `result`."""
        self._allocate(max_num_tokens, {result})
        assert result.rows is not None
        ops, noted = self._lowered(), self.put_places
        bounds = [0, *(place.num_before for place in noted), len(self)]
        before, *pieces = (_part(ops, first, end) for first, end in pairwise(bounds))
        places = []
        for place, behind in zip(noted, pieces, strict=True):
            assert place.memory.rows is not None
            places.append(PutPlace(behind, place.memory.rows, place.first, place.adds))
        return Program(kernels, ops, result.rows, self._kept(), before, places)

    def finish_rows(
        self,
        kernels: NativeKernels,
        given: Sequence[Memory],
        result: Memory,
        max_num_tokens: int,
        spare: SpareRows | None = None,
    ) -> RowsProgram:
        """The program that reads its caller's rows for `given` and writes new ones for `result`.

        `spare` has the rows of other programs, and gets those of this one. The programs that share
        it may not run at the same time.
        """
        for memory in (*given, result):
            memory.rows = memory.allocate(0)  # each run sets its own rows
        self._allocate(max_num_tokens, set(), spare)
        ops = self._lowered()
        pairs = list(zip(self, ops, strict=True))
        return RowsProgram(
            kernels,
            ops,
            given=[
                [place for op, native in pairs for place in op.places(native, memory)]
                for memory in given
            ],
            results=[place for op, native in pairs for place in op.places(native, result)],
            width=result.width,
            dtype=result.dtype,
            kept=self._kept(),
        )

    def _allocate(
        self, num_rows: int, results: set[Memory], spare: SpareRows | None = None
    ) -> None:
        """Allocate the rows of all values. Rows that no later operation uses are reused for another
        value, except the rows of `results`."""
        last = {memory: index for index, op in enumerate(self) for memory in op.memories}
        pools: dict[tuple[object, ...], list[tuple[int, torch.Tensor]]] = {}
        for key, found in (spare or {}).items():
            pools[key] = [(-1, rows) for rows in found]
        for index, op in enumerate(self):
            for memory in op.memories:
                if memory.rows is not None:
                    continue
                pool = pools.setdefault((memory.role, memory.width, memory.dtype), [])
                unused = next((entry for entry in pool if entry[0] < index), None)
                if unused is not None:
                    pool.remove(unused)
                memory.rows = memory.allocate(num_rows) if unused is None else unused[1]
                if memory not in results:
                    pool.append((last[memory], memory.rows))
        if spare is not None:
            spare |= {key: [rows for _, rows in pool] for key, pool in pools.items()}

    def _lowered(self) -> Any:
        return (abi.Op * len(self))(*(op.lower() for op in self))

    def _kept(self) -> list[object]:
        return [(op.kept, [memory.rows for memory in op.memories]) for op in self]
