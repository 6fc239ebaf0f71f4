"""RMSNorm, alone or after adding to the residual stream, in Triton.

    y = weight * round(x / sqrt(mean(x^2) + eps)), or round((weight + offset) * x / sqrt(...))

`kernels/rms_norm.py` has the formula, source and order of roundings, and is the reference. The sum
of squares is in fp32, in a tree whose shape depends only on D, so a row's bits don't depend on the
other rows. Results differ from torch's by that order: fp32 by some ulps, and bf16 and fp16 by one
ulp if a quotient lies near the middle of two numbers.

Bound by memory: R rows read and write 2 R D elements (4 R D with the residual), and each element is
read once, into registers. A program has several short rows, so that each thread has at least 16
bytes: heads of 128 elements leave no thread idle, and a row of 8192 uses 32 warps.

Shapes: R rows (all leading dimensions together), D normalised size. dtypes: fp32, bf16, fp16.
Called by `operators.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.dependent_launch import await_inputs, launch_options
from quire.kernels.triton.support import as_rows, check_same, next_power_of_two

#: The largest D whose row fits the registers of one program.
MAX_SIZE = 16384

_PROGRAM_ELEMENTS = 1024
_THREAD_ELEMENTS = 8


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float | None = None
) -> torch.Tensor:
    """x [..., D] of any strides, weight [D] -> [..., D], contiguous. A weight of None means ones.

    `offset` is added to the weight, and the quotient is then not rounded before the product.
    """
    if weight is not None:
        _check(x, weight)
    _check_size(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, offset, 1.0)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., D], weight [D] -> (norm of residual + scale * x, residual + scale * x).

    The sum is rounded to the dtype and overwrites `residual`, and the norm overwrites `x`, so that
    a step's activations stay in the L2 cache. Tensors that are not contiguous are copied first.
    """
    _check(x, weight)
    _check_size(x)
    check_same("residual", residual, "x", x)
    if residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)}, but must be as x, {tuple(x.shape)}")
    x, residual = x.contiguous(), residual.contiguous()
    _launch(x, residual, weight, eps, x, offset, scale)
    return x, residual


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_same("weight", weight, "x", x)
    if x.shape[-1:] != weight.shape or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)}, strides {weight.stride()}, but x, {tuple(x.shape)}, "
            f"needs {tuple(x.shape[-1:])}, contiguous"
        )


def _check_size(x: torch.Tensor) -> None:
    if x.shape[-1] > MAX_SIZE:
        raise ValueError(f"x is {tuple(x.shape)}, but its last dimension may be {MAX_SIZE} at most")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    offset: float | None,
    factor: float,
) -> None:
    """`out` is contiguous, has the shape of x, and may be x."""
    rows = as_rows(x)
    num_rows, size = rows.shape
    if not num_rows:
        return
    block = next_power_of_two(size)
    num_program_rows = max(1, _PROGRAM_ELEMENTS // block)
    num_warps = max(4, min(32, block // (32 * _THREAD_ELEMENTS)))
    rms_norm_kernel[(triton.cdiv(num_rows, num_program_rows),)](
        rows,
        residual,
        weight,
        out,
        num_rows,
        rows.stride(0),
        eps,
        D=size,
        BLOCK_D=block,
        BLOCK_R=num_program_rows,
        OFFSET=offset,
        FACTOR=factor,
        num_warps=num_warps,
        **launch_options(x.device),
        enable_fp_fusion=True,
    )


# The number of rows changes with each step, so Triton must not compile variants for it.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, D], rows x_stride apart
    residual_ptr,  # [R, D], contiguous, becomes residual + x; or None
    weight_ptr,  # [D]; None: ones
    out_ptr,  # [R, D], contiguous
    num_rows,
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OFFSET: tl.constexpr = None,  # added to the weight; None: the quotient is rounded first
    FACTOR: tl.constexpr = 1.0,  # multiplies x before it is added
    IS_EARLY: tl.constexpr = False,  # see dependent_launch.py
):
    await_inputs(IS_EARLY)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < D)[None, :]
    places = rows[:, None] * D + columns[None, :]
    dtype = out_ptr.dtype.element_ty

    # First, add x to the residual stream, if there is one.
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask, other=0.0)
    if residual_ptr is not None:
        x = add_rounded(tl.load(residual_ptr + places, mask, other=0.0), x, FACTOR)
        tl.store(residual_ptr + places, x, mask)
    # Then norm the rows.
    quotient = x.to(tl.float32) * inverse_size(x, eps, D)[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, columns < D, other=0.0)
        quotient = weigh(quotient, weight[None, :], dtype, OFFSET)
    tl.store(out_ptr + places, quotient.to(dtype), mask)


@triton.jit  # type: ignore[untyped-decorator]
def add_rounded(residual, x, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """residual + FACTOR * x, with the product and the sum rounded to their dtype."""
    dtype = residual.dtype
    x = x.to(tl.float32)
    if FACTOR != 1.0:
        x = (x * FACTOR).to(dtype).to(tl.float32)
    return (residual.to(tl.float32) + x).to(dtype)


@triton.jit
def inverse_size(x, eps, D):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x^2) + eps) of rows [..., D and zeros], in fp32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)


@triton.jit  # type: ignore[untyped-decorator]
def weigh(quotient, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fp32 quotient times the norm's weight, not rounded. The quotient is rounded to the dtype
    first, unless OFFSET is added to the weight."""
    weight = weight.to(tl.float32)
    if OFFSET is None:
        quotient = quotient.to(dtype).to(tl.float32)
    else:
        weight += OFFSET
    return quotient * weight
