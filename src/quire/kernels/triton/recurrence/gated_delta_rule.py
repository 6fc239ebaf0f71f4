"""The gated delta rule over paged states, token by token, in Triton.

Each value head has a state S [dk, dv], and shares q and k with the other value heads of its key
head. With `eps`, q and k are first divided by sqrt(sum of squares + eps). Then q is multiplied by
dk^-0.5, and for each token:

    S = exp(g) S;  delta = beta (v - S^T k);  S = S + k delta^T;  o = S^T q

Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), section 3.1. The reference is
`quire/recurrence/reference.py::gated_delta`. Results differ from it by the order of sums and by two
rearrangements that shorten the chain of dependent operations from token to token:

    divisors    S^T k, S^T q and k . q are summed with undivided q and k; the sums are then divided
    output      o = S^T q + (k . q) delta, from the decayed state before delta is added, so that
                both sums over the state run at the same time

Decode is bound by memory. A unit is 16 columns of a head's state (`units.py`). With dk = 128, it is
read and written once, 8 KiB each way. Reads of q, k and v add 3 %, and come from the L2 cache for
all but the first unit of a head. A batch of 16 with 32 heads of 128 has 4096 programs of one warp.
Registers allow 13 of these programs on each multiprocessor (SM), with 104 KiB of loads in flight.
That is several times latency times bandwidth, so the latency of loads does not limit decode.

A prompt is a loop over its tokens, whose loads run one token ahead. With one prompt, a program has
8 columns. For each token it issues 380 instructions, and waits for two exchanges between threads
and one change of layout. These instructions and waits, not memory, set the time of a prompt.

Shapes: T tokens, Hk key heads, Hv value heads, dk and dv their sizes. dtypes: q, k, v fp32, bf16 or
fp16; g and beta any of these; states fp32. Called by `recurrence/triton_states`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.state_calls import GatedDeltaInputs
from quire.kernels.triton.recurrence.units import (
    StepStates,
    dense_tokens,
    kept_end,
    matrix_places,
    program_columns,
    sum_rows,
)
from quire.kernels.triton.support import next_power_of_two

#: Maximum number of state words for which a prompt's program is not IS_WIDE: k and q need that many
#: words, too.
_NARROW_WORDS = 1024


def gated_delta_rule(
    states: StepStates, inputs: GatedDeltaInputs, *, eps: float | None
) -> torch.Tensor:
    """Return o [T, Hv, dv] in v's dtype, and update the states in place.

    dv is a multiple of 16. `eps` is added to sums of squares; None means that q and k are not
    normalized here. Views of fused tensors are read without a copy. Raises ValueError for other
    shapes.
    """
    # First, check the shapes, and copy the tensors that the kernel can't read in place.
    _check(*inputs)
    q, k, v, g, beta = inputs
    q, k, v = map(dense_tokens, (q, k, v))
    g, beta = (x if x.stride(1) == 1 else x.contiguous() for x in (g, beta))
    # Then choose the number of columns for each program, and launch one program for each sequence.
    num_k_heads, key_dim = q.shape[1:]
    num_v_heads, value_dim = v.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block = next_power_of_two(key_dim)
    columns = program_columns(key_dim, num_v_heads * value_dim, states.num_prompts)
    gated_delta_rule_kernel[(num_v_heads * value_dim // columns, states.num_sequences)](
        q,
        k,
        v,
        g,
        beta,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        beta.stride(0),
        *states.arguments,
        EPS=eps,
        HK=num_k_heads,
        HV=num_v_heads,
        DK=key_dim,
        DV=value_dim,
        BLOCK_K=block,
        COLUMNS=columns,
        IS_WIDE=not states.num_prompts or block * columns > _NARROW_WORDS,
        num_warps=1,
        enable_fp_fusion=False,  # see `units.py`
    )
    return out


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    num_tokens, num_v_heads, value_dim = v.shape
    if q.shape != k.shape or len(q) != num_tokens or num_v_heads % q.shape[1] or value_dim % 16:
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}, but must be"
            " [T, Hk, dk], the same, and [T, Hv, dv], Hv a multiple of Hk and dv of 16"
        )
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(
            f"g is {tuple(g.shape)} and beta {tuple(beta.shape)}, but must be "
            f"{tuple(v.shape[:2])} as v's tokens and heads"
        )


@triton.jit(do_not_specialize=["first_unit", "units_per_page"])  # type: ignore[untyped-decorator]
def gated_delta_rule_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hk, dk]
    k_ptr,
    v_ptr,  # [T, Hv, dv]
    g_ptr,  # [T, Hv]
    beta_ptr,
    out_ptr,  # [T, Hv, dv], contiguous
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
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
    EPS: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Grid: axis 0 = blocks of COLUMNS columns of all value heads, axis 1 = sequences."""
    # First, find the sequence's tokens; padding has a context of 0.
    sequence = tl.program_id(1)
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
            DK,
            BLOCK_K,
            COLUMNS,
            IS_WIDE,
        )
        # Then load the state: zeros if the sequence begins in this step.
        keys, columns = tl.arange(0, BLOCK_K), tl.arange(0, COLUMNS)
        is_key = keys < DK
        state = tl.load(places, is_key[:, None] & (context > end - first), other=0.0)
        # Last, loop over the tokens: load the next one, update the state, store the output. Drafts
        # follow when the state is stored.
        head = column // DV
        key_at = head * HK // HV * DK + keys
        v_at = v_ptr + column + columns
        outputs = out_ptr + column + columns
        tokens = (q_ptr + key_at, k_ptr + key_at, v_at, g_ptr + head, beta_ptr + head, outputs)
        strides = (q_stride, k_stride, v_stride, g_stride, beta_stride, HV * DV)
        kept = kept_end(num_drafts_ptr, sequence, end)
        state = _move_all(state, tokens, strides, is_key, first, kept, EPS, DK, BLOCK_K, COLUMNS)
        tl.store(places, state, is_key[:, None])
        if num_drafts_ptr is not None:
            _move_all(state, tokens, strides, is_key, kept, end, EPS, DK, BLOCK_K, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def _move_all(  # type: ignore[no-untyped-def]
    state,
    tokens,  # pointers to the parts of token 0, and to its output
    strides,
    is_key,
    first,
    end,
    EPS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stores the outputs of the tokens [first, end), and returns the state after them."""
    token, last = first.to(tl.int64), end - 1
    # A sequence without drafts has an empty second range: then a token is loaded in vain.
    q, k, v, g, beta = _load_token(tokens, strides, tl.minimum(token, last), is_key)
    for _ in range(first, end):
        ahead = tl.minimum(token + 1, last)
        next_q, next_k, next_v, next_g, next_beta = _load_token(tokens, strides, ahead, is_key)
        state, out = _move(state, q, k, v, g, beta, EPS, DK, BLOCK_K, COLUMNS)
        tl.store(tokens[5] + token * strides[5], out.to(tokens[5].dtype.element_ty))
        q, k, v, g, beta = next_q, next_k, next_v, next_g, next_beta
        token += 1
    return state


@triton.jit
def _load_token(tokens, strides, token, is_key):  # type: ignore[no-untyped-def]
    q = tl.load(tokens[0] + token * strides[0], is_key, other=0.0)
    k = tl.load(tokens[1] + token * strides[1], is_key, other=0.0)
    v = tl.load(tokens[2] + token * strides[2])
    g = tl.load(tokens[3] + token * strides[3])
    beta = tl.load(tokens[4] + token * strides[4])
    return q, k, v, g, beta


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    state,  # [BLOCK_K, COLUMNS] fp32
    q,  # [BLOCK_K]
    k,  # [BLOCK_K]
    v,  # [COLUMNS]
    g,
    beta,
    EPS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns the state after a token, and the token's output [COLUMNS] fp32."""
    q, k = q.to(tl.float32)[:, None], k.to(tl.float32)[:, None]
    q_scale, k_scale = DK**-0.5, 1.0
    if EPS is not None:
        k_scale = tl.rsqrt(sum_rows(k * k, BLOCK_K, 1) + EPS)
        q_scale = tl.rsqrt(sum_rows(q * q, BLOCK_K, 1) + EPS) * q_scale
    state *= tl.exp(g.to(tl.float32))
    known = sum_rows(state * k, BLOCK_K, COLUMNS) * k_scale
    seen = sum_rows(state * q, BLOCK_K, COLUMNS)
    delta = (v.to(tl.float32) - known) * beta.to(tl.float32) * k_scale
    out = tl.fma(sum_rows(q * k, BLOCK_K, 1), delta, seen) * q_scale
    return tl.fma(k, delta[None, :], state), out
