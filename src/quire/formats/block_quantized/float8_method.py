"""Keeps a checkpoint's fp8 weights (e4m3) on a GPU, and multiplies them by Triton kernels.

Activations keep the model's dtype. Codes are widened to it in the kernels, which is exact, and
scales multiply sums in fp32.

    up to 16 rows    `skinny_matmul`
    up to 256 rows   `matmul`
    more rows        by dequantized pieces of the weight, as in `triton_kept`
    invariant, fp32  `matmul` for any number of rows, so a row has the same bits in any batch
    experts          `grouped_matmul`

Called by `linear_methods`.

Shapes: ... any leading dimensions, R rows, I input size, O output size, G groups of inputs.
"""

from dataclasses import dataclass

import torch

from quire.formats.block_quantized.kept_weight import kept_weight
from quire.formats.block_quantized.triton_kept import TritonKeptMethod
from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.formats.grouped import GroupedExperts, biases_of
from quire.formats.weight_format import LinearModule, TritonLinears

_NAN_CODE = 0x7F
"""The code of NaN, without its sign."""


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """An fp8 weight as the kernels read it."""

    #: e4m3 codes, [O, I] uint8.
    codes: torch.Tensor

    #: [G, O] fp32; NaN if a code of the group is NaN, since all of its results would be.
    scales: torch.Tensor


class TritonFloat8Method(TritonKeptMethod):
    """Multiplies fp8 weights of one block format. A kept weight is a `Float8Weight`."""

    #: By arithmetic for an H200: from about 400 rows on, the share of the matrix rate that
    #: `matmul` lacks beside cuBLAS takes longer than to dequantize. Not measured.
    most_rows = 256

    def __init__(self, block_format: BlockFormat, linears: TritonLinears) -> None:
        super().__init__(block_format, linears)
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import float8_rows, grouped_matmul, matmul, skinny_matmul

        self._matmul, self._skinny, self._rows = matmul, skinny_matmul, float8_rows

        def group(linears: tuple[LinearModule, ...]) -> object:
            weights = [_weight(linear) for linear in linears]
            return grouped_matmul.group_weights(
                [each.codes for each in weights],
                biases_of(linears),
                [each.scales for each in weights],
            )

        self.grouped = GroupedExperts(
            group,
            grouped_matmul.grouped_matmul,
            linears.operators,
            has_wide_tiles=not linears.batch_invariant,
        )

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return num_outputs * (num_inputs + 4 * self._num_groups(num_inputs))

    def empty(self, num_outputs: int, num_inputs: int, device: torch.device) -> Float8Weight:
        codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=device)
        shape = (self._num_groups(num_inputs), num_outputs)
        return Float8Weight(codes, torch.empty(shape, dtype=torch.float32, device=device))

    def _num_groups(self, num_inputs: int) -> int:
        return num_inputs // (self._block_format.group_size or num_inputs)

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        start = linear.part_start(index) + first_row
        weight, given = _weight(linear), rows.unpacked()
        codes = given.codes.to(weight.codes.device)
        is_nan = (codes & _NAN_CODE) == _NAN_CODE
        has_nan = is_nan.view(*given.scales.shape, -1).any(-1)
        scales = given.scales.to(codes.device).masked_fill(has_nan, torch.nan)
        weight.codes[start : start + len(rows)] = codes
        weight.scales[:, start : start + len(rows)] = scales.T

    def multiply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None
    ) -> torch.Tensor:
        weight = _weight(linear)
        output: torch.Tensor
        if self._is_skinny(linear, x):
            output = self._skinny.skinny_matmul(
                x, weight.codes, linear.bias, out_dtype=out_dtype, scales=weight.scales
            )
        else:
            output = self._matmul.matmul(x, weight.codes, linear.bias, out_dtype, weight.scales)
        return output

    def silu_mul(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        if not self._is_skinny(linear, x):
            return super().silu_mul(linear, x)
        weight = _weight(linear)
        output: torch.Tensor = self._skinny.skinny_matmul(
            x, weight.codes, linear.bias, gated=True, scales=weight.scales
        )
        return output

    def _is_skinny(self, linear: LinearModule, x: torch.Tensor) -> bool:
        is_few = x.numel() // linear.input_size <= self._skinny.MAX_ROWS
        return is_few and x.dtype in self._skinny.DTYPES and not self._is_invariant

    def numbers(
        self, weight: Float8Weight, rows: torch.Tensor | range, num_inputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        numbers: torch.Tensor = self._rows.unpack_float8_rows(
            weight.codes, weight.scales, rows, dtype
        )
        return numbers


def triton_float8_method(
    block_format: BlockFormat, linears: TritonLinears
) -> TritonFloat8Method | None:
    """The method for fp8 weights of `block_format`; None if the kernels can't read its groups."""
    # Triton may be missing, and takes a while to load.
    from quire.kernels.triton.linear.matmul import SMALLEST_GROUP

    is_served = block_format.group_size % SMALLEST_GROUP == 0
    return TritonFloat8Method(block_format, linears) if is_served else None


def _weight(linear: LinearModule) -> Float8Weight:
    weight = kept_weight(linear).weight
    assert isinstance(weight, Float8Weight)
    return weight
