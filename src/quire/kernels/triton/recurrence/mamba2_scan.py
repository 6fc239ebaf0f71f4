"""The Mamba-2 recurrence over paged states, token by token, in Triton.

Each head has a state S [N, P] and shares B and C with the other heads of its group. The step is
dt = softplus(dt + dt_bias), clamped to [min_step, max_step]:

    S = exp(dt A) S + B (dt x)^T;  y = S^T C + D x

Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7. The reference is
`quire/recurrence/reference.py::mamba2`; results differ from it only by the order of sums.

Programs are like those of `gated_delta_rule.py`: bound by memory in decode, by instructions and
latency in a prompt. Here the next token does not wait for the sum over the state.

Shapes: T tokens, H heads, P their size, N state size, G groups. dtypes: x, b, c fp32, bf16 or fp16;
dt and the weights any of these; states fp32. Called by `recurrence/triton_states`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.state_calls import Mamba2Inputs, Mamba2Weights
from quire.kernels.triton.recurrence.units import (
    StepStates,
    dense_tokens,
    kept_end,
    matrix_places,
    program_columns,
    sum_rows,
)
from quire.kernels.triton.support import next_power_of_two


def mamba2_scan(
    states: StepStates,
    inputs: Mamba2Inputs,
    weights: Mamba2Weights,
    min_step: float,
    max_step: float,
) -> torch.Tensor:
    """Return [T, H, P] in x's dtype, and update the states in place.

    dt is clamped to [min_step, max_step] after the softplus. P is a multiple of 16. Views of fused
    tensors are read without a copy. Raises ValueError for other shapes.
    """
    # First, check the shapes, and copy the tensors that the kernel can't read in place.
    _check(*inputs, weights)
    x, dt, b, c = inputs
    x, b, c = map(dense_tokens, (x, b, c))
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    # Then choose the number of columns for each program, and launch one program for each sequence.
    num_heads, head_dim = x.shape[1:]
    num_groups, state_size = b.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = program_columns(state_size, num_heads * head_dim, states.num_prompts)
    mamba2_scan_kernel[(num_heads * head_dim // columns, states.num_sequences)](
        x,
        dt,
        b,
        c,
        weights.a,
        weights.d,
        weights.dt_bias,
        out,
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        *states.arguments,
        MIN_STEP=min_step,
        MAX_STEP=max_step,
        H=num_heads,
        P=head_dim,
        G=num_groups,
        N=state_size,
        BLOCK_N=next_power_of_two(state_size),
        COLUMNS=columns,
        num_warps=1,
        enable_fp_fusion=False,  # see `units.py`
    )
    return out


def _check(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, weights: Mamba2Weights
) -> None:
    num_tokens, num_heads, head_dim = x.shape
    if b.shape != c.shape or len(b) != num_tokens or num_heads % b.shape[1] or head_dim % 16:
        raise ValueError(
            f"x is {tuple(x.shape)}, b {tuple(b.shape)} and c {tuple(c.shape)}, but must be"
            " [T, H, P] and [T, G, N], the same, H a multiple of G and P of 16"
        )
    if dt.shape != x.shape[:2]:
        raise ValueError(f"dt is {tuple(dt.shape)}, but must be {tuple(x.shape[:2])}, x's heads")
    for name, weight in (("a", weights.a), ("d", weights.d), ("dt_bias", weights.dt_bias)):
        if weight is not None and (weight.shape != (num_heads,) or not weight.is_contiguous()):
            raise ValueError(f"{name} is {tuple(weight.shape)}, but must be ({num_heads},)")


@triton.jit(do_not_specialize=["first_unit", "units_per_page"])  # type: ignore[untyped-decorator]
def mamba2_scan_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H, P]
    dt_ptr,  # [T, H]
    b_ptr,  # [T, G, N]
    c_ptr,
    a_ptr,  # [H]
    d_ptr,  # [H], or None
    bias_ptr,  # [H], or None
    out_ptr,  # [T, H, P], contiguous
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    pages_ptr,  # these as in `StepStates`
    table_ptr,
    query_start_ptr,
    context_lens_ptr,
    rows_ptr,
    num_drafts_ptr,  # or None
    page_stride,
    table_stride,
    first_unit,
    units_per_page,
    MIN_STEP: tl.constexpr,
    MAX_STEP: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(1)  # axis 0: columns of all heads
    context, row = tl.load(context_lens_ptr + sequence), tl.load(rows_ptr + sequence)
    first, end = tl.load(query_start_ptr + sequence), tl.load(query_start_ptr + sequence + 1)
    if context > 0:
        places, column = matrix_places(
            pages_ptr,
            table_ptr,
            row,
            page_stride,
            table_stride,
            first_unit,
            units_per_page,
            N,
            BLOCK_N,
            COLUMNS,
            True,
        )
        inner, columns = tl.arange(0, BLOCK_N), tl.arange(0, COLUMNS)
        is_inner = inner < N
        state = tl.load(places, is_inner[:, None] & (context > end - first), other=0.0)
        # Now loop over the tokens: load the next one, update the state, store the output. Drafts
        # follow when the state is stored.
        head = column // P
        a = tl.load(a_ptr + head).to(tl.float32)
        d, bias = _weight_or_zero(d_ptr, head), _weight_or_zero(bias_ptr, head)
        inner_at = head * G // H * N + inner
        x_at, out_at = x_ptr + column + columns, out_ptr + column + columns
        tokens = (x_at, dt_ptr + head, b_ptr + inner_at, c_ptr + inner_at, out_at)
        strides = (x_stride, dt_stride, b_stride, c_stride, H * P)
        weights = (a, d, bias, MIN_STEP, MAX_STEP)
        kept = kept_end(num_drafts_ptr, sequence, end)
        state = _move_all(state, tokens, strides, weights, is_inner, first, kept, BLOCK_N, COLUMNS)
        tl.store(places, state, is_inner[:, None])
        if num_drafts_ptr is not None:
            _move_all(state, tokens, strides, weights, is_inner, kept, end, BLOCK_N, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def _move_all(  # type: ignore[no-untyped-def]
    state,
    tokens,  # pointers to the parts of token 0, and to its output
    strides,
    weights,  # a, d, the bias of dt, and the bounds of dt
    is_inner,
    first,
    end,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stores the outputs of the tokens [first, end), and returns the state after them."""
    token, last = first.to(tl.int64), end - 1
    # A sequence without drafts has an empty second range: then a token is loaded in vain.
    x, dt, b, c = _load_inputs(tokens, strides, tl.minimum(token, last), is_inner)
    for _ in range(first, end):
        ahead = tl.minimum(token + 1, last)
        next_x, next_dt, next_b, next_c = _load_inputs(tokens, strides, ahead, is_inner)
        step = tl.minimum(tl.maximum(softplus(dt + weights[2]), weights[3]), weights[4])
        x = x.to(tl.float32)
        state, out = _move(state, x, step, b, c, weights[0], weights[1], BLOCK_N, COLUMNS)
        tl.store(tokens[4] + token * strides[4], out.to(tokens[4].dtype.element_ty))
        x, dt, b, c = next_x, next_dt, next_b, next_c
        token += 1
    return state


