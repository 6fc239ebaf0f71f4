"""Linears that keep block-quantized weights as the checkpoint's codes, without rounding again.

Activations are rounded to int8, with a scale for each chunk of 32 inputs, whatever the size of the
weights' groups. Chunks are small because a few channels of real models are a hundred times as large
as others, and channels that share a scale with them lose precision. The torch method below defines
the results that all kernels must give. For a row m of x, an output n, a chunk c and a group g,
which holds whole chunks or is half of a chunk:

    q[m, k]     = x[m, k] / scale[m, c], to the nearest         scale[m, c] = max |x[m, k]| / 127
    dot[m, n]   = sum over the smaller of c and g of (value(code[n, k]) - zero) * q[m, k]
    sum[m]      = sum over the smaller of c and g of q[m, k]
    out[m, n]  += dot * (scale[n, g] * scale[m, c])
    out[m, n]  -= offset[n, g] * (sum * scale[m, c])

Sums of integers are exact. out is fp32; each addition to it rounds once, in the order of the
chunks, or of the groups if these are smaller. If blocks have factors, scales and offsets are first
multiplied by them, which is exact.

Some inputs may be wide: inputs of typical tokens that are much larger than their neighbours. They
count as zeros in all of the above. Then each of them is added without being rounded, one after the
other in rising order, and each addition rounds once:

    out[m, n]  += weight[n, k] * x[m, k]

If the codes' columns are in another order than the inputs, x is reordered first. Checkpoints with
int8 weights, one scale for each output and int8 activations (W8A8) use `GivenInt8TorchMethod`, with
one scale of x for each token. Codes that are floats of 8 bits (fp8) have native and Triton methods;
x is not rounded for them, and neither in native linears of NVFP4, which become such codes.

Shapes: ... any leading dimensions, M rows of x, I input size, O output size, G groups, B blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.formats.block_quantized.kept_weight import KeptWeightMethod, kept_weight
from quire.formats.block_quantized.native_method import native_block_quantized_method
from quire.formats.block_quantized.triton_method import triton_block_quantized_method
from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows, UnpackedRows
from quire.formats.int8 import GivenInt8TorchMethod
from quire.formats.packed import is_packed, packed
from quire.formats.weight_format import (
    LinearMethod,
    LinearModule,
    TritonLinears,
    WideInputsMethod,
)
from quire.kernels.activations import Gating
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.quantize import multiply_add, quantize_groups, split_wide

# Maximum number of rows of x, and the approximate number of weights, in one product.
_MAX_ROWS = 64
_MAX_WEIGHTS = 1 << 20


CHUNK_INPUTS = 32
"""Number of neighbouring inputs of x that share a scale."""


class BlockQuantizedMethods:
    """Chooses the method for a block format: native if there are native kernels, else Triton or
    torch."""

    def __init__(
        self, native: NativeKernels | None = None, triton: TritonLinears | None = None
    ) -> None:
        self._native, self._triton = native, triton
        self._methods: dict[BlockFormat, LinearMethod | None] = {}

    def of(self, block_format: BlockFormat) -> LinearMethod | None:
        """The method for `block_format`. None if no layout supports this format; weights must then
        be dequantized."""
        if block_format not in self._methods:
            self._methods[block_format] = self._make(block_format)
        return self._methods[block_format]

    def _make(self, block_format: BlockFormat) -> LinearMethod | None:
        if self._native is not None:
            return native_block_quantized_method(self._native, block_format)
        if self._triton is not None:
            return triton_block_quantized_method(block_format, self._triton)
        if block_format.is_float8:
            return None
        if block_format.is_int8:
            return GivenInt8TorchMethod()
        is_served = (
            block_format.block_size
            or block_format.has_output_factors
            or (block_format.group_size and block_format.group_size % CHUNK_INPUTS == 0)
        )
        return BlockQuantizedTorchMethod(block_format) if is_served else None


class BlockQuantizedTorchMethod(KeptWeightMethod):
    """Stores the weight as `UnpackedRows`, one code per byte, and multiplies by it in torch."""

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        weight = self.empty(num_outputs, num_inputs, torch.device("meta"))
        return sum(tensor.nbytes for tensor in weight.stored)

    def empty(self, num_outputs: int, num_inputs: int, device: torch.device) -> UnpackedRows:
        block_format, outputs = self._block_format, num_outputs
        groups = num_inputs // block_format.group_size
        in_blocks = bool(block_format.block_size)

        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        offsets = torch.uint8 if in_blocks else block_format.scale_dtype
        factors = None
        if in_blocks:
            blocks = num_inputs // block_format.block_size
            factors = room(outputs, blocks, 2, dtype=torch.float16)
        elif block_format.has_output_factors:
            factors = room(outputs, 1, 1, dtype=torch.float32)
        return UnpackedRows(
            block_format,
            room(outputs, num_inputs, dtype=torch.uint8),
            room(outputs, groups, dtype=torch.int8 if in_blocks else block_format.scale_dtype),
            room(outputs, groups, dtype=torch.uint8) if block_format.has_zeros else None,
            room(outputs, groups, dtype=offsets) if block_format.has_offsets else None,
            factors,
        )

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        start = linear.part_start(index) + first_row
        given, kept = rows.unpacked(), kept_weight(linear).weight
        for name in ("codes", "scales", "zeros", "offsets", "factors"):
            tensor = getattr(given, name)
            if tensor is not None:
                getattr(kept, name)[start : start + len(rows)].copy_(tensor)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dtype = out_dtype or x.dtype
        kept = kept_weight(linear)
        flat = x.reshape(-1, linear.input_size)
        flat = flat if kept.inputs is None else flat[:, kept.inputs]
        output = torch.empty(len(flat), linear.output_size, dtype=dtype, device=x.device)
        num_outputs = max(1, _MAX_WEIGHTS // linear.input_size)
        for first in range(0, linear.output_size, num_outputs):
            outputs = slice(first, first + num_outputs)
            part = kept.weight.rows(outputs.start, outputs.stop)
            for start in range(0, len(flat), _MAX_ROWS):
                rows = slice(start, start + _MAX_ROWS)
                result = multiply_block_quantized(flat[rows], part)
                if linear.bias is not None:
                    result += linear.bias[outputs].float()
                output[rows, outputs] = result.to(dtype)
        return output.view(*x.shape[:-1], linear.output_size)

    def unpack(self, linear: LinearModule, outputs: torch.Tensor) -> torch.Tensor:
        kept = kept_weight(linear)
        numbers: torch.Tensor = kept.weight.picked(outputs).numbers()
        return numbers.to(kept.dtype)


def multiply_block_quantized(
    x: torch.Tensor, codes: UnpackedRows, wide_inputs: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [M, I] by the weight [O, I] -> [M, O] fp32, as the module's docstring defines.

    `wide_inputs` [W] int32 are the wide inputs; None means none.
    """
    if wide_inputs is not None:
        wide, x = split_wide(x.float(), wide_inputs)
        result = multiply_block_quantized(x, codes)
        # An infinity becomes NaN, as it does in the products of other inputs.
        for weight, each in zip(codes.numbers()[:, wide_inputs.long()].T, wide.T, strict=True):
            result = multiply_add(weight, (each + 0.0 * each)[:, None], result)
        return result
    block_format, (num_outputs, num_inputs) = codes.block_format, codes.codes.shape
    groups = codes.scales.shape[1]
    values = codes.values().view(num_outputs, groups, -1).float() - block_format.zero
    if codes.zeros is not None:
        values -= codes.zeros.float()[..., None]
    size = min(block_format.group_size, CHUNK_INPUTS)
    q, x_scales = quantize_groups(x, CHUNK_INPUTS)
    q, num_parts = q.view(len(x), -1, size), num_inputs // size
    # [G, M, O] of groups or chunks: integers below 2^24, so fp32 sums them exactly.
    dots = torch.bmm(q.transpose(0, 1), values.view(num_outputs, num_parts, size).permute(1, 2, 0))
    x_scales = x_scales.repeat_interleave(CHUNK_INPUTS // size, 1)
    sums = x_scales * q.sum(-1)
    scales, offsets = codes.float_scales(), codes.float_offsets()
    result = torch.zeros_like(dots[0])
    for index, dot in enumerate(dots):
        group = index * groups // num_parts
        result = multiply_add(dot, scales[:, group] * x_scales[:, index, None], result)
        if offsets is not None:
            result = multiply_add(-offsets[:, group], sums[:, index, None], result)
    return result


@dataclass(slots=True)
class _PartLinears:
    """The separate linears that compute the parts of a fused linear."""

    linears: tuple[LinearModule, ...]


class PartsMethod(WideInputsMethod):
    """Stores each part (q, k, v) of a fused linear as a separate linear with its own method.

    `methods` has one method for each part.
    """

    def __init__(self, methods: Sequence[LinearMethod], part_sizes: Sequence[int]) -> None:
        self._methods = tuple(methods)
        self._part_sizes = tuple(part_sizes)

    def takes_quantized(self, index: int) -> bool:
        return self._methods[index].takes_quantized(0)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        assert num_outputs == sum(self._part_sizes)
        return sum(
            method.num_bytes(size, num_inputs, dtype)
            for method, size in zip(self._methods, self._part_sizes, strict=True)
        )

    def num_wide(self, linear: LinearModule) -> int:
        return max((method.num_wide(part) for method, part in self._splitting(linear)), default=0)

    def wide_bytes(self, num_outputs: int, num_inputs: int) -> int:
        parts = zip(self._methods, self._part_sizes, strict=True)
        wide = [(each, size) for each, size in parts if isinstance(each, WideInputsMethod)]
        return sum(method.wide_bytes(size, num_inputs) for method, size in wide)

    def set_wide_inputs(self, linear: LinearModule, inputs: torch.Tensor) -> None:
        for method, part in self._splitting(linear):
            method.set_wide_inputs(part, inputs)

    def _splitting(self, linear: LinearModule) -> list[tuple[WideInputsMethod, LinearModule]]:
        """The parts that may have wide inputs, with their methods."""
        parts = zip(self._methods, _parts(linear), strict=True)
        return [(each, part) for each, part in parts if isinstance(each, WideInputsMethod)]

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

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        self._methods[index].load_quantized(_parts(linear)[index], 0, first_row, rows)

    def finish(self, linear: LinearModule) -> None:
        for method, part in zip(self._methods, _parts(linear), strict=True):
            method.finish(part)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        parts = zip(self._methods, _parts(linear), strict=True)
        return torch.cat([method.apply(part, x, out_dtype) for method, part in parts], dim=-1)


class RecordedPartsMethod(PartsMethod):
    """Records the products of all parts instead of computing them, for a linear whose parts are all
    packed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        parts = [(packed(part), part.packed_adapters) for part in _parts(linear)]
        return self._recorder.part_linears(x, parts, out_dtype)

    def silu_mul(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        return self._recorder.gated(self.apply(linear, x), Gating())


def packed_parts(linear: LinearModule) -> tuple[LinearModule, ...]:
    """The parts of a linear whose method is `PartsMethod`, if all of them are packed by
    `formats.packed`; otherwise empty."""
    state = linear.state
    if not isinstance(state, _PartLinears) or not all(map(is_packed, state.linears)):
        return ()
    return state.linears


def _parts(linear: LinearModule) -> tuple[LinearModule, ...]:
    assert isinstance(linear.state, _PartLinears)
    return linear.state.linears
