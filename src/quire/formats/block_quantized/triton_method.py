"""Keeps block-quantized weights as codes on a GPU, and multiplies them by Triton kernels.

    up to 8 rows     `block_quantized_matmul`: int8 activations, and the sums that
                     `linear_methods` defines, so a row has the same bits in any batch
    up to 128 rows   `widened_block_matmul`: codes are dequantized in registers; activations are
                     not rounded
    more rows        by dequantized pieces of the weight, as in `triton_kept`
    invariant        `block_quantized_matmul` for any number of rows
    experts          all experts of a layer at once, by `grouped_block_quantized_matmul`

fp32 models take `block_quantized_matmul` for any number of rows. Measurements are in
docs/performance.md.

Shapes: ... any leading dimensions, M rows of x, I input size, O output size.
"""

from typing import Any

import torch

from quire.formats.block_quantized.float8_method import triton_float8_method
from quire.formats.block_quantized.kept_weight import kept_weight
from quire.formats.block_quantized.triton_kept import TritonKeptMethod
from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows, UnpackedRows
from quire.formats.grouped import GroupedExperts
from quire.formats.int8 import GivenInt8TorchMethod, TritonInt8Method
from quire.formats.weight_format import LinearMethod, LinearModule, TritonLinears

_WHOLE_ROW_GROUP = 128
"""The group size for formats with one scale per row: a row is stored as groups with equal
scales."""

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def triton_block_quantized_method(
    block_format: BlockFormat, linears: TritonLinears
) -> LinearMethod | None:
    """The method for `block_format`; None if no layout supports this block format."""
    if block_format.is_int8:
        return TritonGivenInt8Method(linears.operators, fuses_gates=not linears.batch_invariant)
    if block_format.is_float8:
        return triton_float8_method(block_format, linears)
    layout = layout_of(block_format)
    return None if layout is None else TritonBlockQuantizedMethod(block_format, layout, linears)


def layout_of(block_format: BlockFormat) -> Any:
    """The `BlockQuantizedLayout` for `block_format`; None if there is none."""
    # Triton may be missing, and takes a while to load.
    from quire.kernels.triton.linear.block_quantized_layout import BlockQuantizedLayout, ptx_of
    from quire.kernels.triton.support import is_interpreting

    group_size = block_format.group_size or _WHOLE_ROW_GROUP
    in_blocks = bool(block_format.block_size)
    is_float4 = block_format.has_output_factors
    width = 4 if block_format.width <= 4 else 8
    # Levels of eight bits are stored minus their zero, and must then be from -128 to 127.
    is_signed = block_format.has_zeros or 2**block_format.width - 128 <= block_format.zero <= 128
    is_served = (
        block_format.width <= 8
        and group_size in ((16, 32, 64, 128) if in_blocks or is_float4 else (32, 64, 128))
        and block_format.block_size in (0, 256)
        and (in_blocks or is_float4 or block_format.scale_dtype in _HALF_DTYPES)
        and (width == 4 or (block_format.table is None and is_signed))
        and not (block_format.table and (block_format.zero or block_format.has_zeros))
        and not (in_blocks and block_format.has_zeros)
        and not (is_float4 and (in_blocks or block_format.has_zeros or block_format.has_offsets))
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
        is_blocked=in_blocks or is_float4,
        has_float8=is_float4,
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
    if block_format.has_output_factors:
        scales = scales.view(torch.uint8)
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


class TritonBlockQuantizedMethod(TritonKeptMethod):
    """Multiplies weights of one block format by Triton kernels. `layout` is the format's
    `BlockQuantizedLayout`. A kept weight is a `BlockQuantizedWeight` without the bias."""

    def __init__(self, block_format: BlockFormat, layout: Any, linears: TritonLinears) -> None:
        super().__init__(block_format, linears)
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import grouped_block_quantized_matmul as grouped
        from quire.kernels.triton.linear import widened_block_matmul as widened
        from quire.kernels.triton.linear.block_quantized_layout import BlockQuantizedWeight
        from quire.kernels.triton.linear.block_quantized_matmul import block_quantized_matmul
        from quire.kernels.triton.linear.block_quantized_rows import unpack_rows

        self._layout = layout
        self._make_weight = BlockQuantizedWeight
        self._multiply, self._unpack = block_quantized_matmul, unpack_rows
        self._widened = widened

        def group(linears: tuple[LinearModule, ...]) -> object:
            return grouped.group_block_quantized_weights(
                [self._weight(linear) for linear in linears]
            )

        self.grouped = GroupedExperts(
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

    def multiply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None
    ) -> torch.Tensor:
        is_few = x.numel() < self._widened.LEAST_ROWS * linear.input_size
        is_rounded = is_few or self._is_invariant or x.dtype not in self._widened.DTYPES
        multiply = self._multiply if is_rounded else self._widened.widened_block_matmul
        output: torch.Tensor = multiply(x, self._weight(linear), out_dtype)
        return output

    def numbers(
        self, weight: Any, rows: torch.Tensor | range, num_inputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        numbers: torch.Tensor = self._unpack(weight, rows, num_inputs, dtype)
        return numbers

    def _weight(self, linear: LinearModule) -> Any:
        weight = kept_weight(linear).weight
        return self._make_weight(weight.layout, weight.levels, weight.words, linear.bias)
