"""A linear's weights packed for the native kernels, and their product.

    out[m, n] = sum over k of x[m, k] weight[n, k] + bias[n]

The order of the sum over k does not depend on m, so a row's result is the same in every batch.
Called by `formats.packed`. `recorder.py` uses the structures, but not `apply`.

Shapes: M rows, K inputs, N outputs. dtypes: fp32 and bf16.
"""

import ctypes

import torch

from quire.kernels.compensation import BLOCK, can_compensate
from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import DTYPES, DType, Epilogue, WeightLayout
from quire.kernels.cpu.adapters.packed_adapters import PackedAdapters
from quire.kernels.cpu.library import NativeKernels, load_library
from quire.kernels.cpu.memory import allocate

_LANES = 64  # packing pads outputs to multiples of 32; scales and bias have at least as many
_DENSE_DTYPES = {
    WeightLayout.DENSE_F32: (torch.float32,),
    WeightLayout.DENSE_BF16: (torch.bfloat16,),
}


MAX_INT8_INPUTS = 65_536
"""The largest number of inputs that share a scale. The sum of their products, each at most
255 * 127, fits 32 bits."""


class PackedLinear:
    """Packed weights, scales and bias, filled row by row. Owns its memory."""

    def __init__(
        self,
        weight_format: WeightLayout,
        num_outputs: int,
        num_inputs: int,
        *,
        group_size: int = 0,
        num_wide: int = 0,
        interleave: int = 0,
        has_bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Rows are quantized to `weight_format` when they are packed.

        In INT4, `group_size` inputs of a row of weights share a scale. In INT8, `group_size` inputs
        of a row of x share a scale, and the weights are rotated. A size of 0 means one scale for
        all inputs and no rotation. `num_wide`, a multiple of 4, is the number of inputs that INT4
        stores in eight bits. `interleave` is the number of gate outputs if the outputs are gate,
        then up; otherwise 0. `dtype` is the dtype of x and of the results.
        """
        if interleave and num_outputs != 2 * interleave:
            raise ValueError(
                f"interleave is {interleave}, but must be half of num_outputs, {num_outputs}, or 0"
            )
        is_whole = weight_format is WeightLayout.INT8 and group_size == 0
        if is_whole and num_inputs > MAX_INT8_INPUTS:
            raise ValueError(
                f"num_inputs is {num_inputs}, but sums of more than {MAX_INT8_INPUTS} products may"
                " leave 32 bits in INT8; keep this linear dense"
            )
        struct = abi.Weights(
            format=weight_format,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            group_size=group_size,
            num_wide=num_wide,
            interleave=interleave,
        )
        self._allocate_weights(struct, has_bias, dtype)

    def _allocate_weights(self, struct: abi.Weights, has_bias: bool, dtype: torch.dtype) -> None:
        """Allocate the memory that the structure describes, and set its addresses."""
        self.struct, self.dtype = struct, dtype
        self.format, self.interleave = WeightLayout(struct.format), struct.interleave
        self.num_outputs, self.num_inputs = struct.num_outputs, struct.num_inputs
        self._library = load_library()
        self._weights = allocate(self._library.packed_bytes(self.struct))
        self.struct.weights = self._weights.data_ptr()
        num_padded = self.num_outputs + 2 * _LANES
        self._scales = torch.zeros(self._library.num_scales(self.struct))
        self._wide_inputs = torch.arange(self.struct.num_wide, dtype=torch.int32)
        self._bias = torch.zeros(num_padded if has_bias else 0)
        arrays = {"scales": self._scales, "wide_inputs": self._wide_inputs, "bias": self._bias}
        for name, values in arrays.items():
            setattr(self.struct, name, values.data_ptr() if len(values) else None)
        self._library.clear_padding(self.struct)

    @property
    def kind(self) -> tuple[object, ...]:
        """Format and sizes as a key. One native call can multiply linears with equal keys."""
        sizes = (self.num_outputs, self.num_inputs, self.struct.group_size, self.interleave)
        return (self.format.name, *sizes, self.struct.num_wide, self.struct.bias is not None)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of weights, scales and bias."""
        parts = (self._weights, self._scales, self._wide_inputs, self._bias)
        return sum(part.numel() * part.element_size() for part in parts)

    def pack(self, rows: torch.Tensor, first: int) -> None:
        """Fill outputs [first, first + len(rows)) with rows [any, K], fp32 or bf16.

        Outputs have the checkpoint's order: gate, then up. Calls for different outputs may run at
        the same time. Raises ValueError.
        """
        rows = self._checked_rows(rows, first)
        dtype, stride = DTYPES[rows.dtype], rows.stride(0)
        self._library.pack_rows(
            self._library.best_isa,
            *(self.struct, rows.data_ptr(), dtype, stride, first, len(rows)),
        )

    def pack_compensated(self, rows: torch.Tensor, first: int, feedback: torch.Tensor) -> None:
        """Like `pack`, but round with `compensation.compensate_int8`; only for INT8 with a
        `group_size`.

        `feedback` is a result of `compensation.error_feedback` for this number of inputs. Raises
        ValueError.
        """
        shape = (self.num_inputs // BLOCK, BLOCK, BLOCK)
        is_rotated = self.format is WeightLayout.INT8 and self.struct.group_size > 0
        if not is_rotated or not can_compensate(self.num_inputs):
            raise ValueError(
                f"the format is {self.format.name} with {self.num_inputs} inputs, but only INT8"
                f" with rotated blocks of {BLOCK} inputs can be compensated"
            )
        if feedback.shape != shape or feedback.dtype != torch.float32:
            raise ValueError(
                f"feedback is {tuple(feedback.shape)} {feedback.dtype}, but must be {shape} float32"
            )
        rows, feedback = self._checked_rows(rows, first), feedback.contiguous()
        self._library.compensate_int8(
            self._library.best_isa,
            *(self.struct, rows.data_ptr(), DTYPES[rows.dtype], rows.stride(0), first, len(rows)),
            feedback.data_ptr(),
        )

    def _checked_rows(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """Check rows for outputs from `first` on, and return them with contiguous elements. Raises
        ValueError."""
        if self.format is WeightLayout.FLOAT8:
            raise ValueError(f"rows are {rows.dtype} numbers, but FLOAT8 takes only codes")
        if rows.dtype not in DTYPES or rows.ndim != 2 or rows.shape[1] != self.num_inputs:
            raise ValueError(
                f"rows are {tuple(rows.shape)} {rows.dtype}, but must be [any, {self.num_inputs}] "
                "float32 or bfloat16"
            )
        self._check_span(first, len(rows))
        return rows if rows.stride(1) == 1 else rows.contiguous()

    def pack_int8(self, rows: torch.Tensor, scales: torch.Tensor, first: int) -> None:
        """Like `pack`, for INT8: the weights are rows [R, K] int8 times scales [R] fp32."""
        if self.format is not WeightLayout.INT8 or rows.dtype != torch.int8:
            raise ValueError(
                f"rows are {rows.dtype} for {self.format.name}, but must be int8 for INT8"
            )
        if rows.shape != (len(scales), self.num_inputs) or scales.shape != (len(rows),):
            raise ValueError(
                f"rows are {tuple(rows.shape)} with {tuple(scales.shape)} scales, but must be "
                f"[any, {self.num_inputs}] with a scale each"
            )
        self._check_span(first, len(rows))
        rows, scales = rows.contiguous(), scales.float().contiguous()
        self._library.pack_int8(self.struct, rows.data_ptr(), scales.data_ptr(), first, len(rows))

    def _check_span(self, first: int, count: int) -> None:
        if not 0 <= first <= first + count <= self.num_outputs:
            raise ValueError(
                f"outputs [{first}, {first + count}) are not all within [0, {self.num_outputs})"
            )

    def set_wide_inputs(self, inputs: torch.Tensor) -> None:
        """Set the wide inputs, [num_wide] int32 in rising order, before rows are packed. Raises
        ValueError."""
        self._check_wide_inputs(inputs, self.struct.num_wide)
        self._wide_inputs.copy_(inputs)

    def _check_wide_inputs(self, inputs: torch.Tensor, count: int) -> None:
        is_rising = bool((inputs.diff() > 0).all())
        if inputs.shape != (count,) or inputs.dtype != torch.int32 or not is_rising:
            raise ValueError(
                f"inputs are {inputs.tolist()}, but must be {count} int32 in rising order"
            )
        if count and not 0 <= int(inputs[0]) <= int(inputs[-1]) < self.num_inputs:
            raise ValueError(f"inputs are {inputs.tolist()}, but must be below {self.num_inputs}")

    def set_bias(self, bias: torch.Tensor) -> None:
        """Set the bias [N], given in the checkpoint's order. Raises ValueError."""
        if bias.shape != (self.num_outputs,) or not len(self._bias):
            raise ValueError(
                f"bias is {tuple(bias.shape)}, but must be [{self.num_outputs}], for a linear that "
                "was made with has_bias"
            )
        self._bias[_packed_positions(self.num_outputs, self.interleave)] = bias.float()

    def finish(self) -> None:
        """Called when all rows are packed. Does nothing for this packing."""

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows [len(outputs), K] of a dense packing, for outputs [any] int64 in the checkpoint's
        order. A tied embedding gathers its rows from the head's packed weights in this way.

        Raises ValueError if the packing is not dense or an output is not within [0, N).
        """
        if self.format not in _DENSE_DTYPES:
            raise ValueError(
                f"the format is {self.format.name}, but only dense rows can be unpacked"
            )
        (dtype,) = _DENSE_DTYPES[self.format]
        return self._unpacked(outputs, dtype)

    def _unpacked(self, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        _check_outputs(outputs, self.num_outputs)
        rows = torch.empty((len(outputs), self.num_inputs), dtype=dtype)
        outputs = outputs.contiguous()
        self._library.unpack_rows(
            self.struct, outputs.data_ptr(), len(outputs), rows.data_ptr(), self.num_inputs
        )
        return rows


def apply(
    kernels: NativeKernels,
    linear: PackedLinear,
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    out_dtype: torch.dtype | None = None,
    adapter: PackedAdapters | None = None,
) -> torch.Tensor:
    """x [M, K] -> [M, N], or [M, N / 2] if the epilogue multiplies silu(gate) with up.

    x has the dtype of dense weights, or any of DTYPES if weights are quantized.
    The result is written to `out`, if given. With ADD_RESIDUAL it is added to `out`.
    `out_dtype` may be x's dtype, or fp32, which returns sums that were not rounded to x's dtype.
    With an `adapter`, its `PackedRows` must have been set for these M rows.
    Raises ValueError.
    """
    # First, check the operands.
    dtype = out.dtype if out is not None else out_dtype or x.dtype
    dtypes = _DENSE_DTYPES.get(linear.format, tuple(DTYPES))
    if x.dtype not in dtypes or x.ndim != 2 or x.shape[1] != linear.num_inputs:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, but must be [any, {linear.num_inputs}] "
            f"{' or '.join(map(str, dtypes))}"
        )
    is_gated = epilogue is Epilogue.SILU_MUL
    if is_gated and not linear.interleave:
        raise ValueError("epilogue is SILU_MUL, but the linear does not interleave gate and up")
    if dtype != x.dtype and (dtype != torch.float32 or epilogue is not Epilogue.STORE):
        raise ValueError(f"out is {dtype}, but must be {x.dtype}, or float32 with epilogue STORE")
    shape = (len(x), linear.num_outputs // 2 if is_gated else linear.num_outputs)
    if out is None:
        if epilogue is Epilogue.ADD_RESIDUAL:
            raise ValueError("out is None, but the epilogue ADD_RESIDUAL adds to it")
        out = torch.empty(shape, dtype=dtype)
    if out.shape != shape or (shape[1] > 1 and out.stride(1) != 1):
        raise ValueError(f"out is {tuple(out.shape)}, but must be {shape} with adjacent columns")
    # Then, multiply.
    if adapter is not None:
        adapter.check(linear.num_inputs, linear.num_outputs, x)
    x = x if x.stride(1) == 1 else x.contiguous()
    kernels.library.linear(
        kernels.context,
        ctypes.byref(linear.struct),
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        len(x),
        out.data_ptr(),
        DType.F32 if dtype is torch.float32 else DType.BF16,
        out.stride(0),
        epilogue,
        None if adapter is None else ctypes.byref(adapter.struct),
    )
    return out


def _check_outputs(outputs: torch.Tensor, num_outputs: int) -> None:
    if outputs.dtype != torch.int64 or outputs.ndim != 1:
        raise ValueError(
            f"outputs are {tuple(outputs.shape)} {outputs.dtype}, but must be [any] int64"
        )
    low, high = (outputs.amin().item(), outputs.amax().item()) if len(outputs) else (0, 0)
    if not 0 <= low <= high < num_outputs:
        raise ValueError(f"outputs are {low} to {high}, but must be within [0, {num_outputs})")


def _packed_positions(num_outputs: int, interleave: int) -> torch.Tensor:
    """The packed index of each of the checkpoint's outputs (csrc/linear/linear.h)."""
    outputs = torch.arange(num_outputs)
    if not interleave:
        return outputs
    is_up = (outputs >= interleave).long()
    index = outputs - is_up * interleave
    return index // 16 * 32 + is_up * 16 + index % 16
