"""The format of weights that are not quantized: they stay in the model's dtype.

    torch        multiplied by torch
    native       packed and multiplied by the CPU kernels
    Triton       up to 16 rows by `skinny_matmul`, which reads the weight at memory bandwidth, and
                 norms a row that is alone; more rows by torch (cuBLAS). The threshold has not been
                 measured
    invariant    any number of rows by `matmul`: a row has the same bits in any batch
    experts      all experts of a layer at once, by the native kernels or `grouped_matmul`

Shapes: ... any leading dimensions, I input size, O output size.
"""

import torch
from torch import nn
from torch.nn import functional

from quire.formats.grouped import GroupedExperts, biases_of
from quire.formats.packed import PackedMethod
from quire.formats.weight_format import (
    ExpertLinears,
    LinearMethod,
    LinearModule,
    TritonLinears,
    WeightFormat,
    empty_parameter,
    register_bias,
)
from quire.kernels.activations import Gating
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.operators import TORCH_OPERATORS, Operators, RowTable
from quire.kernels.routing import Routing
from quire.kernels.unnormed_rows import UnnormedRows


class Dense(WeightFormat):
    """The format of a model that is not quantized."""

    def torch_method(self) -> LinearMethod:
        return DenseMethod()

    def native_method(self, kernels: NativeKernels) -> LinearMethod:
        return PackedMethod(kernels)

    def triton_method(self, linears: TritonLinears) -> LinearMethod:
        if linears.batch_invariant:
            return InvariantDenseMethod(linears.operators)
        return TritonDenseMethod(linears.operators)


class DenseMethod(LinearMethod):
    """Keeps weight [O, I] and bias [O] in the model's dtype, and multiplies by torch.

    `operators` compute the activation after a gated linear.
    """

    def __init__(self, operators: Operators = TORCH_OPERATORS) -> None:
        self._operators = operators

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        linear.register_parameter(
            "weight", empty_parameter((linear.output_size, linear.input_size), dtype, device)
        )
        register_bias(linear, bias, dtype, device)

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        start = linear.part_start(index) + first_row
        linear.get_parameter(parameter)[start : start + len(rows)].copy_(rows)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return num_outputs * num_inputs * dtype.itemsize

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        output = functional.linear(x, linear.weight, linear.bias)
        return output if out_dtype is None else output.to(out_dtype)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._operators.gated(gate_up, Gating())

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowTable | None:
        linear.weight = table
        return None


class GroupedDenseMethod(DenseMethod):
    """Multiplies experts by `grouped_matmul`. Without `has_wide_tiles`, results are the same in any
    batch."""

    def __init__(self, operators: Operators, *, has_wide_tiles: bool) -> None:
        super().__init__(operators)
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import grouped_matmul

        def group(linears: tuple[LinearModule, ...]) -> object:
            weights = [linear.weight for linear in linears]
            return grouped_matmul.group_weights(weights, biases_of(linears))

        self._experts = GroupedExperts(
            group, grouped_matmul.grouped_matmul, operators, has_wide_tiles=has_wide_tiles
        )

    @property
    def groups_experts(self) -> bool:
        return True

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._experts.mix(layer, x, routing)


class TritonDenseMethod(GroupedDenseMethod):
    """Multiplies up to 16 rows by `skinny_matmul`, and more by torch."""

    def __init__(self, operators: Operators) -> None:
        super().__init__(operators, has_wide_tiles=True)
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import skinny_matmul

        self._skinny = skinny_matmul

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if self._is_skinny(linear, x):
            output: torch.Tensor = self._skinny.skinny_matmul(
                x, linear.weight, linear.bias, out_dtype=out_dtype
            )
            return output
        if out_dtype in (None, x.dtype):
            return functional.linear(x, linear.weight, linear.bias)
        return _wide_product(x, linear.weight, linear.bias)

    def silu_mul(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        if self._is_skinny(linear, x):
            output: torch.Tensor = self._skinny.skinny_matmul(
                x, linear.weight, linear.bias, gated=True
            )
            return output
        return super().silu_mul(linear, x)

    def takes_unnormed(self, linear: LinearModule, x: torch.Tensor) -> bool:
        is_row = x.numel() == x.shape[-1] <= self._skinny.MAX_NORMED_SIZE
        return is_row and self._is_skinny(linear, x)

    def apply_unnormed(self, linear: LinearModule, rows: UnnormedRows) -> torch.Tensor:
        output: torch.Tensor = self._skinny.skinny_matmul(
            rows, linear.weight, linear.bias, gated=linear.gated
        )
        return output

    def _is_skinny(self, linear: LinearModule, x: torch.Tensor) -> bool:
        num_rows = x.numel() // linear.input_size
        return x.dtype in self._skinny.DTYPES and num_rows <= self._skinny.MAX_ROWS


class InvariantDenseMethod(GroupedDenseMethod):
    """Multiplies any number of rows by `matmul`, with the same bits in any batch."""

    def __init__(self, operators: Operators) -> None:
        super().__init__(operators, has_wide_tiles=False)
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear.matmul import matmul

        self._matmul = matmul

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._matmul(x, linear.weight, linear.bias, out_dtype)


def _wide_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in fp32. On a GPU it is never rounded to x's dtype."""
    if x.device.type != "cuda":
        return functional.linear(x, weight, bias).float()
    rows = x.reshape(-1, x.shape[-1])
    result: torch.Tensor = torch.mm(rows, weight.T, out_dtype=torch.float32)
    if bias is not None:
        result += bias
    return result.view(*x.shape[:-1], len(weight))
