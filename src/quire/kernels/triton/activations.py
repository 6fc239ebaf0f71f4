"""Activations, gates and the soft cap, in Triton.

`kernels/activations.py` has the formulas, sources and roundings, and is the reference. Functions
are computed in fp32 and rounded to the dtype wherever the reference stores a result. Exponentials
use the processor's 2^x of a scaled exponent, so functions have relative errors of about (2 + |x|)
2^-23 in fp32. Rounding to bf16 or fp16 hides the error, except for values near the midpoint of two
adjacent numbers of that dtype.

Bound by memory: each element is read and written once. A program computes a part of one row, so no
result depends on other rows.

Shapes: T tokens, H heads of a token (1 without heads), D elements of a row, F intermediate size, R
rows. dtypes: fp32, bf16, fp16, the same for all tensors of a call. Called by `operators.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.triton.support import as_rows, check_same, next_power_of_two

_BLOCK = 1024


def gated(gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """gate_up [..., 2F], gate before up -> the formula of `Gating`, [..., F], contiguous."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but its last dimension must be even")
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        rows = as_rows(gate_up)
        gated_kernel[(rows.shape[0], triton.cdiv(size, _BLOCK))](
            rows,
            out,
            rows.stride(0),
            F=size,
            ACTIVATION=gating.activation.value,
            LIMIT=gating.limit,
            ALPHA=gating.alpha,
            UP_OFFSET=gating.up_offset,
            BLOCK_F=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,  # each product is rounded
        )
    return out


def activate(x: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
    """x [..., D] -> act(x), contiguous."""
    return _map_rows(x, activation.value, 0.0)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x [..., D] -> cap * tanh(x / cap), contiguous."""
    return _map_rows(x, "soft_cap", cap)


def gate(x: torch.Tensor, by: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
    """x [..., D], `by` [..., D] or [..., 1] -> x * act(`by`), [..., D], contiguous.

    If `x` and `by` have the dimensions [T, H, D], their heads and tokens may have any strides.
    """
    check_same("by", by, "x", x)
    if by.shape[:-1] != x.shape[:-1] or by.shape[-1] not in (1, x.shape[-1]):
        raise ValueError(
            f"by is {tuple(by.shape)}, but must have x's shape, {tuple(x.shape)}, or a last"
            " dimension of 1"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        heads, by_heads = _as_heads(x), _as_heads(by)
        num_tokens, num_heads, size = heads.shape
        block = min(next_power_of_two(size), _BLOCK)
        gate_kernel[(num_tokens * num_heads, triton.cdiv(size, block))](
            heads,
            by_heads,
            out,
            *heads.stride()[:2],
            *by_heads.stride()[:2],
            H=num_heads,
            D=size,
            BY_ONE=by.shape[-1] != size,
            ACTIVATION=activation.value,
            BLOCK_D=block,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def _map_rows(x: torch.Tensor, function: str, cap: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows = as_rows(x)
        block = min(next_power_of_two(rows.shape[1]), _BLOCK)
        activate_kernel[(rows.shape[0], triton.cdiv(rows.shape[1], block))](
            rows,
            out,
            rows.stride(0),
            cap,
            D=rows.shape[1],
            FUNCTION=function,
            BLOCK_D=block,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [T, H, D] with contiguous elements; copied only if a view is impossible."""
    heads = x if x.dim() == 3 else as_rows(x).unsqueeze(1)
    return heads if heads.stride(2) == 1 or heads.shape[2] == 1 else heads.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # [R, 2F], rows gate_up_stride apart
    out_ptr,  # [R, F], contiguous
    gate_up_stride,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,  # None: gate and up are not clamped
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < F
    dtype = out_ptr.dtype.element_ty
    source = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(source, mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask, other=0.0).to(tl.float32)
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate).to(dtype).to(tl.float32)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        up = up.to(dtype).to(tl.float32)
    if UP_OFFSET != 0.0:
        up = (up + UP_OFFSET).to(dtype).to(tl.float32)
    if ALPHA != 1.0:
        share = _activate((gate * ALPHA).to(dtype).to(tl.float32), "sigmoid").to(dtype)
        gate = (gate * share.to(tl.float32)).to(dtype).to(tl.float32)
    else:
        gate = _activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * F + columns, (gate * up).to(dtype), mask)


@triton.jit  # type: ignore[untyped-decorator]
def activate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, D], rows x_stride apart
    out_ptr,  # [R, D], contiguous
    x_stride,
    cap,
    D: tl.constexpr,
    FUNCTION: tl.constexpr,  # an activation, or "soft_cap"
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < D
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + columns, mask, other=0.0).to(tl.float32)
    if FUNCTION == "soft_cap":
        share = _tanh((x / cap).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = share * cap
    else:
        y = _activate(x, FUNCTION)
    tl.store(out_ptr + row * D + columns, y.to(dtype), mask)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H, D]
    by_ptr,  # [T, H, D], or [T, H, 1] where BY_ONE
    out_ptr,  # [T, H, D], contiguous
    x_token_stride,
    x_head_stride,
    by_token_stride,
    by_head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BY_ONE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, head = row // H, row % H
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < D
    dtype = out_ptr.dtype.element_ty
    x_row = x_ptr + token * x_token_stride + head * x_head_stride
    by_row = by_ptr + token * by_token_stride + head * by_head_stride
    x = tl.load(x_row + columns, mask, other=0.0).to(tl.float32)
    if BY_ONE:
        by = tl.load(by_row + columns * 0, mask, other=0.0).to(tl.float32)
    else:
        by = tl.load(by_row + columns, mask, other=0.0).to(tl.float32)
    share = _activate(by, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * D + columns, (x * share).to(dtype), mask)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation function of x, in fp32. Where the exponential overflows to infinity, the
    quotient is 0, which is the function's limit."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif ACTIVATION == "identity":
        y = x
    elif ACTIVATION == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # x / 2 (1 + tanh(u)) = x / (1 + e^-2u)
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * u))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu_squared")
        y = tl.where(x < 0.0, 0.0, x)
        if ACTIVATION == "relu_squared":
            y = y * y
    return y


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x) in fp32. From |x| = 0.25 on, the formula is (1 - e) / (1 + e) with e = exp(-2 |x|),
    with the sign of x. Nearer to zero, 1 - e would lose digits, so the power series is used."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    square = size * size
    series = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
    near = size * (1.0 + square * (-1.0 / 3.0 + square * series))
    y = tl.where(size < 0.25, near, far)
    return tl.where(x < 0.0, -y, y)
