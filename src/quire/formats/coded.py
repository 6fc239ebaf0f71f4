"""Linears whose weights are kept as the checkpoint's codes; nothing is rounded again.

Activations are rounded to int8, with a scale for each of a coding's blocks of inputs, or groups
where it has no blocks; the products of a group are summed in exact integers, groups (or blocks) in
fp32, one after the other. torch's method is the reference of the kernels'. For a row m of x, an
output n and the group g:

    q[m, k]       = x[m, k] / scale[m, g], to the nearest        scale[m, g] = max |x[m, k]| / 127
    dot[m, n, g]  = sum over the group of (value(c[n, k]) - zero) * q[m, k]
    sum[m, g]     = sum over the group of q[m, k]

    floats:  out += dot * (scale[n, g] * scale[m, g]);  out -= offset[n, g] * (sum * scale[m, g])
    blocks:  out += (sum over g of scale[n, g] * dot) * (factor[n, b] * scale[m, b])
             out -= (sum over g of offset[n, g] * sum) * (offset_factor[n, b] * scale[m, b])

Where columns have an order of their own, x is put into it first. Codes that are int8's levels
are multiplied as `formats.int8` does, with activations rounded per token.

Shapes: ... any leading dimensions, M rows of x, I input size, O output size, G groups, B blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.formats.coded_native import native_coded_method
from quire.formats.coded_triton import coded_triton_method
from quire.formats.codes import CodedRows, Codes, Coding
from quire.formats.int8 import GivenInt8TorchMethod
from quire.formats.packed import is_packed, packed
from quire.formats.weight_format import (
    LinearMethod,
    LinearModule,
    RowSource,
    TritonLinears,
    empty_parameter,
)
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.recorder import Recorder

# Rows of x, and about how many weights, that are multiplied at once: each takes tens of bytes.
_MAX_ROWS = 64
_MAX_WEIGHTS = 1 << 20


class CodedMethods:
    """Gives the method for a coding and the kernels that are there, at most one of the two."""

    def __init__(
        self, native: NativeKernels | None = None, triton: TritonLinears | None = None
    ) -> None:
        self._native, self._triton = native, triton
        self._methods: dict[Coding, LinearMethod | None] = {}

    def of(self, coding: Coding) -> LinearMethod | None:
        """None: no layout holds its numbers; they are multiplied in the model's dtype."""
        if coding not in self._methods:
            self._methods[coding] = self._make(coding)
        return self._methods[coding]

    def _make(self, coding: Coding) -> LinearMethod | None:
        if self._native is not None:
            return native_coded_method(self._native, coding)
        if self._triton is not None:
            return coded_triton_method(coding, self._triton)
        if coding.is_int8:
            return GivenInt8TorchMethod()
        return CodedTorchMethod(coding) if coding.group_size else None


@dataclass(slots=True)
class _KeptCodes:
    """What the method keeps of a linear beside its bias. dtype: the model's. inputs: the order of
    the codes' columns, int64 [I], or None."""

    codes: Codes
    dtype: torch.dtype
    inputs: torch.Tensor | None


