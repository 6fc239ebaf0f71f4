"""Keeps block-quantized weights as codes in the layouts of the native CPU kernels.

`kernels.cpu.block_quantized` describes the layouts and packs weights. If the processor has fused
multiply-adds, products are bit-identical to those defined by `linear_methods`. Called by
`linear_methods`. fp8 weights are multiplied as `csrc/linear/linear_float8.h` says. NVFP4 weights
are widened to fp8 while they are loaded, without rounding.
"""

import torch

from quire.formats.block_quantized.weights import (
    BlockFormat,
    BlockQuantizedRows,
    CodeWords,
    UnpackedRows,
    WordRows,
)
from quire.formats.packed import PackedMethod, packed
from quire.formats.weight_format import LinearModule, WideInputsMethod
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.block_quantized.kernel_formats import (
    BLOCK_TYPES,
    KernelBlockFormat,
    code_format_struct,
    weights_struct,
)
from quire.kernels.cpu.block_quantized.quantized_linear import BlockQuantizedLinear, GivenLinear
from quire.kernels.cpu.block_quantized.words import unpack_words
from quire.kernels.cpu.library import NativeKernels

_LARGEST_GROUP = 128
_INPUTS_PER_WIDE = 128
"""One input in this number of inputs is wide."""


def native_block_quantized_method(
    kernels: NativeKernels, block_format: BlockFormat
) -> PackedMethod | None:
    """The method for `block_format`; None if no layout supports this block format."""
    if block_format.is_int8:
        return GivenInt8Method(kernels)
    if block_format.is_float8:
        return Float8Method(kernels, block_format)
    if block_format.has_output_factors:
        return WidenedFloat4Method(kernels, block_format)
    form = _form_of(block_format)
    return NativeBlockQuantizedMethod(kernels, block_format, form) if form.has_kernels else None


class NativeBlockQuantizedMethod(PackedMethod, WideInputsMethod):
    """Keeps codes, scales, zeros and offsets in the kernels' layout, and the bias in fp32.

    Weights of wide inputs are kept a second time, in fp32.
    """

    def __init__(
        self, kernels: NativeKernels, block_format: BlockFormat, form: KernelBlockFormat
    ) -> None:
        """`form` is the kernels' layout for `block_format`."""
        super().__init__(kernels)
        self._block_format, self._form = block_format, form
        order = block_format.input_order
        self._order = None if order is None else order.inputs()

    def takes_quantized(self, index: int) -> bool:
        return True

    def num_wide(self, linear: LinearModule) -> int:
        return linear.input_size // _INPUTS_PER_WIDE

    def wide_bytes(self, num_outputs: int, num_inputs: int) -> int:
        code_format = code_format_struct(self._form, None, torch.float32)
        struct = weights_struct(self._form, code_format, num_outputs, num_inputs)
        struct.num_wide = num_wide = num_inputs // _INPUTS_PER_WIDE
        num_weights: int = self._kernels.library.num_scales(struct)
        return 4 * (num_weights + num_wide)

    def set_wide_inputs(self, linear: LinearModule, inputs: torch.Tensor) -> None:
        packed(linear).set_wide_inputs(inputs)

    def _make_packing(
        self, linear: LinearModule, has_bias: bool, dtype: torch.dtype
    ) -> BlockQuantizedLinear:
        weights = BlockQuantizedLinear(
            self._form,
            linear.output_size,
            linear.input_size,
            interleave=linear.part_sizes[0] if linear.gated else 0,
            has_bias=has_bias,
            dtype=dtype,
        )
        if self._order is not None:
            weights.set_input_order(self._order)
        return weights

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        weights, start = packed(linear), linear.part_start(index) + first_row
        assert isinstance(weights, BlockQuantizedLinear)
        if rows.blocks is not None and rows.blocks[0] in BLOCK_TYPES:
            weights.pack_blocks(*rows.blocks, start)
            return
        if isinstance(rows, WordRows):
            codes = rows.with_codes(_unpacked(rows.words))
        else:
            codes = rows.unpacked()
        weights.pack_codes(codes.codes, *self._numbers(codes), codes.factors, start)

    def _numbers(self, codes: UnpackedRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the scales of the kernels' groups, their zeros or offsets; None if there are
        neither)."""
        scales, seconds = codes.scales, codes.offsets
        if codes.zeros is not None:
            seconds = codes.zeros.to(self._form.scale_dtype)
        if self._block_format.group_size == self._form.group_size:
            return scales, seconds
        size = self._block_format.group_size or codes.codes.shape[1]
        num_groups = -(-codes.codes.shape[1] // self._form.group_size)
        group_of = torch.arange(num_groups) * self._form.group_size // size
        return scales[:, group_of], None if seconds is None else seconds[:, group_of]

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        code_format = code_format_struct(self._form, None, dtype)
        struct = weights_struct(self._form, code_format, num_outputs, num_inputs)
        num_bytes: int = self._kernels.library.packed_bytes(struct)
        return num_bytes


class GivenMethod(PackedMethod):
    """Keeps a checkpoint's codes of a byte and their fp32 scales in a `GivenLinear`."""

    @property
    def is_exact(self) -> bool:
        return True

    def takes_quantized(self, index: int) -> bool:
        return True

    def _make_packing(
        self, linear: LinearModule, has_bias: bool, dtype: torch.dtype
    ) -> GivenLinear:
        return GivenLinear(
            self._layout_for(dtype),
            linear.output_size,
            linear.input_size,
            group_size=self._group_size,
            interleave=linear.part_sizes[0] if linear.gated else 0,
            has_bias=has_bias,
            dtype=dtype,
        )


