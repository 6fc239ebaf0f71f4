"""The Triton product for few rows: y = x W^T + b.

A decode step with few sequences spends most of its time here, and almost all of that reading W: 2 N
K bytes, once. The tensor cores' 2 M N K operations are hidden; at M = 16 they take less than a
tenth of that time on an H200. So:

- W is the left operand of the tensor core's product, with outputs along the 16 of m16 n8 k16. The
  rows of x are the n: 8 or 16 with padding, which is zero and is not read.
- A program streams all inputs of 32 rows of W, in stages of two tiles of 32 x 128 (16 KiB). Three
  stages are in flight, with 16 bytes for each thread and request. 48 KiB on each of 128 SMs make
  6 MiB, while an H200 needs 3.4 MB (4.3 TB/s at 0.8 us of latency). Two programs fit on an SM.
- K is never split over programs, so there is nothing to merge and no second launch. If N is so
  small that 32 rows a program would leave SMs idle, a program has 16, and tiles of 16 x 256. Most
  or all of such a matrix is requested before the first tile arrives.
- If a program can begin before the previous kernel has ended (`dependent_launch.py`), it prefetches
  the first 64 KiB of its rows of W into the L2 cache. With too many programs, most would begin
  later anyway, so none prefetches.
- The two tiles of a stage have separate sums, since one chain of dependent products would be the
  limit. They are two halves of a stretch of k, or gate and up of a gated linear; then the program
  writes silu(gate) * up, which saves a launch.

Each program reads x: M N K / 16 bytes from L2 at 32 rows a program, which at M = 16 are half of W's
bytes. For more rows torch's (cuBLAS) product is used.

A row is summed in another order than in `matmul.py`, but in the same order for all M <= 16.

W may be codes with scales, as in `matmul.py`. Those of groups multiply the sums over their inputs
in the order of the groups; a scale of all inputs multiplies their sum.

Shapes: M rows of x, K inputs, N outputs (of which a gated linear returns half). dtypes: bf16, fp16;
x and W alike. Called by `formats.dense` and `formats.block_quantized.float8_method`. Reference:
`torch.nn.functional.linear`, then `kernels.activations`.
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
from quire.kernels.triton.linear.matmul import (
    add_product,
    check_operands,
    inputs_of_scale,
    inputs_of_tile,
    load_rows,
    load_weight,
    scale_and_add,
)
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
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] of at most MAX_ROWS rows, weight [N, K], bias [N] -> [..., N].

    `scales` [G, N] are those of a weight of codes. If gated, the first half of the outputs are
    gates, and silu(gate) * up, [..., N/2], is returned with the roundings of
    `kernels.activations.gated`. `out_dtype` is x's dtype (None), or fp32, where sums are not
    rounded.
    """
    check_operands(x, weight, bias, scales)
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
        _launch(as_rows(x), weight, scales, bias, out.view(-1, width), gated)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
) -> None:
    """x is [M, K] with any stride of rows; `out` is [M, N], or [M, N/2] if gated, contiguous."""
    # First, choose the tile.
    num_rows, num_inputs = x.shape
    if num_rows > MAX_ROWS:
        raise ValueError(f"x has {num_rows} rows, but must have at most {MAX_ROWS}")
    width = out.shape[1]
    is_narrow = triton.cdiv(width, _ROWS_PER_PROGRAM) < _ENOUGH_PROGRAMS
    rows_per_program = _ROWS_PER_PROGRAM // 2 if is_narrow else _ROWS_PER_PROGRAM
    group = inputs_of_scale(num_inputs, scales)
    block_k = inputs_of_tile(_NARROW_BLOCK_K if is_narrow else _BLOCK_K, group)
    stretch = block_k if gated else 2 * block_k
    block_m = 8 if num_rows <= 8 else 16
    # Then see how much each program prefetches, and launch.
    num_programs = triton.cdiv(width, rows_per_program)
    num_lines = _PREFETCHED_BYTES // (LINE_BYTES.value * rows_per_program * (2 if gated else 1))
    skinny_matmul_kernel[(num_programs,)](
        x,
        weight,
        scales,
        bias,
        out,
        num_rows,
        width,
        num_inputs,
        x.stride(0),
        GROUP=group,
        IS_GATED=gated,
        IS_EVEN=num_inputs % stretch == 0,
        NUM_LINES=num_lines if num_programs <= _MOST_PREFETCHING else 0,
        BLOCK_M=block_m,
        BLOCK_N=rows_per_program,
        BLOCK_K=block_k,
        NUM_STAGES=num_stages(block_m, block_k),
        num_warps=2,
        num_stages=num_stages(block_m, block_k),
        **launch_options(x.device),
        enable_fp_fusion=True,
    )


