"""The base of formats that round a checkpoint's weights while loading them (INT8, INT4).

Activations are rounded when they are multiplied. Products are summed in exact integers or in a
fixed order, so a row's result does not depend on other rows. torch's methods define the kernels'
results; they are slow, but need little memory.

Shapes: M rows of x, R rows of a weight, I input size, O output size.
"""

from abc import abstractmethod

import torch

from quire.formats.weight_format import LinearMethod, LinearModule, register_bias

# Maximum number of rows of x in one product, which bounds the memory of its fp32 result.
_MAX_ROWS = 256


class RoundedMethod(LinearMethod):
    """Rounds rows when they are loaded. The bias [O] stays in the model's dtype."""

    @property
    def is_exact(self) -> bool:
        return False

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.create_weights(linear, device)
        register_bias(linear, bias, dtype, device)

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        start = linear.part_start(index) + first_row
        span = slice(start, start + len(rows))
        if parameter == "bias":
            linear.get_parameter("bias")[span] = rows.to(linear.get_parameter("bias").dtype)
        else:
            self.load_rows(linear, span, rows)

    @abstractmethod
    def create_weights(self, linear: LinearModule, device: torch.device) -> None:
        """Register the parameters of the rounded weight, uninitialised."""

    @abstractmethod
    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        """Round rows [R, I], of any floating dtype, on the CPU, and store them as the weights of
        outputs `span`."""


class RoundedTorchMethod(RoundedMethod):
    """Multiplies int8 activations by torch, some rows at a time."""

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dtype = out_dtype or x.dtype
        flat = x.reshape(-1, linear.input_size)
        output = torch.empty(len(flat), linear.output_size, dtype=dtype, device=x.device)
        for start in range(0, len(flat), _MAX_ROWS):
            result = self.multiply(linear, flat[start : start + _MAX_ROWS])
            if linear.bias is not None:
                result += linear.bias.float()
            output[start : start + _MAX_ROWS] = result.to(dtype)
        return output.view(*x.shape[:-1], linear.output_size)

    @abstractmethod
    def multiply(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        """x [M, I] of any floating dtype -> [M, O] fp32, without the bias."""