class GivenInt8Method(GivenMethod):
    """Keeps int8 weights with a scale for each output, in a block format with `is_int8`."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__(kernels, WeightLayout.INT8)

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        codes = rows.unpacked()
        levels = (codes.codes ^ 0x80).view(torch.int8)
        packed(linear).pack_int8(levels, codes.scales[:, 0], linear.part_start(index) + first_row)


class Float8Method(GivenMethod):
    """Keeps fp8 weights with a scale for each group of an output's inputs, in a block format with
    `is_float8`."""

    def __init__(self, kernels: NativeKernels, block_format: BlockFormat) -> None:
        super().__init__(kernels, WeightLayout.FLOAT8, block_format.group_size)

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        codes, weights = rows.unpacked(), packed(linear)
        assert isinstance(weights, GivenLinear)
        weights.pack_float8(codes.codes, codes.scales, linear.part_start(index) + first_row)


class WidenedFloat4Method(Float8Method):
    """Keeps weights of NVFP4 as fp8 weights of equal values, in a block format with
    `has_output_factors`: each entry of the table is a number of e4m3, and the scales of groups
    become fp32."""

    def __init__(self, kernels: NativeKernels, block_format: BlockFormat) -> None:
        super().__init__(kernels, block_format)
        values = torch.tensor(block_format.table, dtype=torch.float32)
        self._float8_of = values.to(torch.float8_e4m3fn).view(torch.uint8)

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        given, weights = rows.unpacked(), packed(linear)
        assert isinstance(weights, GivenLinear)
        codes = self._float8_of[given.codes.int()]
        weights.pack_float8(codes, given.float_scales(), linear.part_start(index) + first_row)


def _unpacked(words: CodeWords) -> torch.Tensor:
    codes = unpack_words(words.words, words.width, words.order)
    return codes[words.first : words.first + words.count]


def _form_of(block_format: BlockFormat) -> KernelBlockFormat:
    """The kernels' layout for a block format. A group that is too large for the kernels becomes
    several groups with the same scale."""
    size = block_format.group_size
    if size == 0 or (size > _LARGEST_GROUP and size % _LARGEST_GROUP == 0):
        size = _LARGEST_GROUP
    return KernelBlockFormat(
        block_format.width,
        size,
        block_format.zero,
        block_format.block_size,
        block_format.scale_dtype,
        block_format.has_zeros,
        block_format.has_offsets,
        block_format.table,
    )
