"""The Triton product for few rows: y = x W^T + b.

A decode step of few streams spends most of its time in it. Nothing but reading W counts: 2 N K
bytes, once, against 2 M N K operations that the tensor cores hide (at M = 16 less than a tenth of
what an H200's could do meanwhile). So:

- W is the left operand of the tensor core's product, its outputs along the 16 of m16 n8 k16, and
  the rows of x are the n: 8 or 16 with padding, which is zero and is not read.
- A program streams 32 rows of W from end to end, in stages of two tiles of 32 x 128 (16 KiB) with
  three stages in flight, 16 bytes a thread and request. 48 KiB in flight on each of 128 SMs is
  6 MiB, where an H200's 4.3 TB/s over some 0.8 us of latency need 3.4 MB. Two programs fit on an
  SM.
- K is never split over programs: there is nothing to merge and no second launch. Where N is so
  small that 32 rows a program leave SMs idle, a program has 16, and tiles of 16 x 256: most of such
  a matrix, or all of it, is then requested before the first tile is there.
- Where a program may begin before the kernel ahead has ended (`dependent_launch.py`), it has the
  first 64 KiB of its rows of W brought into the L2 cache meanwhile, unless programs are so many
  that most begin later anyway.
- The two tiles of a stage have a sum each, or one chain of dependent products would be the limit:
  of the first and the second half of a stretch of k, or of gate and up in a gated linear, where the
  program that has both writes silu(gate) * up and saves a launch.

x is read again by each program: M N K / 16 bytes from L2 at 32 rows a program, at M = 16 half as
many as W's. Above that torch's (cuBLAS) product serves.

A row's sums have another order than `matmul.py`'s, but the same one for all M <= 16.

Shapes: M rows of x, K inputs, N outputs (of which a gated linear returns half). dtypes: bf16, fp16;
x and W alike. Called by `formats.dense`. Reference: `torch.nn.functional.linear`, then
`kernels.silu_mul`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.dependent_launch import (
    LINE_BYTES,
    await_inputs,
    launch_options,
    prefetch,
)
from quire.kernels.triton.linear.matmul import check_operands, load_rows, load_weight
from quire.kernels.triton.support import as_rows

MAX_ROWS = 16
DTYPES = (torch.bfloat16, torch.float16)

_BLOCK_K = 128
_NARROW_BLOCK_K = 256
_ROWS_PER_PROGRAM = 32
_ENOUGH_PROGRAMS = 128

_PREFETCHED_BYTES = 64 << 10
_MOST_PREFETCHING = 512


def skinny_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [..., K], of at most MAX_ROWS rows, weight [N, K], bias [N] -> [..., N]; if gated: the
    first half of the outputs are gates, and [..., N/2] is returned, with `silu_mul`'s roundings.

    out_dtype: x's (None), or fp32, to which the sums are then not rounded.
    """
    check_operands(x, weight, bias)
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}, but must be one of {DTYPES}")
    num_outputs = weight.shape[0]
    if gated and (num_outputs % 2 or out_dtype not in (None, x.dtype)):
        raise ValueError(
            f"a gated linear needs an even number of outputs, not {num_outputs}, and x's dtype for "
            f"its result, not {out_dtype}"
        )
    width = num_outputs // 2 if gated else num_outputs
    out = torch.empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(as_rows(x), weight, bias, out.view(-1, width), gated)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
) -> None:
    """x [M, K], its rows anywhere; out [M, N] or [M, N/2] contiguous."""
    num_rows, num_inputs = x.shape
    if num_rows > MAX_ROWS:
        raise ValueError(f"x has {num_rows} rows, but must have at most {MAX_ROWS}")
    width = out.shape[1]
    is_narrow = triton.cdiv(width, _ROWS_PER_PROGRAM) < _ENOUGH_PROGRAMS
    rows_per_program = _ROWS_PER_PROGRAM // 2 if is_narrow else _ROWS_PER_PROGRAM
    block_k = _NARROW_BLOCK_K if is_narrow else _BLOCK_K
    stretch = block_k if gated else 2 * block_k
    block_m = 8 if num_rows <= 8 else 16
    num_programs = triton.cdiv(width, rows_per_program)
    num_lines = _PREFETCHED_BYTES // (LINE_BYTES.value * rows_per_program * (2 if gated else 1))
    skinny_matmul_kernel[(num_programs,)](
        x,
        weight,
        bias,
        out,
        num_rows,
        width,
        num_inputs,
        x.stride(0),
        IS_GATED=gated,
        IS_EVEN=num_inputs % stretch == 0,
        NUM_LINES=num_lines if num_programs <= _MOST_PREFETCHING else 0,
        BLOCK_M=block_m,
        BLOCK_N=rows_per_program,
        BLOCK_K=block_k,
        num_warps=2,
        num_stages=num_stages(block_m, block_k),
        **launch_options(x.device),
    )


