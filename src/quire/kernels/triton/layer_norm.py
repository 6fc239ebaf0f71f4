"""LayerNorm in Triton.

    y = weight * (x - mean) / sqrt(mean((x - mean)^2) + eps) + bias

is computed in fp32 and rounded once. `kernels/layer_norm.py` has the source and is the reference.
Sums are trees whose shape depends only on D, so a row's bits don't depend on the other rows.
Results differ from torch's only by the order of sums.

Bound by memory: R rows read and write 2 R D elements. A program holds one whole row in registers.

Shapes: R rows (all leading dimensions together), D normalised size. dtypes: fp32, bf16, fp16, the
same for all tensors. Called by `operators.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.rms_norm import MAX_SIZE
from quire.kernels.triton.support import as_rows, check_same, next_power_of_two

_THREAD_ELEMENTS = 8


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x [..., D], weight and bias [D] -> [..., D], contiguous. A bias of None means zeros."""
    for name, values in (("weight", weight), ("bias", bias)):
        if values is None:
            continue
        check_same(name, values, "x", x)
        if values.shape != x.shape[-1:] or not values.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(values.shape)}, strides {values.stride()}, but x, "
                f"{tuple(x.shape)}, needs {tuple(x.shape[-1:])}, contiguous"
            )
    if x.shape[-1] > MAX_SIZE:
        raise ValueError(f"x is {tuple(x.shape)}, but its last dimension may be {MAX_SIZE} at most")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows = as_rows(x)
        block = next_power_of_two(rows.shape[1])
        layer_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            bias,
            out,
            rows.stride(0),
            eps,
            D=rows.shape[1],
            BLOCK_D=block,
            num_warps=max(4, min(32, block // (32 * _THREAD_ELEMENTS))),
            enable_fp_fusion=True,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def layer_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, D], rows x_stride apart
    weight_ptr,  # [D]
    bias_ptr,  # [D], or None
    out_ptr,  # [R, D], contiguous
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    x = tl.load(x_ptr + row * x_stride + columns, mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / D, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / D + eps)
    y = centred * scale * tl.load(weight_ptr + columns, mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + columns, y.to(out_ptr.dtype.element_ty), mask)
