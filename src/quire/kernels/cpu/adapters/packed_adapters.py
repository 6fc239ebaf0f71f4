"""LoRA adapters of packed linears, in the layout that the native kernels read.

    h = round(scale * (A x)), y = round(round(W x + b) + B h)

with A, B and h in the model's dtype and both sums in fp32. `csrc/adapters` computes this together
with the linear. A linear's slots keep their addresses, so a recorded program sees adapters that are
loaded later. Called by `quire.adapters`; `linear.py` and `recorder.py` pass the structures to the
kernels.

Shapes: T rows of a step, r rank, K inputs and N outputs of a linear. C columns: the sum of the
ranks of a fused linear's parts (such as q, k and v). In bf16 each rank is rounded up to an even
number, since the bf16 instruction multiplies pairs.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from quire.kernels.cpu.adapters.adapters_abi import (
    AdapterGroup,
    AdapterLinear,
    AdapterPart,
    AdapterRows,
    AdapterSlot,
)
from quire.kernels.cpu.memory import allocate

UNIT = 16
"""The number of outputs or columns that are computed together."""
MAX_PARTS = 8
"""The largest number of parts of a fused linear."""
_LINE_BYTES = 64
_STEP_BYTES = 4
"""The number of bytes of one output's weights that one instruction multiplies."""

PartTensors = tuple[torch.Tensor, torch.Tensor, float]
"""A [r, K], B [outputs of the part, r], and the scale of A x."""


class PackedRows:
    """The adapter slot of each row of a step, for all linears of a model."""

    def __init__(self) -> None:
        self.struct = AdapterRows()
        self._slots = np.empty(0, np.int32)
        self._order = np.empty(0, np.int32)
        self._groups = (AdapterGroup * 0)()

    @property
    def num_tokens(self) -> int:
        """T, the number of rows."""
        return int(self.struct.num_tokens)

    def set(self, row_slots: torch.Tensor) -> None:
        """Set the slots of a step's rows [T] int32; -1 stands for no adapter."""
        slots = row_slots.numpy()
        if np.array_equal(slots, self._slots):
            return
        self._slots = slots.astype(np.int32)  # a copy
        used = np.flatnonzero(slots >= 0)
        self._order = used[np.argsort(slots[used], kind="stable")].astype(np.int32)
        found, counts = np.unique(slots[used], return_counts=True)
        firsts = np.cumsum(counts) - counts
        self._groups = (AdapterGroup * len(found))(
            *(AdapterGroup(*map(int, each), 0) for each in zip(found, firsts, counts, strict=True))
        )
        struct = self.struct
        struct.num_tokens, struct.num_groups = len(slots), len(found)
        struct.num_rows = len(used)
        struct.slots, struct.order = self._slots.ctypes.data, self._order.ctypes.data
        struct.groups = ctypes.addressof(self._groups)


