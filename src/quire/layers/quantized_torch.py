"""Quantized linears by torch: they serve where the native kernels don't, and are their oracle.

Weights are rounded by `kernels.quantize` when they are loaded, activations per token when they are
multiplied; products are summed in exact integers, or in an order of their own, so a row's result
does not depend on the rows beside it. Slow: they are correct, and small in memory while they run.

Shapes: M rows of x, I input size, O output size, g groups of G inputs.
"""

from abc import abstractmethod
from functools import cache

import torch
from torch.nn import functional

from quire.kernels.quantize import Int4Rows, quantize_int4, quantize_int8
from quire.layers.linear import Linear, LinearMethod, empty_parameter

# Rows of x that are multiplied at once; bounds what is there of [M, O] in wider numbers.
_MAX_ROWS = 256


class QuantizedMethod(LinearMethod):
    """What all formats share: weights that are rounded as they come in, and the bias."""

    @property
    def is_exact(self) -> bool:
        return False

    def create(self, linear: Linear, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._create_weights(linear, device)
        linear.register_parameter(
            "bias", empty_parameter((linear.output_size,), dtype, device) if bias else None
        )

    def load_part(
        self, linear: Linear, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        start = linear.part_start(index) + first_row
        span = slice(start, start + len(rows))
        if parameter == "bias":
            linear.get_parameter("bias")[span] = rows.to(linear.get_parameter("bias").dtype)
        else:
            self._load_rows(linear, span, rows)

    @abstractmethod
    def _create_weights(self, linear: Linear, device: torch.device) -> None: ...

    @abstractmethod
    def _load_rows(self, linear: Linear, span: slice, rows: torch.Tensor) -> None:
        """rows [R, I] of the weight, outputs `span`."""


class QuantizedTorchMethod(QuantizedMethod):
    """Activations as int8 with a scale for each token, multiplied some rows at once."""

    def apply(
        self, linear: Linear, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dtype = out_dtype or x.dtype
        flat = x.reshape(-1, linear.input_size)
        output = torch.empty(len(flat), linear.output_size, dtype=dtype, device=x.device)
        for start in range(0, len(flat), _MAX_ROWS):
            q, scales = quantize_int8(flat[start : start + _MAX_ROWS])
            result = self._multiply(linear, q, scales)
            if linear.bias is not None:
                result += linear.bias.float()
            output[start : start + _MAX_ROWS] = result.to(dtype)
        return output.view(*x.shape[:-1], linear.output_size)

    @abstractmethod
    def _multiply(self, linear: Linear, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """q [M, I] int8 and its scales [M] -> [M, O] fp32."""


class Int8TorchMethod(QuantizedTorchMethod):
    """levels [O, I] int8 and a scale for each output: x W^T = x_scale * scale * (integer dot)."""

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return num_outputs * (num_inputs + 4)

    def _create_weights(self, linear: Linear, device: torch.device) -> None:
        shape = (linear.output_size, linear.input_size)
        linear.register_parameter("levels", empty_parameter(shape, torch.int8, device))
        linear.register_parameter("scales", empty_parameter(shape[:1], torch.float32, device))

    def _load_rows(self, linear: Linear, span: slice, rows: torch.Tensor) -> None:
        linear.get_parameter("levels")[span], linear.get_parameter("scales")[span] = quantize_int8(
            rows
        )

    def _multiply(self, linear: Linear, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        dots = _integer_product(q, linear.get_parameter("levels"))
        return dots.float() * scales[:, None] * linear.get_parameter("scales")


class Int4TorchMethod(QuantizedTorchMethod):
    """The fields of `Int4Rows`, a byte for each level. For a row m of x and an output n

        x_scale[m] * (S[n] * sum over g of s[n, g] * dot[m, n, g] - O[n] * sum of o[n, g] * sum x)

    where dots and the second sum are exact, and the first one is in fp32, group after group, with
    one rounding for product and sum together.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        num_groups = self._num_groups(num_inputs)
        return num_outputs * (num_groups * (self.group_size + 2) + 8)

    def _num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.group_size)

    def _create_weights(self, linear: Linear, device: torch.device) -> None:
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

    def _load_rows(self, linear: Linear, span: slice, rows: torch.Tensor) -> None:
        packed = quantize_int4(rows, self.group_size)
        for name in Int4Rows.__dataclass_fields__:
            linear.get_parameter(name)[span] = getattr(packed, name)

    def _multiply(self, linear: Linear, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
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


def _integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, I] int8 @ (weight [O, I] int8)^T -> [M, O] int32, exact."""
    if _has_exact_int8():
        return torch._int_mm(x, weight.T)
    return x.int() @ weight.int().T


@cache
def _has_exact_int8() -> bool:
    """Whether torch's product of int8 is exact: without VNNI, libraries may saturate on the way."""
    extremes = torch.full((32, 64), 127, dtype=torch.int8)
    product = torch._int_mm(extremes, -extremes.T)
    return bool((product == -64 * 127 * 127).all())
