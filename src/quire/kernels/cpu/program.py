"""A forward pass as a list of native operations, written once and walked through at every step.

`ProgramBuilder` is what the layers' `lower` methods write to; `Program.run` executes the list in
one call, so no Python runs between a model's layers. Knows no model and no layer.

Shapes: T tokens of a step, H hidden size, Hq query heads, Hkv KV heads, D head size.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import Epilogue, OpKind
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear

ALIASED_BYTES = 4096
PADDING_BYTES = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows that operations read and write; the first T of them in a step. rows: [tokens, width]."""

    rows: torch.Tensor

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @property
    def stride(self) -> int:
        """Elements from a row to the next."""
        return self.rows.stride(0)

    @property
    def address(self) -> int:
        return self.rows.data_ptr()


@dataclass(frozen=True, slots=True)
class Program:
    """The finished list. output: where the last operation leaves its result. kept: what it uses."""

    kernels: NativeKernels
    ops: Any
    num_ops: int
    output: Buffer
    kept: Sequence[object]

    def run(self, step: abi.Step) -> torch.Tensor:
        """The output of the step's tokens, [T, width], valid until the next run."""
        self.kernels.run(self.ops, self.num_ops, step)
        return self.output.rows[: step.num_tokens]


class ProgramBuilder:
    """Writes operations in the order in which they will run.

    Buffers are named, so that layer after layer uses the same memory: a name that is asked for
    again is overwritten.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        dtype: torch.dtype,
        max_num_tokens: int,
        attention_layers: ctypes.Array[abi.AttentionLayer],
    ) -> None:
        """max_num_tokens: the most of a step. attention_layers: bound, in the order of the model's
        attention layers."""
        self._kernels = kernels
        self._dtype = dtype
        self._max_num_tokens = max_num_tokens
        self._attention_layers = attention_layers
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._ops: list[abi.Op] = []
        self._kept: list[object] = []

    def embed(self, table: torch.Tensor | PackedLinear, width: int) -> Buffer:
        """The step's token ids -> rows of the table [V, H], or of a packed head that it shares."""
        out = self._buffer("residual", width, is_dense=True)
        op = self._add(OpKind.EMBED, table, None, out)
        op.size = width
        if isinstance(table, PackedLinear):
            op.linear = _address(table.struct)
        else:
            _check_dense(table, self._dtype)
            op.weight = table.data_ptr()
        return out

    def rms_norm(self, x: Buffer, weight: torch.Tensor, eps: float) -> Buffer:
        """x [T, H] -> [T, H]."""
        _check_dense(weight, self._dtype)
        out = self._buffer("normed", x.width)
        op = self._add(OpKind.RMS_NORM, weight, x, out)
        op.size, op.weight, op.eps = x.width, weight.data_ptr(), eps
        return out

    def linear(self, x: Buffer, linear: PackedLinear, name: str) -> Buffer:
        """x [T, K] -> [T, N], into the buffer of this name."""
        assert x.width == linear.num_inputs
        out = self._buffer(name, linear.num_outputs)
        self._add_linear(x, linear, out, Epilogue.STORE)
        return out

    def add_linear(self, x: Buffer, linear: PackedLinear, residual: Buffer) -> None:
        """residual [T, N] += linear(x)."""
        assert x.width == linear.num_inputs and residual.width == linear.num_outputs
        self._add_linear(x, linear, residual, Epilogue.ADD_RESIDUAL)

    def silu_mul_linear(self, x: Buffer, linear: PackedLinear, name: str) -> Buffer:
        """x [T, K] -> silu(gate) * up, [T, N / 2], for a linear that interleaves the two."""
        assert x.width == linear.num_inputs and linear.interleave
        out = self._buffer(name, linear.num_outputs // 2)
        self._add_linear(x, linear, out, Epilogue.SILU_MUL)
        return out

    def rotate_and_write_kv(self, layer: int, qkv: Buffer, rotary: abi.Rotary) -> None:
        """Normalise q and k as `rotary` says, rotate them in place, and store k and v.

        qkv: [T, (Hq + 2 Hkv) D].
        """
        op = self._add(OpKind.ROTATE_AND_WRITE_KV, rotary, None, qkv)
        op.layer, op.rotary = _address(self._attention_layers[layer]), _address(rotary)

    def attention(self, layer: int, qkv: Buffer) -> Buffer:
        """The queries of qkv against the stored context -> [T, Hq D]."""
        spec = self._attention_layers[layer]
        out = self._buffer("attended", spec.num_heads * spec.head_dim)
        self._add(OpKind.ATTENTION, spec, qkv, out).layer = _address(spec)
        return out

    def keep(self, *objects: object) -> None:
        """Hold on to what operations point into."""
        self._kept += objects

    def finish(self, output: Buffer) -> Program:
        """The program. output: what its caller reads."""
        ops = (abi.Op * len(self._ops))(*self._ops)
        kept = (*self._kept, self._attention_layers)
        return Program(self._kernels, ops, len(self._ops), output, kept)

    def _buffer(self, name: str, width: int, is_dense: bool = False) -> Buffer:
        """is_dense: a row begins where the one before it ends."""
        key = (name, width)
        if key not in self._buffers:
            # Rows whose addresses are equal modulo ALIASED_BYTES share few lines of the cache: a
            # linear reads them at 70% of the speed, and would copy them first.
            is_aliased = width * self._dtype.itemsize % ALIASED_BYTES == 0
            padding = PADDING_BYTES // self._dtype.itemsize if is_aliased and not is_dense else 0
            rows = torch.empty((self._max_num_tokens, width + padding), dtype=self._dtype)
            self._buffers[key] = Buffer(rows[:, :width])
        return self._buffers[key]

    def _add_linear(self, x: Buffer, linear: PackedLinear, out: Buffer, epilogue: Epilogue) -> None:
        op = self._add(OpKind.LINEAR, linear, x, out)
        op.epilogue, op.linear = epilogue, _address(linear.struct)

    def _add(self, kind: OpKind, kept: object, x: Buffer | None, out: Buffer) -> abi.Op:
        op = abi.Op(kind=kind, dtype=abi.DTYPES[self._dtype])
        op.out, op.out_stride = out.address, out.stride
        if x is not None:
            op.input, op.in_stride = x.address, x.stride
        self._ops.append(op)
        self._kept += (kept, x, out)
        return op


def _address(struct: ctypes.Structure) -> int:
    return ctypes.addressof(struct)


def _check_dense(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    assert tensor.dtype == dtype and tensor.is_contiguous(), "a program reads dense parameters"
