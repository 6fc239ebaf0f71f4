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

A single row may be given before its RMSNorm (`kernels/unnormed_rows.py`), which saves the launch of
the norm. Each program loads the row, adds it to the residual stream and computes the norm's scale,
while its first lines of W are prefetched. Then it norms each tile of x just before the product,
with the roundings of `rms_norm.py`; only the order of the sum of squares may differ. The programs
write the new residual stream together, each a share, to memory of its own, since all read the old
one.

W may be codes with scales, as in `matmul.py`. Those of groups multiply the sums over their inputs
in the order of the groups; a scale of all inputs multiplies their sum.

Shapes: M rows of x, K inputs, N outputs (of which a gated linear returns half). dtypes: bf16, fp16;
x and W alike. Called by `formats.dense` and `formats.block_quantized.float8_method`. Reference:
`torch.nn.functional.linear`, then `kernels.activations`; before it `rms_norm.py`.
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
    store_transposed,
)
from quire.kernels.triton.rms_norm import add_rounded, inverse_size, weigh
from quire.kernels.triton.support import as_rows, check_same, next_power_of_two
from quire.kernels.unnormed_rows import UnnormedRows

MAX_ROWS = 16
DTYPES = (torch.bfloat16, torch.float16)

MAX_NORMED_SIZE = 8192
"""The largest K of a row that is normed: the program's two warps hold the row in registers."""

_BLOCK_K = 128
_NARROW_BLOCK_K = 256
_ROWS_PER_PROGRAM = 32
_ENOUGH_PROGRAMS = 128

_PREFETCHED_BYTES = 64 << 10
_MOST_PREFETCHING = 512


