"""The gate of a SwiGLU MLP: silu(gate) * up, in Triton.

Gate and up are the two halves of a fused projection.

    y = round(silu(gate)) * up,  silu(x) = x / (1 + exp(-x))

Formula, source and rounding: `kernels/silu_mul.py`, whose function is the reference. The
exponential is the processor's 2^x with the exponent scaled first, so silu has a relative error of
about (2 + |x|) 2^-23 in fp32; bf16 and fp16 round that away but for values near the middle of two.

Bound by memory: T rows read 2 T F elements and write T F, each thread 16 bytes at a time.

Shapes: T rows (all leading dimensions together), F intermediate size. dtypes: fp32, bf16, fp16.
Called by `operators.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import as_rows

_BLOCK_F = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2F], gate first -> [..., F], contiguous."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but its last dimension must be even")
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        rows = as_rows(gate_up)
        silu_mul_kernel[(rows.shape[0], triton.cdiv(size, _BLOCK_F))](
            rows, out, rows.stride(0), F=size, BLOCK_F=_BLOCK_F, num_warps=4
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # [T, 2F], rows gate_up_stride apart
    out_ptr,  # [T, F], contiguous
    gate_up_stride,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < F
    dtype = out_ptr.dtype.element_ty
    source = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(source, mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask, other=0.0).to(tl.float32)
    # exp(-x) overflows to infinity far below zero, and the quotient is the zero that silu nears.
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * F + columns, (silu * up).to(dtype), mask)
