"""int8 weights with a scale for each output, after a rotation of the inputs.

Each block of inputs is rotated (multiplied by a Hadamard matrix): weights when they are loaded, x
at each product. `kernels.quantize` says why. Rotated weights are divided by the block's size and
rounded to int8 levels. If typical inputs are known, rounding errors are compensated
(`kernels.compensation`). Rotated x is rounded to int8 with a scale for each group g of 256 inputs.
For a row m and an output n, the result is

    scale[n] * sum over g of x_scale[m, g] * dot[m, n, g]

where dot is the exact integer product of x and levels in group g. The sum is in fp32, group after
group, with one rounding for product and sum together, so the methods of torch, the native kernels
and Triton give the same bits.

Shapes: M rows of x, I input size, O output size, g groups.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from quire.formats.block_quantized.weights import BlockQuantizedRows
from quire.formats.grouped import GroupedExperts, biases_of
from quire.formats.packed import PackedMethod, keep_feedback
from quire.formats.rounded import RoundedTorchMethod
from quire.formats.weight_format import (
    CompensatedMethod,
    ExpertLinears,
    LinearMethod,
    LinearModule,
    TritonLinears,
    WeightFormat,
    empty_parameter,
)
from quire.kernels.activations import Gating
from quire.kernels.compensation import can_compensate, compensate_int8
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.operators import Operators, RowTable
from quire.kernels.quantize import (
    INT8_GROUP,
    multiply_add,
    quantize_groups,
    quantize_int8,
    quantize_int8_weight,
    rotate_blocks,
    rotation_size,
)
from quire.kernels.routing import Routing


class Int8(WeightFormat):
    """One byte for each weight, and four for each output's scale."""

    def torch_method(self) -> LinearMethod:
        return Int8TorchMethod()

    def native_method(self, kernels: NativeKernels) -> LinearMethod:
        return PackedInt8Method(kernels)

    def triton_method(self, linears: TritonLinears) -> LinearMethod:
        return TritonInt8Method(linears.operators, fuses_gates=not linears.batch_invariant)