def skinny_matmul(
    x: torch.Tensor | UnnormedRows,
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
    rounded. If x is unnormed, it has one row of at most MAX_NORMED_SIZE inputs.
    """
    norm = None
    if isinstance(x, UnnormedRows):
        norm, x = x, x.x
        _check_norm(norm)
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
        _launch(as_rows(x), weight, scales, bias, out.view(-1, width), gated, norm)
    return out


def _check_norm(norm: UnnormedRows) -> None:
    x = norm.x
    if x.numel() != x.shape[-1] or x.shape[-1] > MAX_NORMED_SIZE:
        raise ValueError(
            f"x is {tuple(x.shape)}, but a row that is normed must be alone, with at most "
            f"{MAX_NORMED_SIZE} inputs"
        )
    if (norm.residual is None) != (norm.total is None):
        raise ValueError("a residual needs a total, and no total without a residual")
    for name, tensor in (("residual", norm.residual), ("total", norm.total), ("norm", norm.weight)):
        if tensor is None:
            continue
        check_same(name, tensor, "x", x)
        if tensor.numel() != x.numel() or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, but must have {x.numel()} elements, contiguous"
            )
    if norm.total is not None and norm.total.data_ptr() in (
        x.data_ptr(),
        norm.residual.data_ptr() if norm.residual is not None else None,
    ):
        raise ValueError("total must be memory of its own, since all programs read x and residual")


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
    norm: UnnormedRows | None,
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
    stages = num_stages(block_m, block_k, normed=norm is not None)
    # Then see how much each program prefetches, and launch.
    num_programs = triton.cdiv(width, rows_per_program)
    num_lines = _PREFETCHED_BYTES // (LINE_BYTES.value * rows_per_program * (2 if gated else 1))
    skinny_matmul_kernel[(num_programs,)](
        x,
        weight,
        scales,
        bias,
        out,
        None if norm is None else norm.weight,
        None if norm is None else norm.residual,
        None if norm is None else norm.total,
        0.0 if norm is None else norm.eps,
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
        NUM_STAGES=stages,
        BLOCK_D=1 if norm is None else next_power_of_two(num_inputs),
        SCALING=(None, 1.0) if norm is None else (norm.offset, norm.scale),
        num_warps=2,
        num_stages=stages,
        **launch_options(x.device),
        enable_fp_fusion=True,
    )


def num_stages(block_m: int, block_k: int, *, normed: bool = False) -> int:
    """Maximum number of stages of W and x that fit the shared memory of every GPU since sm_80. If x
    is `normed`, a stage also has a part of the residual stream and of the norm's weight."""
    return 4 if (block_m == 16 or normed) and block_k == _NARROW_BLOCK_K else 5


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def skinny_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows x_stride apart
    weight_ptr,  # [N, K], or [2 N, K] if gated: gates, then ups; of x's dtype or of codes
    scales_ptr,  # [G, N] or [G, 2 N] of codes, or None
    bias_ptr,  # [N] or [2 N], or None
    out_ptr,  # [M, N]
    norm_ptr,  # [K]; None if x is not normed. With a norm, M is 1
    residual_ptr,  # [K], to which x is added before the norm; or None
    total_ptr,  # [K], becomes the sum; None without a residual
    eps,
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
    BLOCK_D: tl.constexpr = 1,  # the power of two >= K, with a norm
    SCALING: tl.constexpr = (None, 1.0),  # OFFSET and FACTOR of `rms_norm.py`
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
    other_near = near + num_outputs if IS_GATED else near
    other_ptrs = weight_ptr + other_near[:, None] * num_inputs + inputs[None, :]
    width = 2 * num_outputs if IS_GATED else num_outputs
    # First, prefetch W while the previous kernel still runs.
    if IS_EARLY and NUM_LINES:
        _prefetch_lines(weight_ptr, near, other_near, num_inputs, NUM_LINES, IS_GATED)
    await_inputs(IS_EARLY)
    row = (x_ptr, residual_ptr, total_ptr)
    norm = (norm_ptr, residual_ptr, _norm_scale(row, norm_ptr, eps, num_inputs, BLOCK_D, SCALING))

    # Then sum over K.
    first_scales = None if scales_ptr is None else scales_ptr + near
    other_scales = None if scales_ptr is None else scales_ptr + other_near
    first_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    other_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, num_inputs, STRETCH, num_stages=NUM_STAGES):
        at, num_left = k, num_inputs - k
        x = tl.trans(_load_x(x_ptrs, k, row_mask, num_inputs, norm, IS_EVEN, SCALING))
        first = load_weight(first_ptrs + k, inputs, num_left, IS_EVEN)
        first_sums = add_product(first_sums, first, x, first_scales, k, num_inputs, width, GROUP)
        if IS_GATED:
            other = load_weight(other_ptrs + k, inputs, num_left, IS_EVEN)
        else:
            at, num_left = k + BLOCK_K, num_left - BLOCK_K
            x = tl.trans(_load_x(x_ptrs, at, row_mask, num_inputs, norm, IS_EVEN, SCALING))
            other = load_weight(first_ptrs + at, inputs, num_left, IS_EVEN)
        other_sums = add_product(other_sums, other, x, other_scales, at, num_inputs, width, GROUP)

    # Last, multiply by scales of all inputs, add the bias, and join both sums.
    if IS_GATED:
        gate = _finish(first_sums, first_scales, bias_ptr, near, GROUP)
        up = _finish(other_sums, other_scales, bias_ptr, other_near, GROUP)
        result = _gated(gate, up, out_ptr.dtype.element_ty)
    else:
        result = _finish(first_sums + other_sums, first_scales, bias_ptr, near, GROUP)
    store_transposed(out_ptr, result, rows, rows < num_rows, outputs, num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up in fp32, with the roundings of `kernels.activations.gated`."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit  # type: ignore[untyped-decorator]
def _norm_scale(  # type: ignore[no-untyped-def]
    row, norm_ptr, eps, num_inputs, BLOCK: tl.constexpr, SCALING: tl.constexpr
):
    """The factor that norms the row x, or the sum of x and the residual stream; 1 without a norm.
    Each program writes its share of the sum."""
    x_ptr, residual_ptr, total_ptr = row
    scale = 1.0
    if norm_ptr is not None:
        columns = tl.arange(0, BLOCK)
        mask = columns < num_inputs
        x = tl.load(x_ptr + columns, mask, other=0.0)
        if residual_ptr is not None:
            x = add_rounded(tl.load(residual_ptr + columns, mask, other=0.0), x, SCALING[1])
            share = tl.cdiv(num_inputs, tl.num_programs(0))
            tl.store(total_ptr + columns, x, mask & (columns // share == tl.program_id(0)))
        scale = tl.sum(inverse_size(x[None, :], eps, num_inputs))
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _load_x(  # type: ignore[no-untyped-def]
    x_ptrs, at, row_mask, num_inputs, norm, IS_EVEN: tl.constexpr, SCALING: tl.constexpr
):
    """A tile of x [rows, inputs] from input `at` on, normed if there is a norm."""
    norm_ptr, residual_ptr, scale = norm
    inputs = tl.arange(0, x_ptrs.shape[1])
    x = load_rows(x_ptrs + at, row_mask, inputs, num_inputs - at, IS_EVEN)
    if norm_ptr is not None:
        dtype: tl.constexpr = x.dtype
        mask = at + inputs < num_inputs
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + at + inputs, mask, other=0.0)
            x = add_rounded(tl.broadcast_to(residual[None, :], x.shape), x, SCALING[1])
        weight = tl.load(norm_ptr + at + inputs, mask, other=0.0)
        x = weigh(x.to(tl.float32) * scale, weight[None, :], dtype, SCALING[0]).to(dtype)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch_lines(  # type: ignore[no-untyped-def]
    weight_ptr, near, other_near, num_inputs, NUM_LINES: tl.constexpr, IS_GATED: tl.constexpr
):
    """Prefetch the first cache lines of these rows of W, and of the others if gated."""
    line: tl.constexpr = LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    firsts = tl.minimum(tl.arange(0, NUM_LINES) * line, num_inputs - 1)
    prefetch(weight_ptr + near[:, None] * num_inputs + firsts[None, :])
    if IS_GATED:
        prefetch(weight_ptr + other_near[:, None] * num_inputs + firsts[None, :])


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
