"""int4 weights in groups, each with an 8-bit scale and offset.

A group has G neighbouring inputs of one output. `kernels.quantize` rounds weights while they are
loaded. x is rounded to int8, with a scale for each span h of four groups. For a row m of x and an
output n, the result is computed as

    scaled  = sum over h of x_scale[m, h] * (sum over h's groups g of s[n, g] * dot[m, n, g])
    offsets = sum over h of x_scale[m, h] * (sum over h's groups g of o[n, g] * sum[m, g])
    S[n] * scaled - O[n] * offsets

Sums are in fp32, in the order of the groups, with fused multiply-adds. Dot products, sums of x's
integers and the inner sum of `offsets` are exact. S and O are bf16, one of each for an output.

A vocabulary projection keeps the weights of its wide inputs, the few with the largest weights
(`widest_inputs`), in int8 with a scale V[n] for each output. They share one scale of x, and add
x_scale[m] * dot[m, n] * V[n] to the result. The other weights are rounded as if the weights of wide
inputs were zero.

Shapes: M rows of x, I input size, O output size, g groups of G inputs.
"""

from typing import Any

import torch

from quire.formats.grouped import GroupedExperts
from quire.formats.packed import PackedMethod
from quire.formats.rounded import RoundedTorchMethod
from quire.formats.weight_format import (
    ExpertLinears,
    LinearMethod,
    LinearModule,
    SampledMethod,
    TritonLinears,
    WeightFormat,
    empty_parameter,
)
from quire.kernels.activations import Gating
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.operators import Operators
from quire.kernels.quantize import (
    INT4_GROUPS_PER_SCALE,
    Int4Rows,
    multiply_add,
    num_wide_inputs,
    quantize_groups,
    quantize_int4,
    quantize_int8,
    split_wide,
    widest_inputs,
)
from quire.kernels.routing import Routing

GROUP_SIZE = 32


class Int4(WeightFormat):
    """Groups of 32 inputs.

    The vocabulary projection has 4 bits, too, except for its wide inputs. With 8 bits for all its
    inputs, SmolLM2-135M would take 0.7 bits per weight more. With 4 bits for all, the projection
    alone raises that model's perplexity by 8.8%; with wide inputs, by 2.1%.
    """

    def torch_method(self) -> LinearMethod:
        return Int4TorchMethod(GROUP_SIZE)

    def native_method(self, kernels: NativeKernels) -> LinearMethod:
        return PackedMethod(kernels, WeightLayout.INT4, GROUP_SIZE)

    def triton_method(self, linears: TritonLinears) -> LinearMethod:
        return TritonInt4Method(linears.operators)

    def head_method(
        self, native: NativeKernels | None = None, triton: TritonLinears | None = None
    ) -> LinearMethod:
        if triton is not None:
            return TritonInt4Method(triton.operators, has_wide=True)
        if native is not None:
            return PackedMethod(native, WeightLayout.INT4, GROUP_SIZE, has_wide=True)
        return Int4TorchMethod(GROUP_SIZE, has_wide=True)


