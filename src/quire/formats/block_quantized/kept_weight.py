"""The base class of torch's and Triton's methods that keep block-quantized weights in tensors.

Each subclass defines the form in which it keeps a weight. Called by `linear_methods` and
`triton_method`.

Shapes: R rows, I input size, O output size.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.formats.block_quantized.weights import BlockFormat
from quire.formats.weight_format import LinearMethod, LinearModule, register_bias
from quire.kernels.operators import RowTable


@dataclass(slots=True)
class KeptWeight:
    """A linear's weight, kept in `LinearModule.state`."""

    #: The weight, in the form that its method defines.
    weight: Any

    #: The model's dtype.
    dtype: torch.dtype

    #: The input index of each column of the codes, int64 [I]; None if columns have the inputs'
    #: order.
    inputs: torch.Tensor | None


class KeptWeightMethod(LinearMethod):
    """Keeps weights of one block format, and the bias in the model's dtype."""

    def __init__(self, block_format: BlockFormat) -> None:
        self._block_format = block_format

    def takes_quantized(self, index: int) -> bool:
        return True

    @abstractmethod
    def empty(self, num_outputs: int, num_inputs: int, device: torch.device) -> Any:
        """An uninitialised weight."""

    @abstractmethod
    def unpack(self, linear: LinearModule, outputs: torch.Tensor) -> torch.Tensor:
        """Dequantize rows of the weight: outputs [R] int64 -> [R, I] in the model's dtype."""

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        order = self._block_format.input_order
        inputs = None if order is None else order.inputs().to(device, torch.int64)
        weight = self.empty(linear.output_size, linear.input_size, device)
        linear.state = KeptWeight(weight, dtype, inputs)
        register_bias(linear, bias, dtype, device)

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        assert parameter == "bias" and linear.bias is not None, parameter
        start = linear.part_start(index) + first_row
        linear.bias[start : start + len(rows)].copy_(rows)

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowTable | None:
        return _UnpackedTable(self, linear)


@dataclass(frozen=True, slots=True)
class _UnpackedTable:
    """A `RowTable` that dequantizes rows of a linear's weight."""

    method: KeptWeightMethod
    linear: LinearModule

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `RowTable`."""
        return self.method.unpack(self.linear, outputs)


def kept_weight(linear: LinearModule) -> KeptWeight:
    """The weight that a `KeptWeightMethod` stored."""
    assert isinstance(linear.state, KeptWeight)
    return linear.state