def num_stages(block_m: int, block_k: int) -> int:
    """As many as the shared memory of every GPU since sm_80 has room for, of W and x."""
    return 4 if block_m == 16 and block_k == _NARROW_BLOCK_K else 5


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def skinny_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows x_stride apart
    weight_ptr,  # [N, K], or [2 N, K] if gated: gates, then ups
    bias_ptr,  # [N] or [2 N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # K is a multiple of what an iteration reads
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_LINES: tl.constexpr = 0,  # of each row of W, to prefetch
    IS_EARLY: tl.constexpr = False,  # see dependent_launch.py
):
    STRETCH: tl.constexpr = BLOCK_K if IS_GATED else 2 * BLOCK_K
    rows = tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    row_mask = rows[:, None] < num_rows
    near = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    first_ptrs = weight_ptr + near[:, None] * num_inputs + inputs[None, :]
    if IS_GATED:
        second_ptrs = weight_ptr + (near + num_outputs)[:, None] * num_inputs + inputs[None, :]
    else:
        second_ptrs = first_ptrs + BLOCK_K
    if IS_EARLY and NUM_LINES:
        line: tl.constexpr = LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
        firsts = tl.minimum(tl.arange(0, NUM_LINES) * line, num_inputs - 1)
        prefetch(weight_ptr + near[:, None] * num_inputs + firsts[None, :])
        if IS_GATED:
            prefetch(weight_ptr + (near + num_outputs)[:, None] * num_inputs + firsts[None, :])
    await_inputs(IS_EARLY)

    first_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, num_inputs, STRETCH):
        num_left = num_inputs - k
        x = tl.trans(load_rows(x_ptrs + k, row_mask, inputs, num_left, IS_EVEN))
        first = load_weight(first_ptrs + k, inputs, num_left, IS_EVEN)
        first_sums = tl.dot(first, x, first_sums)
        if IS_GATED:
            second = load_weight(second_ptrs + k, inputs, num_left, IS_EVEN)
        else:
            num_left -= BLOCK_K
            x = tl.trans(load_rows(x_ptrs + k + BLOCK_K, row_mask, inputs, num_left, IS_EVEN))
            second = load_weight(second_ptrs + k, inputs, num_left, IS_EVEN)
        second_sums = tl.dot(second, x, second_sums)

    dtype = out_ptr.dtype.element_ty
    if IS_GATED:
        if bias_ptr is not None:
            first_sums += tl.load(bias_ptr + near)[:, None].to(tl.float32)
            second_sums += tl.load(bias_ptr + num_outputs + near)[:, None].to(tl.float32)
        gate = first_sums.to(dtype).to(tl.float32)
        up = second_sums.to(dtype).to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    else:
        result = first_sums + second_sums
        if bias_ptr is not None:
            result += tl.load(bias_ptr + near)[:, None].to(tl.float32)
    out_ptrs = out_ptr + rows[None, :] * num_outputs + outputs[:, None]
    out_mask = (rows[None, :] < num_rows) & (outputs[:, None] < num_outputs)
    tl.store(out_ptrs, result.to(dtype), out_mask)
