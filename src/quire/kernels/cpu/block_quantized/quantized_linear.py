"""A checkpoint's quantized weights of a linear, packed for the native kernels without rounding.

`csrc/block_quantized/layout.h` has the formula and the layout. `linear.apply` multiplies with the
kernels in `csrc/block_quantized/linear_flat.cpp` and `linear_two_level.cpp`.

Shapes: R rows (outputs), K inputs, N outputs, G groups, B blocks of 256 inputs.
"""

import ctypes

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import DTYPES, WeightLayout
from quire.kernels.cpu.block_quantized.kernel_formats import (
    BLOCK_SIZE,
    BLOCK_TYPES,
    KernelBlockFormat,
    code_format_struct,
    weights_struct,
)
from quire.kernels.cpu.linear import PackedLinear


class GivenLinear(PackedLinear):
    """A linear for a checkpoint's int8 weights (`pack_int8`) or fp8 weights (`pack_float8`), whose
    rows can be dequantized."""

    def __init__(
        self,
        weight_format: WeightLayout,
        num_outputs: int,
        num_inputs: int,
        *,
        group_size: int = 0,
        interleave: int = 0,
        has_bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`weight_format` is INT8 or FLOAT8. In FLOAT8, `group_size` inputs of an output share a
        scale; 0 means all. `dtype` is as in `PackedLinear`, and also the dtype of the rows that
        `unpack` returns.

        Raises ValueError in FLOAT8 if a number of inputs is not a multiple of 4.
        """
        if weight_format is WeightLayout.FLOAT8 and (num_inputs % 4 or group_size % 4):
            raise ValueError(
                f"num_inputs is {num_inputs} and group_size {group_size}, but FLOAT8 needs"
                " multiples of 4"
            )
        super().__init__(
            weight_format,
            num_outputs,
            num_inputs,
            group_size=group_size,
            interleave=interleave,
            has_bias=has_bias,
            dtype=dtype,
        )
        self._code_format = abi.CodeFormat(row_dtype=DTYPES[dtype])
        self.struct.code_format = ctypes.addressof(self._code_format)

    def pack_float8(self, codes: torch.Tensor, scales: torch.Tensor, first: int) -> None:
        """Like `pack`, for FLOAT8: the weights are `codes` [R, K], the bytes of float8_e4m3fn
        numbers, times `scales` [R, G] fp32. Raises ValueError."""
        if self.format is not WeightLayout.FLOAT8:
            raise ValueError(f"the format is {self.format.name}, but fp8 weights need FLOAT8")
        groups = -(-self.num_inputs // (self.struct.group_size or self.num_inputs))
        _check("codes", codes, (len(codes), self.num_inputs), torch.uint8)
        _check("scales", scales, (len(codes), groups), torch.float32)
        self._check_span(first, len(codes))
        codes, scales = codes.contiguous(), scales.contiguous()
        rows = abi.CodeRows(codes.data_ptr(), scales.data_ptr())
        self._library.pack_codes(self.struct, ctypes.byref(rows), first, len(codes))

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows [len(outputs), K] in the linear's dtype, for outputs [any] int64. Raises
        ValueError."""
        return self._unpacked(outputs, self.dtype)


class BlockQuantizedLinear(PackedLinear):
    """A linear whose weights are packed codes, filled row by row. Owns its memory."""

    def __init__(
        self,
        form: KernelBlockFormat,
        num_outputs: int,
        num_inputs: int,
        *,
        interleave: int = 0,
        has_bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`interleave` and `dtype` are as in `PackedLinear`; unpacked rows have this `dtype`, too.

        Raises ValueError if no kernel supports `form`.
        """
        if not form.has_kernels:
            raise ValueError(f"form is {form}, which no native kernel multiplies")
        if interleave and num_outputs != 2 * interleave:
            raise ValueError(
                f"interleave is {interleave}, but must be half of num_outputs, {num_outputs}, or 0"
            )
        self.form = form
        self._order: torch.Tensor | None = None
        table = None if form.table is None else torch.tensor(form.table, dtype=torch.int8)
        self._code_format = code_format_struct(form, table, dtype)
        self._table = table
        struct = weights_struct(form, self._code_format, num_outputs, num_inputs)
        struct.interleave = interleave
        self._allocate_weights(struct, has_bias, dtype)

    @property
    def kind(self) -> tuple[object, ...]:
        order = None if self._order is None else self._order.data_ptr()
        return (*super().kind, self.form, order, self.struct.wide_inputs)

    def set_input_order(self, order: torch.Tensor) -> None:
        """Let input k of the packed weights multiply input order[k] of x.

        `order` [K] is a permutation. The kernels gather x in this order before they quantize it.
        Rows from `unpack` have the order of x. Raises ValueError.
        """
        wanted = torch.arange(self.num_inputs)
        if order.shape != wanted.shape or not torch.equal(order.long().sort().values, wanted):
            raise ValueError(f"order is not a permutation of the {self.num_inputs} inputs")
        self._order = order.int().contiguous()
        self._code_format.input_order = self._order.data_ptr()

    def set_wide_inputs(self, inputs: torch.Tensor) -> None:
        """Multiply these inputs of x, any number of them, without rounding.

        `inputs` [W] int32 are in rising order. All rows must be packed. Raises ValueError.
        """
        self._check_wide_inputs(inputs, len(inputs))
        if self._order is not None:
            inputs = torch.isin(self._order, inputs).nonzero()[:, 0].int()
        self.struct.num_wide, self._wide_inputs = len(inputs), inputs.clone()
        self._scales = torch.zeros(self._library.num_scales(self.struct))
        self.struct.scales = self._scales.data_ptr()
        self.struct.wide_inputs = self._wide_inputs.data_ptr()
        self._library.pack_wide(self.struct)

    def pack(self, rows: torch.Tensor, first: int) -> None:
        """Always raises ValueError, since this packing does not round numbers to codes."""
        raise ValueError(f"rows are {rows.dtype} numbers, but this packing takes only codes")

    def pack_codes(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        seconds: torch.Tensor | None,
        factors: torch.Tensor | None,
        first: int,
    ) -> None:
        """Fill outputs [first, first + R), in the checkpoint's order: gate, then up.

        `codes` [R, K] uint8 are below 2^width. `scales` and `seconds` are [R, G]. `seconds` are the
        zeros or offsets, or None if the form has neither.
        In flat forms `scales` and `seconds` have the form's scale_dtype, and `factors` is None.
        Zeros are whole numbers of at most 128, or of at most 256 for 8-bit codes.
        In forms with blocks, scales are int8, seconds uint8 and factors [R, B, 2] fp16.
        Calls for different outputs may run at the same time. Raises ValueError.
        """
        self._check_codes(codes, scales, seconds, factors)
        self._check_span(first, len(codes))
        given = (codes, scales, seconds, factors)
        tensors = [None if each is None else each.contiguous() for each in given]
        rows = abi.CodeRows(*(None if each is None else each.data_ptr() for each in tensors))
        self._library.pack_codes(self.struct, ctypes.byref(rows), first, len(codes))

    def _check_codes(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        seconds: torch.Tensor | None,
        factors: torch.Tensor | None,
    ) -> None:
        form, count = self.form, len(codes)
        groups = (count, -(-self.num_inputs // form.group_size))
        blocks = (count, -(-self.num_inputs // BLOCK_SIZE), 2)
        of_scales, of_seconds = form.scale_dtype, form.scale_dtype
        if form.block:
            of_scales, of_seconds = torch.int8, torch.uint8
        has_second = form.has_zeros or form.has_offsets
        _check("codes", codes, (count, self.num_inputs), torch.uint8)
        _check("scales", scales, groups, of_scales)
        _check("seconds", seconds, groups if has_second else None, of_seconds)
        _check("factors", factors, blocks if form.block else None, torch.float16)
        if form.has_zeros and seconds is not None:
            is_zero = (seconds >= 0) & (seconds <= 256) & (seconds == seconds.round())
            if not (is_zero & (seconds <= 128) if form.width < 8 else is_zero).all():
                raise ValueError("zeros must be integers from 0 to 128, or to 256 for 8-bit codes")

    def pack_blocks(self, name: str, rows: torch.Tensor, first: int) -> None:
        """Like `pack_codes`, but from a GGUF tensor's stored rows [R, bytes] uint8.

        `name` is the GGUF type of the blocks, which must match the form. Raises ValueError.
        """
        kind = BLOCK_TYPES.get(name)
        if kind is None or self.num_inputs % kind.size:
            raise ValueError(
                f"name is {name!r}, but must be one of {', '.join(BLOCK_TYPES)}, with a block size"
                f" that divides the {self.num_inputs} inputs"
            )
        _check(
            "rows", rows, (len(rows), self.num_inputs // kind.size * kind.num_bytes), torch.uint8
        )
        self._check_span(first, len(rows))
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        self._library.pack_blocks(
            self.struct, kind.number, rows.data_ptr(), rows.stride(0), first, len(rows)
        )

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows [len(outputs), K] in the linear's dtype, for outputs [any] int64. Raises
        ValueError."""
        return self._unpacked(outputs, self.dtype)


def _check(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    wanted = None if shape is None else (shape, dtype)
    if found != wanted:
        raise ValueError(f"{name} are {found}, but must be {wanted}")