class CodedTorchMethod(LinearMethod):
    """The fields of `Codes`, a byte for each code."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding

    def takes_codes_of(self, index: int) -> bool:
        return True

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        codes = self._empty(num_outputs, num_inputs, torch.device("meta"))
        tensors = (codes.codes, codes.scales, codes.zeros, codes.offsets, codes.factors)
        return sum(each.nbytes for each in tensors if each is not None)

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        codes = self._empty(linear.output_size, linear.input_size, device)
        order = self._coding.input_order
        inputs = None if order is None else order.inputs().to(device, torch.int64)
        linear.state = _KeptCodes(codes, dtype, inputs)
        linear.register_parameter(
            "bias", empty_parameter((linear.output_size,), dtype, device) if bias else None
        )

    def _empty(self, outputs: int, inputs: int, device: torch.device) -> Codes:
        coding = self._coding
        groups = inputs // coding.group_size
        in_blocks = bool(coding.block_size)

        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        offsets = torch.uint8 if in_blocks else coding.scale_dtype
        return Codes(
            coding,
            room(outputs, inputs, dtype=torch.uint8),
            room(outputs, groups, dtype=torch.int8 if in_blocks else coding.scale_dtype),
            room(outputs, groups, dtype=torch.uint8) if coding.has_zeros else None,
            room(outputs, groups, dtype=offsets) if coding.has_offsets else None,
            room(outputs, inputs // coding.block_size, 2, dtype=torch.float16)
            if in_blocks
            else None,
        )

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        assert parameter == "bias" and linear.bias is not None, parameter
        start = linear.part_start(index) + first_row
        linear.bias[start : start + len(rows)].copy_(rows)

    def load_codes(self, linear: LinearModule, index: int, first_row: int, rows: CodedRows) -> None:
        start = linear.part_start(index) + first_row
        given, kept = rows.codes(), _stored(linear).codes
        for name in ("codes", "scales", "zeros", "offsets", "factors"):
            tensor = getattr(given, name)
            if tensor is not None:
                getattr(kept, name)[start : start + len(rows)].copy_(tensor)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dtype = out_dtype or x.dtype
        codes, inputs = _stored(linear).codes, _stored(linear).inputs
        flat = x.reshape(-1, linear.input_size)
        flat = flat if inputs is None else flat[:, inputs]
        output = torch.empty(len(flat), linear.output_size, dtype=dtype, device=x.device)
        num_outputs = max(1, _MAX_WEIGHTS // linear.input_size)
        for first in range(0, linear.output_size, num_outputs):
            outputs = slice(first, first + num_outputs)
            part = codes.rows(outputs.start, outputs.stop)
            for start in range(0, len(flat), _MAX_ROWS):
                rows = slice(start, start + _MAX_ROWS)
                result = multiply_codes(flat[rows], part)
                if linear.bias is not None:
                    result += linear.bias[outputs].float()
                output[rows, outputs] = result.to(dtype)
        return output.view(*x.shape[:-1], linear.output_size)

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowSource | None:
        return CodedTable(linear)


@dataclass(frozen=True, slots=True)
class CodedTable:
    """Rows of a linear's weight as numbers: a `RowSource`."""

    linear: LinearModule

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `RowSource`; numbers are rounded to the model's dtype."""
        stored = _stored(self.linear)
        return stored.codes.mapped(lambda tensor: tensor[outputs]).numbers().to(stored.dtype)


def _stored(linear: LinearModule) -> _KeptCodes:
    assert isinstance(linear.state, _KeptCodes)
    return linear.state


def quantize_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, I] -> int8 numbers as fp32 [M, I/size, size], and their scales [M, I/size] fp32, as
    csrc/linear/quantize_rows.h does. A group with an infinity or a NaN has the scale NaN."""
    groups = x.float().view(len(x), -1, size)
    largest = groups.abs().amax(-1)
    is_finite = largest <= torch.finfo(torch.float32).max
    is_zero = largest < 1e-30
    levels = torch.full_like(largest, 127.0)  # of a Python number torch takes the reciprocal
    factors = torch.where(is_finite & ~is_zero, levels / largest, 0.0)
    q = torch.where(is_finite[..., None], groups, 0.0).mul(factors[..., None]).round()
    scales = torch.where(is_zero, 0.0, torch.where(is_finite, largest / levels, torch.nan))
    return q, scales


def multiply_codes(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    """x [M, I] times the weight [O, I] -> [M, O] fp32: the formulas above."""
    coding = codes.coding
    groups = codes.scales.shape[1]
    q, x_scales = quantize_groups(x, coding.block_size or coding.group_size)
    q = q.view(len(x), groups, -1)
    values = codes.values().view(len(codes.codes), groups, -1).float() - coding.zero
    if codes.zeros is not None:
        values -= codes.zeros.float()[..., None]
    # [G, M, O]: integers below 2^24, so fp32 sums them exactly.
    dots = torch.bmm(q.transpose(0, 1), values.permute(1, 2, 0))
    sums = q.sum(-1)
    if codes.factors is None:
        return _add_groups(codes, dots, sums, x_scales)
    return _add_blocks(codes, dots, sums, x_scales)


def _add_groups(
    codes: Codes, dots: torch.Tensor, sums: torch.Tensor, x_scales: torch.Tensor
) -> torch.Tensor:
    scales, offsets = codes.float_scales(), codes.float_offsets()
    result = torch.zeros_like(dots[0])
    for group in range(len(dots)):
        of_x = x_scales[:, group, None]
        result = _multiply_add(dots[group], scales[:, group] * of_x, result)
        if offsets is not None:
            result = _multiply_add(-offsets[:, group], sums[:, group, None] * of_x, result)
    return result


def _add_blocks(
    codes: Codes, dots: torch.Tensor, sums: torch.Tensor, x_scales: torch.Tensor
) -> torch.Tensor:
    assert codes.factors is not None
    num_blocks = codes.factors.shape[1]
    per_block = len(dots) // num_blocks
    result = torch.zeros_like(dots[0])
    for block in range(num_blocks):
        span = slice(block * per_block, (block + 1) * per_block)
        scaled = (dots[span].double() * codes.scales[:, span].T[:, None].double()).sum(0).float()
        of_x, factors = x_scales[:, block, None], codes.factors[:, block].float()
        result = _multiply_add(scaled, factors[:, 0] * of_x, result)
        if codes.offsets is not None:
            below = (sums[:, span].double() @ codes.offsets[:, span].double().T).float()
            result = _multiply_add(-below, factors[:, 1] * of_x, result)
    return result


def _multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32, rounded once but for ties of the sum in fp64."""
    return (a.double() * b.double() + c.double()).float()