def num_stages(block_m: int, block_k: int) -> int:
    """Maximum number of stages of W and x that fit the shared memory of every GPU since sm_80."""
    return 4 if block_m == 16 and block_k == _NARROW_BLOCK_K else 5


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def skinny_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows x_stride apart
    weight_ptr,  # [N, K], or [2 N, K] if gated: gates, then ups; of x's dtype or of codes
    scales_ptr,  # [G, N] or [G, 2 N] of codes, or None
    bias_ptr,  # [N] or [2 N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of BLOCK_K; 0: all, or no scales
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # K is a multiple of STRETCH, which an iteration reads
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,  # as of the launch; with it, scales are fetched ahead, too
    NUM_LINES: tl.constexpr = 0,  # cache lines to prefetch of each row of W
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
    second_near = near + num_outputs if IS_GATED else near
    second_ptrs = weight_ptr + second_near[:, None] * num_inputs + inputs[None, :]
    width = 2 * num_outputs if IS_GATED else num_outputs
    # First, prefetch W while the previous kernel still runs.
    if IS_EARLY and NUM_LINES:
        _prefetch_lines(weight_ptr, near, num_inputs, NUM_LINES)
        if IS_GATED:
            _prefetch_lines(weight_ptr, second_near, num_inputs, NUM_LINES)
    await_inputs(IS_EARLY)

    # Then sum over K.
    first_scales = None if scales_ptr is None else scales_ptr + near
    second_scales = None if scales_ptr is None else scales_ptr + second_near
    first_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, num_inputs, STRETCH, num_stages=NUM_STAGES):
        at, num_left = k, num_inputs - k
        x = tl.trans(load_rows(x_ptrs + k, row_mask, inputs, num_left, IS_EVEN))
        first = load_weight(first_ptrs + k, inputs, num_left, IS_EVEN)
        first_sums = add_product(first_sums, first, x, first_scales, k, num_inputs, width, GROUP)
        if IS_GATED:
            second = load_weight(second_ptrs + k, inputs, num_left, IS_EVEN)
        else:
            at, num_left = k + BLOCK_K, num_left - BLOCK_K
            x = tl.trans(load_rows(x_ptrs + at, row_mask, inputs, num_left, IS_EVEN))
            second = load_weight(first_ptrs + at, inputs, num_left, IS_EVEN)
        second_sums = add_product(
            second_sums, second, x, second_scales, at, num_inputs, width, GROUP
        )

    # Last, multiply by scales of all inputs, add the bias, and join both sums.
    dtype = out_ptr.dtype.element_ty
    if IS_GATED:
        gate = _finish(first_sums, first_scales, bias_ptr, near, GROUP)
        up = _finish(second_sums, second_scales, bias_ptr, second_near, GROUP)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    else:
        result = _finish(first_sums + second_sums, first_scales, bias_ptr, near, GROUP)
    out_ptrs = out_ptr + rows[None, :] * num_outputs + outputs[:, None]
    out_mask = (rows[None, :] < num_rows) & (outputs[:, None] < num_outputs)
    tl.store(out_ptrs, result.to(dtype), out_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch_lines(  # type: ignore[no-untyped-def]
    weight_ptr, near, num_inputs, NUM_LINES: tl.constexpr
):
    """Prefetch the first cache lines of these rows of W."""
    line: tl.constexpr = LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    firsts = tl.minimum(tl.arange(0, NUM_LINES) * line, num_inputs - 1)
    prefetch(weight_ptr + near[:, None] * num_inputs + firsts[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    sums, scales_ptrs, bias_ptr, near, GROUP: tl.constexpr
):
    """Sums [outputs, rows] times the scales of all inputs, if GROUP is 0 and there are scales, plus
    the bias, if any."""
    IS_SCALED: tl.constexpr = scales_ptrs is not None and GROUP == 0
    scales = tl.load(scales_ptrs)[:, None] if IS_SCALED else None
    bias = None if bias_ptr is None else tl.load(bias_ptr + near)[:, None].to(tl.float32)
    return scale_and_add(sums, scales, bias)
