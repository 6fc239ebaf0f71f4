"""The base class of Triton's methods that keep block-quantized weights on a GPU.

    up to `most_rows` rows   the subclass's product with the kept codes
    more rows                some MiB of the weight at a time are dequantized to the model's dtype,
                             and torch (cuBLAS) multiplies them; activations are not rounded
    invariant, fp32          the subclass's product for any number of rows
    experts                  all experts of a layer at once

Called by `triton_method` and `float8_method`.

Shapes: ... any leading dimensions, R rows, M rows of x, I input size, O output size.
"""

from abc import abstractmethod
from typing import Any

import torch

from quire.formats.block_quantized.kept_weight import KeptWeightMethod, kept_weight
from quire.formats.block_quantized.weights import BlockFormat
from quire.formats.grouped import GroupedExperts
from quire.formats.weight_format import ExpertLinears, LinearMethod, LinearModule, TritonLinears
from quire.kernels.activations import Gating
from quire.kernels.routing import Routing

_PIECE_BYTES = 32 << 20
"""Size of the part of a weight that is dequantized at a time, which should fit in the L2 cache."""


class TritonKeptMethod(KeptWeightMethod):
    """Multiplies a few rows by codes, and many by dequantized pieces of the weight."""

    #: Maximum number of rows of x that are multiplied by codes. For more rows, it is probably
    #: faster to dequantize the weight first; this was not measured.
    most_rows = 128

    #: Multiplies the experts of a layer at once.
    grouped: GroupedExperts

    def __init__(self, block_format: BlockFormat, linears: TritonLinears) -> None:
        super().__init__(block_format)
        self._operators = linears.operators
        self._is_invariant = linears.batch_invariant

    @abstractmethod
    def multiply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Multiply x, in the codes' column order, by codes; like `apply`."""

    @abstractmethod
    def numbers(
        self, weight: Any, rows: torch.Tensor | range, num_inputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Dequantize rows [R] int64, or a range of step 1, of a kept weight -> [R, I] of `dtype`,
        in the codes' column order."""

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        kept = kept_weight(linear)
        if kept.inputs is not None:
            x = x[..., kept.inputs]
        is_many = x.numel() > self.most_rows * linear.input_size
        if is_many and not self._is_invariant and x.dtype == kept.dtype != torch.float32:
            return self._multiply_numbers(linear, x, out_dtype or x.dtype)
        return self.multiply(linear, x, out_dtype)

    def _multiply_numbers(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply many rows of x by dequantized pieces of the weight. x has the codes' column
        order."""
        rows, weight = x.reshape(-1, linear.input_size), kept_weight(linear).weight
        out = torch.empty(len(rows), linear.output_size, dtype=out_dtype, device=x.device)
        count = max(1, _PIECE_BYTES // (linear.input_size * x.element_size()))
        for start in range(0, linear.output_size, count):
            span = range(start, min(start + count, linear.output_size))
            piece = out[:, span.start : span.stop]
            numbers = self.numbers(weight, span, linear.input_size, x.dtype)
            bias = None if linear.bias is None else linear.bias[span.start : span.stop]
            _multiply_into(piece, rows, numbers, bias)
        return out.view(*x.shape[:-1], linear.output_size)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._operators.gated(gate_up, Gating())

    @property
    def groups_experts(self) -> bool:
        """False if the block format has an input order, since experts may have different ones."""
        return self._block_format.input_order is None

    def takes_experts_with(self, down: LinearMethod) -> bool:
        return down is self or (
            type(down) is type(self) and self.groups_experts and down.groups_experts
        )

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        if not self.groups_experts:
            return super().experts(layer, x, routing)
        return self.grouped.mix(layer, x, routing)

    def unpack(self, linear: LinearModule, outputs: torch.Tensor) -> torch.Tensor:
        kept = kept_weight(linear)
        numbers = self.numbers(kept.weight, outputs, linear.input_size, kept.dtype)
        if kept.inputs is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, kept.inputs, numbers)


def _multiply_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Set out [M, N] = x [M, I] weight [N, I]^T + bias [N]. Rows of out need not be adjacent in
    memory."""
    if out.dtype != x.dtype:
        is_wide = x.device.type == "cuda"
        wide = torch.mm(x, weight.T, out_dtype=out.dtype) if is_wide else x @ weight.T
        out.copy_(wide if bias is None else wide + bias)
    elif bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)