@dataclass(slots=True)
class _PartLinears:
    """The linears that a fused one is computed by."""

    linears: tuple[LinearModule, ...]


class PartsMethod(LinearMethod):
    """A fused linear whose parts are kept differently, each as a linear of its own.

    methods: of each part.
    """

    def __init__(self, methods: Sequence[LinearMethod], part_sizes: Sequence[int]) -> None:
        self._methods = tuple(methods)
        self._part_sizes = tuple(part_sizes)

    def takes_codes_of(self, index: int) -> bool:
        return self._methods[index].takes_codes_of(0)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        assert num_outputs == sum(self._part_sizes)
        return sum(
            method.num_bytes(size, num_inputs, dtype)
            for method, size in zip(self._methods, self._part_sizes, strict=True)
        )

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = tuple(
            LinearModule(linear.input_size, (size,), has_bias=linear.has_bias)
            for size in linear.part_sizes
        )
        for method, part in zip(self._methods, parts, strict=True):
            method.create(part, bias, dtype, device)
        linear.state = _PartLinears(parts)

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        part = _parts(linear)[index]
        self._methods[index].load_part(part, parameter, 0, first_row, rows)

    def load_codes(self, linear: LinearModule, index: int, first_row: int, rows: CodedRows) -> None:
        self._methods[index].load_codes(_parts(linear)[index], 0, first_row, rows)

    def finish(self, linear: LinearModule) -> None:
        for method, part in zip(self._methods, _parts(linear), strict=True):
            method.finish(part)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        parts = zip(self._methods, _parts(linear), strict=True)
        return torch.cat([method.apply(part, x, out_dtype) for method, part in parts], dim=-1)


class RecordedPartsMethod(PartsMethod):
    """Has a recorder note the products of the parts, of a linear that has `packed_parts`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        parts = [(packed(part), part.packed_adapters) for part in _parts(linear)]
        return self._recorder.part_linears(x, parts, out_dtype)

    def silu_mul(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        return self._recorder.silu_mul(self.apply(linear, x))


def packed_parts(linear: LinearModule) -> tuple[LinearModule, ...]:
    """The parts of a linear whose method is `PartsMethod`, if `formats.packed` keeps all of them;
    else none."""
    state = linear.state
    if not isinstance(state, _PartLinears) or not all(map(is_packed, state.linears)):
        return ()
    return state.linears


def _parts(linear: LinearModule) -> tuple[LinearModule, ...]:
    assert isinstance(linear.state, _PartLinears)
    return linear.state.linears
