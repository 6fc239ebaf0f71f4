"""Keeps block-quantized weights as codes on a GPU, and multiplies them by Triton kernels.

    up to 128 rows   `block_quantized_matmul`: int8 activations, and the sums that
                     `linear_methods` defines, so a row has the same bits in any batch
    more rows        some MiB of the weight at a time are dequantized to the model's dtype, and
                     torch (cuBLAS) multiplies them; activations are not rounded
    invariant        `block_quantized_matmul` for any number of rows
    experts          all experts of a layer at once, by `grouped_block_quantized_matmul`

fp32 models take `block_quantized_matmul` for any number of rows. Measurements are in
docs/performance.md.

Shapes: ... any leading dimensions, M rows of x, I input size, O output size.
"""

from typing import Any

import torch

from quire.formats.block_quantized.kept_weight import KeptWeightMethod, kept_weight
from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows, UnpackedRows
from quire.formats.grouped import GroupedExperts
from quire.formats.int8 import GivenInt8TorchMethod, TritonInt8Method
from quire.formats.weight_format import (
    ExpertLinears,
    LinearMethod,
    LinearModule,
    TritonLinears,
)
from quire.kernels.activations import Gating
from quire.kernels.routing import Routing

_MOST_ROWS = 128
"""Maximum number of rows of x that are multiplied by codes. For more rows, it is probably faster to
dequantize the weight first; this was not measured."""

_WHOLE_ROW_GROUP = 128
"""The group size for formats with one scale per row: a row is stored as groups with equal
scales."""

_PIECE_BYTES = 32 << 20
"""Size of the part of a weight that is dequantized at a time, which should fit in the L2 cache."""


def triton_block_quantized_method(
    block_format: BlockFormat, linears: TritonLinears
) -> LinearMethod | None:
    """The method for `block_format`; None if no layout supports this block format."""
    if block_format.is_int8:
        return TritonGivenInt8Method(linears.operators, fuses_gates=not linears.batch_invariant)
    layout = layout_of(block_format)
    return None if layout is None else TritonBlockQuantizedMethod(block_format, layout, linears)


def layout_of(block_format: BlockFormat) -> Any:
    """The `BlockQuantizedLayout` for `block_format`; None if there is none."""
    # Triton may be missing, and takes a while to load.
    from quire.kernels.triton.linear.block_quantized_layout import BlockQuantizedLayout, ptx_of
    from quire.kernels.triton.support import is_interpreting

    group_size = block_format.group_size or _WHOLE_ROW_GROUP
    in_blocks = bool(block_format.block_size)
    width = 4 if block_format.width <= 4 else 8
    # Levels of eight bits are stored minus their zero, and must then be from -128 to 127.
    is_signed = block_format.has_zeros or 2**block_format.width - 128 <= block_format.zero <= 128
    is_served = (
        block_format.width <= 8
        and group_size in ((16, 32, 64, 128) if in_blocks else (32, 64, 128))
        and block_format.block_size in (0, 256)
        and (in_blocks or block_format.scale_dtype in (torch.float16, torch.bfloat16))
        and (width == 4 or (block_format.table is None and is_signed))
        and not (block_format.table and (block_format.zero or block_format.has_zeros))
        and not (in_blocks and block_format.has_zeros)
    )
    if not is_served:
        return None
    return BlockQuantizedLayout(
        block_format.name,
        width,
        group_size,
        zero=0 if width == 8 or block_format.has_zeros else block_format.zero,
        table=block_format.table,
        has_zeros=block_format.has_zeros,
        has_offsets=block_format.has_offsets,
        has_bfloat=not in_blocks and block_format.scale_dtype == torch.bfloat16,
        is_blocked=in_blocks,
        ptx=None if is_interpreting() else ptx_of(block_format.table),
    )