class PackedInt8Method(PackedMethod, CompensatedMethod):
    """Packs levels and scales for the native kernels."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__(kernels, WeightLayout.INT8, INT8_GROUP)

    def can_compensate(self, linear: LinearModule) -> bool:
        return can_compensate(linear.input_size)

    def use_feedback(self, linear: LinearModule, feedback: torch.Tensor) -> None:
        keep_feedback(linear, feedback)


class Int8TorchMethod(RoundedTorchMethod, CompensatedMethod):
    """Keeps levels [O, I] int8 and scales [O] fp32, on any device."""

    is_rotated = True
    """Whether weights and activations are rotated; see `int8_matmul.Int8Weight`."""

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return num_outputs * (num_inputs + 4)

    def create_weights(self, linear: LinearModule, device: torch.device) -> None:
        shape = (linear.output_size, linear.input_size)
        linear.register_parameter("levels", empty_parameter(shape, torch.int8, device))
        linear.register_parameter("scales", empty_parameter(shape[:1], torch.float32, device))

    def can_compensate(self, linear: LinearModule) -> bool:
        return self.is_rotated and can_compensate(linear.input_size)

    def use_feedback(self, linear: LinearModule, feedback: torch.Tensor) -> None:
        linear.state = feedback

    def finish(self, linear: LinearModule) -> None:
        if isinstance(linear.state, torch.Tensor):
            linear.state = None

    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        if isinstance(linear.state, torch.Tensor):
            levels, scales = compensate_int8(rows, linear.state)
        else:
            levels, scales = quantize_int8_weight(rows)
        linear.get_parameter("levels")[span], linear.get_parameter("scales")[span] = levels, scales

    def multiply(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        q, x_scales = quantize_groups(rotate_blocks(x, rotation_size(x.shape[1])), INT8_GROUP)
        result = torch.zeros(len(x), linear.output_size, device=x.device)
        all_levels = linear.get_parameter("levels")
        for group in range(q.shape[1]):
            levels = all_levels[:, group * INT8_GROUP : (group + 1) * INT8_GROUP]
            # All sums are below 2^24, so fp32 represents them exactly.
            dots = q[:, group, : levels.shape[1]] @ levels.float().T
            result = multiply_add(dots, x_scales[:, group, None], result)
        return result * linear.get_parameter("scales")


class GivenInt8TorchMethod(Int8TorchMethod):
    """Keeps a checkpoint's int8 weights and scales, in a block format with `is_int8`.

    Activations are rounded as such checkpoints (W8A8) expect: not rotated, with one scale for each
    token.
    """

    is_rotated = False

    def multiply(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        q, x_scales = quantize_int8(x)
        dots = _integer_product(q, linear.get_parameter("levels"))
        return dots.float() * x_scales[:, None] * linear.get_parameter("scales")

    @property
    def is_exact(self) -> bool:
        return True

    def takes_quantized(self, index: int) -> bool:
        return True

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        codes, start = rows.unpacked(), linear.part_start(index) + first_row
        span = slice(start, start + len(rows))
        linear.get_parameter("levels")[span] = (codes.codes ^ 0x80).view(torch.int8)
        linear.get_parameter("scales")[span] = codes.scales[:, 0]

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().create(linear, bias, dtype, device)
        linear.state = dtype

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowTable | None:
        return _Int8Rows(linear)


@dataclass(frozen=True, slots=True)
class _Int8Rows:
    """A `RowTable` that dequantizes rows of a linear's weight to the model's dtype."""

    linear: LinearModule

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        levels, scales = (self.linear.get_parameter(name)[outputs] for name in ("levels", "scales"))
        assert isinstance(self.linear.state, torch.dtype)
        return (levels.float() * scales[:, None]).to(self.linear.state)


class TritonInt8Method(Int8TorchMethod):
    """Multiplies by `int8_matmul`. With `fuses_gates`, the kernel for few rows also computes the
    gate of a gated linear; its silu may differ in the last bit from the separate kernel's."""

    def __init__(self, operators: Operators, *, fuses_gates: bool) -> None:
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import grouped_int8_matmul as grouped
        from quire.kernels.triton.linear import int8_matmul

        self._kernel = int8_matmul
        self._operators = operators
        self._fuses_gates = fuses_gates

        def group(linears: tuple[LinearModule, ...]) -> object:
            levels, scales = (
                [linear.get_parameter(name) for linear in linears] for name in ("levels", "scales")
            )
            return grouped.group_int8_weights(
                levels, scales, biases_of(linears), is_rotated=self.is_rotated
            )

        self._experts = GroupedExperts(group, grouped.grouped_int8_matmul, operators)

    @property
    def groups_experts(self) -> bool:
        return True

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._experts.mix(layer, x, routing)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._multiply_all(linear, x, out_dtype=out_dtype)

    def silu_mul(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.numel() // linear.input_size
        if self._fuses_gates and num_rows <= self._kernel.MAX_SKINNY_ROWS:
            return self._multiply_all(linear, x, gated=True)
        return super().silu_mul(linear, x)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._operators.gated(gate_up, Gating())

    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        super().load_rows(linear, span, rows.to(linear.get_parameter("levels").device))

    def _multiply_all(
        self,
        linear: LinearModule,
        x: torch.Tensor,
        *,
        gated: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        levels, scales = linear.get_parameter("levels"), linear.get_parameter("scales")
        weight = self._kernel.Int8Weight(levels, scales, linear.bias, self.is_rotated)
        output: torch.Tensor = self._kernel.int8_matmul(x, weight, gated=gated, out_dtype=out_dtype)
        return output


def _integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, I] int8 @ (weight [O, I] int8)^T -> [M, O] int32, exact."""
    if _has_exact_int8():
        return torch._int_mm(x, weight.T)
    return x.int() @ weight.int().T


@cache
def _has_exact_int8() -> bool:
    """Whether torch's product of int8 is exact. Without VNNI, libraries may saturate partial
    sums."""
    extremes = torch.full((32, 64), 127, dtype=torch.int8)
    product = torch._int_mm(extremes, -extremes.T)
    return bool((product == -64 * 127 * 127).all())
