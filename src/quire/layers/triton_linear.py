"""Linears on a GPU: by our kernels where they are better or promise more, else by torch.

    dense      up to 16 rows `skinny_matmul`, which streams the weight at the memory's rate; above,
               torch's product (cuBLAS). The threshold is a constant: nothing is timed at run time.
    invariant  `matmul` for any number of rows: a row has the same bits in any batch
    int8       `int8_matmul`, exact integers and so invariant by nature
    int4       `int4_matmul`, likewise

`TritonLinears` is what `layers.methods` chooses from. Weights lie as the checkpoint has them, on
the device, or are quantized there as their rows come in, so no unquantized copy is ever there.

Shapes: ... any leading dimensions, I input size, O output size.
"""

import torch
from torch.nn import functional

from quire.kernels.operators import Operators
from quire.kernels.quantize import quantize_int4
from quire.kernels.triton.linear import int4_matmul as int4
from quire.kernels.triton.linear.int8_matmul import MAX_SKINNY_ROWS, Int8Weight, int8_matmul
from quire.kernels.triton.linear.matmul import matmul
from quire.kernels.triton.linear.skinny_matmul import DTYPES, MAX_ROWS, skinny_matmul
from quire.layers.linear import DenseMethod, Linear, LinearMethod, empty_parameter
from quire.layers.quantized_torch import Int8TorchMethod, QuantizedMethod


class TritonLinears:
    """The methods of a GPU, by format. operators: compute what follows a gated linear.
    batch_invariant: a row's result is to be the same in any batch, to the bit."""

    def __init__(self, operators: Operators, *, batch_invariant: bool) -> None:
        self._operators = operators
        self._batch_invariant = batch_invariant

    def dense(self) -> LinearMethod:
        if self._batch_invariant:
            return InvariantDenseMethod(self._operators)
        return TritonDenseMethod(self._operators)

    def int8(self) -> LinearMethod:
        return TritonInt8Method(self._operators, fuses_gates=not self._batch_invariant)

    def int4(self, group_size: int) -> LinearMethod:
        assert group_size == int4.GROUP_SIZE, group_size
        return TritonInt4Method(self._operators)


class TritonDenseMethod(DenseMethod):
    """Few rows by `skinny_matmul`, more by torch."""

    def apply(
        self, linear: Linear, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if _is_skinny(linear, x):
            return skinny_matmul(x, linear.weight, linear.bias, out_dtype=out_dtype)
        if out_dtype in (None, x.dtype):
            return functional.linear(x, linear.weight, linear.bias)
        return _wide_product(x, linear.weight, linear.bias)

    def silu_mul(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if _is_skinny(linear, x):
            return skinny_matmul(x, linear.weight, linear.bias, gated=True)
        return super().silu_mul(linear, x)


class InvariantDenseMethod(DenseMethod):
    """Any number of rows by `matmul`."""

    def apply(
        self, linear: Linear, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return matmul(x, linear.weight, linear.bias, out_dtype)


class TritonInt8Method(Int8TorchMethod):
    """levels [O, I] int8 and a scale for each output. fuses_gates: few rows of a gated linear get
    their gate from the same kernel, whose silu the other kernel need not equal to the bit."""

    def __init__(self, operators: Operators, *, fuses_gates: bool) -> None:
        self._operators = operators
        self._fuses_gates = fuses_gates

    def apply(
        self, linear: Linear, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return int8_matmul(x, _int8_weight(linear), out_dtype=out_dtype)

    def silu_mul(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if self._fuses_gates and _num_rows(linear, x) <= MAX_SKINNY_ROWS:
            return int8_matmul(x, _int8_weight(linear), gated=True)
        return self._operators.silu_mul(self.apply(linear, x))

    def _load_rows(self, linear: Linear, span: slice, rows: torch.Tensor) -> None:
        super()._load_rows(linear, span, rows.to(linear.get_parameter("levels").device))


class TritonInt4Method(QuantizedMethod):
    """The fields of `Int4Weight`: groups of 32 inputs."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        stretch_bytes = int4.STRETCH // 2 + 2 * int4.STRETCH // int4.GROUP_SIZE
        return num_outputs * (int4.num_stretches(num_inputs) * stretch_bytes + 8)

    def apply(
        self, linear: Linear, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        weight = int4.Int4Weight(
            linear.get_parameter("levels"),
            linear.get_parameter("scales"),
            linear.get_parameter("offsets"),
            linear.get_parameter("scale_factors"),
            linear.get_parameter("offset_factors"),
            linear.bias,
        )
        return int4.int4_matmul(x, weight, out_dtype)

    def silu_mul(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return self._operators.silu_mul(self.apply(linear, x))

    def _create_weights(self, linear: Linear, device: torch.device) -> None:
        outputs, stretches = linear.output_size, int4.num_stretches(linear.input_size)
        words = (stretches, int4.STRETCH // int4.GROUP_SIZE // 4, outputs)
        levels = empty_parameter((stretches, outputs, int4.STRETCH // 2), torch.uint8, device)
        linear.register_parameter("levels", levels)
        for name in ("scales", "offsets"):
            linear.register_parameter(name, empty_parameter(words, torch.int32, device))
        for name in ("scale_factors", "offset_factors"):
            linear.register_parameter(name, empty_parameter((outputs,), torch.float32, device))

    def _load_rows(self, linear: Linear, span: slice, rows: torch.Tensor) -> None:
        levels = linear.get_parameter("levels")
        quantized = quantize_int4(rows.to(levels.device), int4.GROUP_SIZE)
        levels[:, span] = int4.pack_levels(quantized)
        linear.get_parameter("scales")[..., span] = int4.pack_scales(quantized)
        linear.get_parameter("offsets")[..., span] = int4.pack_offsets(quantized)
        linear.get_parameter("scale_factors")[span] = quantized.scale_factors
        linear.get_parameter("offset_factors")[span] = quantized.offset_factors


def _num_rows(linear: Linear, x: torch.Tensor) -> int:
    return x.numel() // linear.input_size


def _is_skinny(linear: Linear, x: torch.Tensor) -> bool:
    return x.dtype in DTYPES and _num_rows(linear, x) <= MAX_ROWS


def _int8_weight(linear: Linear) -> Int8Weight:
    return Int8Weight(linear.get_parameter("levels"), linear.get_parameter("scales"), linear.bias)


def _wide_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """fp32, and on a GPU not rounded to x's dtype on the way."""
    if x.device.type != "cuda":
        return functional.linear(x, weight, bias).float()
    rows = x.reshape(-1, x.shape[-1])
    result: torch.Tensor = torch.mm(rows, weight.T, out_dtype=torch.float32)
    if bias is not None:
        result += bias
    return result.view(*x.shape[:-1], len(weight))
