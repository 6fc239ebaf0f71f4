"""int4 weights in groups, each with an 8-bit scale and offset.

A group is a number of inputs of one output. Rounded by `kernels.quantize` while they are loaded.
For a row m of x and an output n

    x_scale[m] * (S[n] * sum over g of s[n, g] * dot[m, n, g] - O[n] * sum of o[n, g] * sum x)

where dot products and the second sum are exact, and the first one is in fp32, group after group,
with one rounding for product and sum together.

Shapes: M rows of x, I input size, O output size, g groups of G inputs.
"""

from typing import Any

import torch
from torch.nn import functional

from quire.formats.grouped import GroupedExperts
from quire.formats.packed import PackedMethod
from quire.formats.rounded import RoundedMethod, RoundedTorchMethod
from quire.formats.weight_format import (
    ExpertLinears,
    LinearMethod,
    LinearModule,
    TritonLinears,
    WeightFormat,
    empty_parameter,
)
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.operators import Operators
from quire.kernels.quantize import Int4Rows, quantize_int4
from quire.kernels.routing import Routing

GROUP_SIZE = 32


class Int4(WeightFormat):
    """Groups of 32 inputs.

    The vocabulary projection has the bits of the other linears: it is half of the loss in quality
    (0.7 of 1.6%; embedded model), and of a small model with a large vocabulary a quarter of the
    bytes of a step.
    """

    def torch_method(self) -> LinearMethod:
        return Int4TorchMethod(GROUP_SIZE)

    def native_method(self, kernels: NativeKernels) -> LinearMethod:
        return PackedMethod(kernels, WeightLayout.INT4, GROUP_SIZE)

    def triton_method(self, linears: TritonLinears) -> LinearMethod:
        return TritonInt4Method(linears.operators)


class Int4TorchMethod(RoundedTorchMethod):
    """The fields of `Int4Rows`, a byte for each level."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        num_groups = self._num_groups(num_inputs)
        return num_outputs * (num_groups * (self.group_size + 2) + 8)

    def create_weights(self, linear: LinearModule, device: torch.device) -> None:
        num_groups = self._num_groups(linear.input_size)
        shapes = {
            "levels": (linear.output_size, num_groups, self.group_size),
            "scales": (linear.output_size, num_groups),
            "offsets": (linear.output_size, num_groups),
        }
        for name, shape in shapes.items():
            linear.register_parameter(name, empty_parameter(shape, torch.uint8, device))
        for name in ("scale_factors", "offset_factors"):
            factors = empty_parameter((linear.output_size,), torch.float32, device)
            linear.register_parameter(name, factors)

    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        rounded = quantize_int4(rows, self.group_size)
        for name in Int4Rows.__dataclass_fields__:
            linear.get_parameter(name)[span] = getattr(rounded, name)

    def multiply(self, linear: LinearModule, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        levels, group_scales = linear.get_parameter("levels"), linear.get_parameter("scales")
        num_groups = levels.shape[1]
        padding = num_groups * self.group_size - linear.input_size
        x = functional.pad(q, (0, padding)).view(len(q), num_groups, -1).float()
        scaled = torch.zeros(len(q), linear.output_size, dtype=torch.float64)
        for group in range(num_groups):
            dots = x[:, group] @ levels[:, group].float().T  # exact: all sums are below 2^24
            # All three are integers below 2^53, so this is rounded once, by `.float()`.
            scaled = (dots.double() * group_scales[:, group].double() + scaled).float().double()
        offsets = x.sum(-1).double() @ linear.get_parameter("offsets").double().T
        above = linear.get_parameter("scale_factors") * scaled.float()
        below = linear.get_parameter("offset_factors") * offsets.float()
        result: torch.Tensor = (above - below) * scales[:, None]
        return result

    def _num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.group_size)


class TritonInt4Method(RoundedMethod):
    """The fields of `int4_matmul.Int4Weight`; equal to torch's method to the bit."""

    def __init__(self, operators: Operators) -> None:
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import grouped_int4_matmul as grouped
        from quire.kernels.triton.linear import int4_matmul

        assert int4_matmul.GROUP_SIZE == GROUP_SIZE
        self._kernel = int4_matmul
        self._operators = operators

        def group(linears: tuple[LinearModule, ...]) -> object:
            return grouped.group_int4_weights([self._weight(linear) for linear in linears])

        self._experts = GroupedExperts(group, grouped.grouped_int4_matmul, operators)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        stretch_bytes = self._kernel.STRETCH // 2 + 2 * self._kernel.STRETCH // GROUP_SIZE
        num_stretches: int = self._kernel.num_stretches(num_inputs)
        return num_outputs * (num_stretches * int(stretch_bytes) + 8)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        output: torch.Tensor = self._kernel.int4_matmul(x, self._weight(linear), out_dtype)
        return output

    @property
    def groups_experts(self) -> bool:
        return True

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._experts.mix(layer, x, routing)

    def _weight(self, linear: LinearModule) -> Any:
        return self._kernel.Int4Weight(
            linear.get_parameter("levels"),
            linear.get_parameter("scales"),
            linear.get_parameter("offsets"),
            linear.get_parameter("scale_factors"),
            linear.get_parameter("offset_factors"),
            linear.bias,
        )

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._operators.silu_mul(gate_up)

    def create_weights(self, linear: LinearModule, device: torch.device) -> None:
        stretch = self._kernel.STRETCH
        outputs, stretches = linear.output_size, self._kernel.num_stretches(linear.input_size)
        words = (stretches, stretch // GROUP_SIZE // 4, outputs)
        levels = empty_parameter((stretches, outputs, stretch // 2), torch.uint8, device)
        linear.register_parameter("levels", levels)
        for name in ("scales", "offsets"):
            linear.register_parameter(name, empty_parameter(words, torch.int32, device))
        for name in ("scale_factors", "offset_factors"):
            linear.register_parameter(name, empty_parameter((outputs,), torch.float32, device))

    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        levels = linear.get_parameter("levels")
        rounded = quantize_int4(rows.to(levels.device), GROUP_SIZE)
        levels[:, span] = self._kernel.pack_levels(rounded)
        linear.get_parameter("scales")[..., span] = self._kernel.pack_scales(rounded)
        linear.get_parameter("offsets")[..., span] = self._kernel.pack_offsets(rounded)
        linear.get_parameter("scale_factors")[span] = rounded.scale_factors
        linear.get_parameter("offset_factors")[span] = rounded.offset_factors