class Int4TorchMethod(RoundedTorchMethod, SampledMethod):
    """Keeps the fields of `Int4Rows`, with one level in a byte. For W wide inputs it also keeps
    wide_inputs [W] int32, wide_levels [O, W] int8 and wide_scales [O] fp32."""

    def __init__(self, group_size: int, *, has_wide: bool = False) -> None:
        self.group_size = group_size
        self._has_wide = has_wide

    @property
    def wants_sample(self) -> bool:
        return self._has_wide

    def take_sample(self, linear: LinearModule, sample: torch.Tensor) -> None:
        if self._num_wide(linear.input_size):
            linear.get_parameter("wide_inputs").copy_(widest_inputs(sample))

    def _num_wide(self, num_inputs: int) -> int:
        return num_wide_inputs(num_inputs) if self._has_wide else 0

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        per_output = self._num_groups(num_inputs) * (self.group_size + 2) + 4
        return num_outputs * per_output + self._wide_bytes(num_outputs, num_inputs)

    def _wide_bytes(self, num_outputs: int, num_inputs: int) -> int:
        num_wide = self._num_wide(num_inputs)
        return num_outputs * (num_wide + 4) + 4 * num_wide if num_wide else 0

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
            factors = empty_parameter((linear.output_size,), torch.bfloat16, device)
            linear.register_parameter(name, factors)
        self._create_wide(linear, device)

    def _create_wide(self, linear: LinearModule, device: torch.device) -> None:
        if num_wide := self._num_wide(linear.input_size):
            wide = {
                "wide_inputs": empty_parameter((num_wide,), torch.int32, device),
                "wide_levels": empty_parameter((linear.output_size, num_wide), torch.int8, device),
                "wide_scales": empty_parameter((linear.output_size,), torch.float32, device),
            }
            for name, parameter in wide.items():
                linear.register_parameter(name, parameter)

    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        rounded = quantize_int4(self._load_wide(linear, span, rows), self.group_size)
        for name in Int4Rows.__dataclass_fields__:
            linear.get_parameter(name)[span] = getattr(rounded, name)

    def _load_wide(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> torch.Tensor:
        """Store the weights of wide inputs, and return the rows with zeros in their place."""
        if not self._num_wide(linear.input_size):
            return rows
        wide, rest = split_wide(rows, linear.get_parameter("wide_inputs"))
        levels, scales = quantize_int8(wide)
        linear.get_parameter("wide_levels")[span] = levels
        linear.get_parameter("wide_scales")[span] = scales
        return rest

    def multiply(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        if not self._num_wide(linear.input_size):
            return self._multiply_groups(linear, x)
        wide, rest = split_wide(x, linear.get_parameter("wide_inputs"))
        q, x_scales = quantize_int8(wide)
        dots = q.float() @ linear.get_parameter("wide_levels").float().T  # exact
        added = dots * x_scales[:, None] * linear.get_parameter("wide_scales")
        return self._multiply_groups(linear, rest) + added

    def _multiply_groups(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        levels, scales, offsets = (
            linear.get_parameter(name) for name in ("levels", "scales", "offsets")
        )
        size, num_groups = self.group_size, levels.shape[1]
        q, x_scales = quantize_groups(x, INT4_GROUPS_PER_SCALE * size)
        q = q.view(len(x), -1, size)
        scaled = torch.zeros(len(x), linear.output_size, device=x.device)
        below = torch.zeros_like(scaled)
        for share in range(x_scales.shape[1]):
            first, of_x = share * INT4_GROUPS_PER_SCALE, x_scales[:, share, None]
            products, sums = torch.zeros_like(scaled), torch.zeros_like(scaled)
            for group in range(first, min(first + INT4_GROUPS_PER_SCALE, num_groups)):
                dots = q[:, group] @ levels[:, group].float().T  # exact: all sums are below 2^24
                products = multiply_add(dots, scales[:, group].float(), products)
                sums += q[:, group].sum(-1, keepdim=True) * offsets[:, group].float()
            scaled = multiply_add(products, of_x, scaled)
            below = multiply_add(sums, of_x, below)
        above = linear.get_parameter("scale_factors") * scaled
        return above - linear.get_parameter("offset_factors") * below

    def _num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.group_size)


class TritonInt4Method(Int4TorchMethod):
    """Keeps the fields of `int4_matmul.Int4Weight`. Results are bit-identical to torch's method."""

    def __init__(self, operators: Operators, *, has_wide: bool = False) -> None:
        super().__init__(GROUP_SIZE, has_wide=has_wide)
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
        per_output = num_stretches * int(stretch_bytes) + 4
        return num_outputs * per_output + self._wide_bytes(num_outputs, num_inputs)

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
        wide = None
        if self._num_wide(linear.input_size):
            wide = self._kernel.WideInputs(
                linear.get_parameter("wide_inputs"),
                linear.get_parameter("wide_levels"),
                linear.get_parameter("wide_scales"),
            )
        return self._kernel.Int4Weight(
            linear.get_parameter("levels"),
            linear.get_parameter("scales"),
            linear.get_parameter("offsets"),
            linear.get_parameter("scale_factors"),
            linear.get_parameter("offset_factors"),
            linear.bias,
            wide,
        )

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._operators.gated(gate_up, Gating())

    def create_weights(self, linear: LinearModule, device: torch.device) -> None:
        stretch = self._kernel.STRETCH
        outputs, stretches = linear.output_size, self._kernel.num_stretches(linear.input_size)
        levels = empty_parameter((stretches, outputs, stretch // 2), torch.uint8, device)
        linear.register_parameter("levels", levels)
        for name in ("scales", "offsets"):
            words = empty_parameter((stretches, outputs), torch.int32, device)
            linear.register_parameter(name, words)
        for name in ("scale_factors", "offset_factors"):
            linear.register_parameter(name, empty_parameter((outputs,), torch.bfloat16, device))
        self._create_wide(linear, device)

    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        levels = linear.get_parameter("levels")
        rest = self._load_wide(linear, span, rows.to(levels.device))
        rounded = quantize_int4(rest, GROUP_SIZE)
        levels[:, span] = self._kernel.pack_levels(rounded)
        linear.get_parameter("scales")[..., span] = self._kernel.pack_scales(rounded)
        linear.get_parameter("offsets")[..., span] = self._kernel.pack_offsets(rounded)
        linear.get_parameter("scale_factors")[span] = rounded.scale_factors
        linear.get_parameter("offset_factors")[span] = rounded.offset_factors