def _packed(layout: Any, codes: UnpackedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack codes into the layout's levels and words. Raises ValueError for offsets above 127."""
    block_format, levels = codes.block_format, codes.codes
    scales, zeros, offsets = codes.scales, codes.zeros, codes.offsets
    if layout.width == 8:
        # Codes become signed by subtracting their common zero. If groups have zeros, 128 is
        # subtracted from codes and zeros.
        levels = _signed(levels, 128 if block_format.has_zeros else block_format.zero)
        zeros = None if zeros is None else _signed(zeros, 128)
    elif zeros is not None:
        zeros = zeros.view(torch.int8)
    if offsets is not None and block_format.block_size:
        if int(offsets.max()) > 127:
            raise ValueError(
                f"{block_format.name} has an offset of {int(offsets.max())}, but the"
                " largest supported offset is 127"
            )
        offsets = offsets.view(torch.int8)
    if not block_format.group_size:
        groups = -(-levels.shape[1] // layout.group_size)
        scales = scales.expand(-1, groups)
        zeros = None if zeros is None else zeros.expand(-1, groups)
        offsets = None if offsets is None else offsets.expand(-1, groups)
    packed: tuple[torch.Tensor, torch.Tensor]
    packed = layout.pack(levels, scales, zeros, offsets, codes.factors)
    return packed


def _signed(numbers: torch.Tensor, zero: int) -> torch.Tensor:
    """uint8 `numbers` minus `zero`, as int8."""
    return (numbers.short() - zero).to(torch.int8)


class TritonGivenInt8Method(GivenInt8TorchMethod, TritonInt8Method):
    """Multiplies int8 weights and scales of the checkpoint by `int8_matmul`."""

    is_rotated = False


class TritonBlockQuantizedMethod(KeptWeightMethod):
    """Multiplies weights of one block format by Triton kernels. `layout` is the format's
    `BlockQuantizedLayout`. A kept weight is a `BlockQuantizedWeight` without the bias."""

    def __init__(self, block_format: BlockFormat, layout: Any, linears: TritonLinears) -> None:
        super().__init__(block_format)
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import grouped_block_quantized_matmul as grouped
        from quire.kernels.triton.linear.block_quantized_layout import BlockQuantizedWeight
        from quire.kernels.triton.linear.block_quantized_matmul import block_quantized_matmul
        from quire.kernels.triton.linear.block_quantized_rows import unpack_rows

        self._layout = layout
        self._operators = linears.operators
        self._is_invariant = linears.batch_invariant
        self._make_weight = BlockQuantizedWeight
        self._multiply, self._unpack = block_quantized_matmul, unpack_rows

        def group(linears: tuple[LinearModule, ...]) -> object:
            return grouped.group_block_quantized_weights(
                [self._weight(linear) for linear in linears]
            )

        self._experts = GroupedExperts(
            group, grouped.grouped_block_quantized_matmul, linears.operators
        )

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        num_bytes: int = self._layout.num_bytes(num_outputs, num_inputs)
        return num_bytes + (0 if self._block_format.input_order is None else 8 * num_inputs)

    def empty(self, num_outputs: int, num_inputs: int, device: torch.device) -> Any:
        levels, words = self._layout.empty(num_outputs, num_inputs, device)
        return self._make_weight(self._layout, levels, words, None)

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        start = linear.part_start(index) + first_row
        weight, codes = kept_weight(linear).weight, rows.unpacked()
        device = weight.levels.device
        levels, words = _packed(self._layout, codes.mapped(lambda tensor: tensor.to(device)))
        weight.levels[:, start : start + len(rows)] = levels
        weight.words[:, :, start : start + len(rows)] = words

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        kept = kept_weight(linear)
        if kept.inputs is not None:
            x = x[..., kept.inputs]
        is_many = x.numel() > _MOST_ROWS * linear.input_size
        if is_many and not self._is_invariant and x.dtype == kept.dtype != torch.float32:
            return self.multiply_numbers(linear, x, out_dtype or x.dtype)
        output: torch.Tensor = self._multiply(x, self._weight(linear), out_dtype)
        return output

    def multiply_numbers(
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
            numbers = self._unpack(weight, span, linear.input_size, x.dtype)
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
            isinstance(down, TritonBlockQuantizedMethod)
            and self.groups_experts
            and down.groups_experts
        )

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        if not self.groups_experts:
            return super().experts(layer, x, routing)
        return self._experts.mix(layer, x, routing)

    def _weight(self, linear: LinearModule) -> Any:
        weight = kept_weight(linear).weight
        return self._make_weight(weight.layout, weight.levels, weight.words, linear.bias)

    def unpack(self, linear: LinearModule, outputs: torch.Tensor) -> torch.Tensor:
        kept = kept_weight(linear)
        numbers: torch.Tensor = self._unpack(kept.weight, outputs, linear.input_size, kept.dtype)
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