@triton.jit
def _load_inputs(tokens, strides, token, is_inner):  # type: ignore[no-untyped-def]
    x = tl.load(tokens[0] + token * strides[0])
    dt = tl.load(tokens[1] + token * strides[1]).to(tl.float32)
    b = tl.load(tokens[2] + token * strides[2], is_inner, other=0.0)
    c = tl.load(tokens[3] + token * strides[3], is_inner, other=0.0)
    return x, dt, b, c


@triton.jit
def _weight_or_zero(pointer, head):  # type: ignore[no-untyped-def]
    weight = 0.0
    if pointer is not None:
        weight = tl.load(pointer + head).to(tl.float32)
    return weight


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    state,  # [BLOCK_N, COLUMNS] fp32
    x,  # [COLUMNS] fp32
    step,
    b,  # [BLOCK_N]
    c,  # [BLOCK_N]
    a,
    d,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The state after a token, and the token's output [COLUMNS] fp32."""
    state *= tl.exp(step * a)
    state = tl.fma(b.to(tl.float32)[:, None], (step * x)[None, :], state)
    return state, sum_rows(state * c.to(tl.float32)[:, None], BLOCK_N, COLUMNS) + d * x


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)) of fp32, with a relative error of 1e-6 for all x down to where exp is 0.

    It is max(x, 0) + log(1 + e) with e = exp(-|x|). The logarithm is 2 atanh(s) for
    s = e / (2 + e) <= 1/3, by its power series: the device's logarithm of 1 + e loses small e.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    series = square * (1.0 / 15.0) + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series
