"""Linear layers: what they are is declared here, how they are computed is applied from outside.

A `Linear` says how it may be sharded (kind, shard axis) and of which parts it is fused; a
`LinearMethod` owns its parameters and its arithmetic; a `LinearAdapter` may add to its output.
Model files name neither of the latter, so quantization, tensor parallelism and LoRA need no change
there.

Shapes: ... any leading dimensions, I input size, O output size (the sum of the parts).
"""

from abc import ABC, abstractmethod
from enum import Enum
from itertools import accumulate
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional


class LinearKind(Enum):
    """How a linear is split over ranks."""

    COLUMN = "column"  # each rank holds some outputs of every part
    ROW = "row"  # each rank holds some inputs; the outputs are summed over ranks
    REPLICATED = "replicated"  # each rank holds all of it


_SHARD_AXES = {LinearKind.COLUMN: 0, LinearKind.ROW: 1, LinearKind.REPLICATED: None}


class LinearAdapter(Protocol):
    """What sits in a linear's adapter slot, LoRA for one."""

    def __call__(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """x [..., I], output [..., O] -> the output to use; may write to `output`."""
        ...


class LinearMethod(ABC):
    """How a linear stores and multiplies its weights. One object may serve many linears."""

    @abstractmethod
    def create(
        self, linear: "Linear", bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the linear's parameters, uninitialised: the checkpoint fills them."""

    @abstractmethod
    def apply(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> [..., O]."""

    @abstractmethod
    def part(self, linear: "Linear", parameter: str, index: int) -> torch.Tensor:
        """The view of a parameter into which part `index` of the checkpoint is read."""


class DenseMethod(LinearMethod):
    """weight [O, I] and bias [O] in the model's dtype, multiplied by torch."""

    def create(
        self, linear: "Linear", bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        linear.register_parameter(
            "weight", empty_parameter((linear.output_size, linear.input_size), dtype, device)
        )
        linear.register_parameter(
            "bias", empty_parameter((linear.output_size,), dtype, device) if bias else None
        )

    def apply(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, linear.weight, linear.bias)

    def part(self, linear: "Linear", parameter: str, index: int) -> torch.Tensor:
        end = list(accumulate(linear.part_sizes))[index]
        return linear.get_parameter(parameter)[end - linear.part_sizes[index] : end]


class Linear(nn.Module):
    """y = x W^T + b, fused of parts that lie one after the other in the output.

    part_sizes: outputs of each part; one for a linear that is not fused.
    shard_axis: the axis of the weight [O, I] that is split over ranks; None: it is not split.
    adapter: adds to the output when one is attached.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        input_size: int,
        part_sizes: tuple[int, ...],
        kind: LinearKind,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.part_sizes = part_sizes
        self.output_size = sum(part_sizes)
        self.kind = kind
        self.shard_axis = _SHARD_AXES[kind]
        self.adapter: LinearAdapter | None = None
        self.method: LinearMethod = DenseMethod()
        self.method.create(self, bias, dtype, device)

    def use(self, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        """Let `method` take over, before the checkpoint is read: its parameters replace ours."""
        has_bias = self.bias is not None
        self._parameters.clear()
        self.method = method
        method.create(self, has_bias, dtype, device)

    def part(self, parameter: str, index: int) -> torch.Tensor:
        """The view of `parameter` into which the checkpoint's tensor for part `index` is read."""
        return self.method.part(self, parameter, index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> [..., O]."""
        output = self.method.apply(self, x)
        return output if self.adapter is None else self.adapter(x, output)


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter that is allocated, never initialised and never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