class PackedAdapters:
    """The adapter slots of one linear. Slots take memory when they are filled."""

    def __init__(
        self,
        rows: PackedRows,
        num_inputs: int,
        part_sizes: Sequence[int],
        *,
        is_interleaved: bool,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        """`rows` are shared by all linears. `is_interleaved` says whether the outputs are gate and
        up, as in `PackedLinear`. `dtype` is the model's dtype."""
        assert 1 <= len(part_sizes) <= MAX_PARTS, part_sizes
        self.rows = rows
        self._num_inputs, self._sizes = num_inputs, tuple(part_sizes)
        self._is_interleaved, self._dtype, self._max_rank = is_interleaved, dtype, max_rank
        shape = _Shape(num_inputs, self._sizes, is_interleaved, max_rank, dtype)
        self._shape = shape
        self._a = allocate(num_slots * shape.a_bytes)
        self._b = allocate(num_slots * shape.b_bytes)
        self._keeps_a = self._keeps_b = True
        self._scales = torch.zeros(num_slots, shape.num_columns)
        self._parts = (AdapterPart * (num_slots * len(part_sizes)))()
        self._slots = (AdapterSlot * num_slots)()
        self._starts = (ctypes.c_int32 * (len(part_sizes) + 1))(*shape.starts)
        for index, slot in enumerate(self._slots):
            slot.scales = self._scales[index].data_ptr()
            first = index * len(part_sizes) * ctypes.sizeof(AdapterPart)
            slot.parts = ctypes.addressof(self._parts) + first
        self.struct = AdapterLinear(
            num_parts=len(part_sizes),
            max_columns=shape.num_columns,
            starts=ctypes.addressof(self._starts),
            rows=ctypes.addressof(rows.struct),
            slots=ctypes.addressof(self._slots),
            num_inputs=num_inputs,
        )

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all slots, without memory that belongs to other linears."""
        a_bytes = self._a.nbytes if self._keeps_a else 0
        b_bytes = self._b.nbytes if self._keeps_b else 0
        return a_bytes + b_bytes + self._scales.nbytes

    def share_a(self, other: "PackedAdapters") -> None:
        """Share the memory of A with `other`, a linear with the same number of inputs and parts.

        From then on both linears must be loaded with adapters that have the same A.
        """
        assert self._a.nbytes == other._a.nbytes
        self._a, self._keeps_a = other._a, False

    def share_b(self, other: "PackedAdapters") -> None:
        """Share the memory of B with `other`, a linear with parts of the same sizes.

        From then on both linears must be loaded with adapters that have the same B.
        """
        assert self._b.nbytes == other._b.nbytes and self._sizes == other._sizes
        self._b, self._keeps_b = other._b, False

    def check(self, num_inputs: int, num_outputs: int, x: torch.Tensor) -> None:
        """Raises ValueError if the adapters don't fit x [M, K] or the linear's sizes."""
        own = (self._num_inputs, sum(self._sizes))
        if own != (num_inputs, num_outputs) or x.dtype != self._dtype:
            raise ValueError(
                f"the adapters are for a linear with {own[0]} inputs and {own[1]} outputs in "
                f"{self._dtype}, but x is {tuple(x.shape)} {x.dtype}, for a linear with "
                f"{num_inputs} and {num_outputs}"
            )
        if len(x) != self.rows.num_tokens:
            raise ValueError(
                f"x has {len(x)} rows, but adapters were set for {self.rows.num_tokens}"
            )

    def followed_by(self, other: "PackedAdapters") -> None:
        """Set the linear that runs next in a step. Its A is prefetched during this linear's
        product.

        A wrong order makes the step slower, but does not change its results.
        """
        self.struct.next = ctypes.addressof(other.struct)

    def load(self, index: int, parts: Sequence[PartTensors | None]) -> None:
        """Fill a slot that no running step uses. Parts that are None get no adapter."""
        assert len(parts) == len(self._sizes)
        slot = self._slots[index]
        slot.num_columns = 0
        given = [part for part in parts if part is not None]
        if not given:
            return
        # First, A of all parts, unless another linear stores it.
        a_memory = self._a[index * self._shape.a_bytes :]
        b_memory = self._b[index * self._shape.b_bytes :]
        if self._keeps_a:
            columns = torch.cat([_whole_steps(a.to(self._dtype)) for a, _, _ in given])
            _copy_into(a_memory, 0, _pack(columns))
        slot.a = a_memory.data_ptr()
        # Then, B and the scale of each part.
        column = offset = 0
        for number, part in enumerate(parts):
            entry = self._parts[index * len(self._sizes) + number]
            entry.rank = 0
            if part is None:
                continue
            a, b, scaling = part
            assert len(a) <= self._max_rank, (len(a), self._max_rank)
            entry.column, entry.b = column, b_memory.data_ptr() + offset
            if self._keeps_b:
                _copy_into(b_memory, offset, self._pack_b(number, b.to(self._dtype)))
            offset += self._shape.part_bytes(number)
            end = column + _num_columns(len(a), self._dtype)
            self._scales[index, column:end] = scaling
            entry.rank = len(a)
            column = end
        self._scales[index, column:] = 0
        slot.num_columns = column

    def clear(self, index: int) -> None:
        """Empty the slot; rows with this slot then get no adapter."""
        self._slots[index].num_columns = 0

    def _pack_b(self, part: int, b: torch.Tensor) -> torch.Tensor:
        """b [outputs, r] -> [units, r/2, 16, 2] bf16 or [units, r, 16, 1] fp32."""
        lane = 0 if self._is_interleaved else self._shape.starts[part] % UNIT
        num_units = self._shape.num_units(part)
        wide = b.new_zeros(num_units * UNIT, b.shape[1])
        wide[lane : lane + len(b)] = b
        return _pack(wide)


class _Shape:
    """The size of one slot of a linear, with room for an adapter of rank `max_rank`."""

    def __init__(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        is_interleaved: bool,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self._sizes, self._is_interleaved = sizes, is_interleaved
        self.starts = [sum(sizes[:part]) for part in range(len(sizes) + 1)]
        max_columns = _num_columns(max_rank, dtype)
        self.num_columns = -(-len(sizes) * max_columns // UNIT) * UNIT
        per_step = _STEP_BYTES // dtype.itemsize
        self._unit_bytes = max_columns * UNIT * dtype.itemsize
        self.a_bytes = self.num_columns * -(-num_inputs // per_step) * _STEP_BYTES
        self.b_bytes = sum(map(self.part_bytes, range(len(sizes))))

    def part_bytes(self, part: int) -> int:
        """The number of bytes of a part's B."""
        return _whole_lines(self.num_units(part) * self._unit_bytes)

    def num_units(self, part: int) -> int:
        """The number of units (16 packed outputs each) that hold outputs of the part."""
        size, first = self._sizes[part], 0 if self._is_interleaved else self.starts[part]
        return (first + size - 1) // UNIT - first // UNIT + 1


def adapter_bytes(
    num_inputs: int,
    part_sizes: Sequence[int],
    *,
    is_interleaved: bool,
    num_slots: int,
    max_rank: int,
    dtype: torch.dtype,
    has_a: bool = True,
    has_b: bool = True,
) -> int:
    """The number of bytes that a `PackedAdapters` will have. `has_a` is False if the memory of A
    belongs to another linear; `has_b` likewise."""
    shape = _Shape(num_inputs, part_sizes, is_interleaved, max_rank, dtype)
    kept_bytes = shape.a_bytes * has_a + shape.b_bytes * has_b
    return num_slots * (kept_bytes + 4 * shape.num_columns)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


def _copy_into(memory: torch.Tensor, offset: int, numbers: torch.Tensor) -> None:
    num_bytes = numbers.numel() * numbers.element_size()
    target = memory[offset : offset + num_bytes].view(numbers.dtype)
    target.view(numbers.shape).copy_(numbers)


def _num_columns(rank: int, dtype: torch.dtype) -> int:
    """The rank, rounded up to a multiple of the columns that an instruction multiplies."""
    return -(-rank * dtype.itemsize // _STEP_BYTES) * _STEP_BYTES // dtype.itemsize


def _whole_steps(a: torch.Tensor) -> torch.Tensor:
    """a [r, K], padded with rows of zeros to `_num_columns` rows."""
    return functional.pad(a, (0, 0, 0, _num_columns(len(a), a.dtype) - len(a)))


def _pack(weights: torch.Tensor) -> torch.Tensor:
    """weights [N, K] -> [N/16, K/2, 16, 2] bf16 or [N/16, K, 16, 1] fp32, padded with zeros."""
    per_step = _STEP_BYTES // weights.dtype.itemsize
    num_units, num_steps = -(-len(weights) // UNIT), -(-weights.shape[1] // per_step)
    wide = weights.new_zeros(num_units * UNIT, num_steps * per_step)
    wide[: len(weights), : weights.shape[1]] = weights
    return wide.view(num_units, UNIT, num_steps, per_step).transpose(1, 2)
