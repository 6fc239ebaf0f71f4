"""Reference functions of recurrent layers: token by token, in torch, in the state's dtype.

Tests compare backends with these functions in float64; `torch_states.py` runs them in float32.

Shapes are as in `state_specs.py`; all tokens are of one sequence. States are [Hv, dk, dv],
[H, N, P] and [W - 1, C], where Hv is the number of value heads and W the width of the convolution.
Each function returns its result and the state after the last token.
"""

import torch
from torch.nn.functional import silu, softplus

from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.recurrence.state_specs import GatedDeltaSpec, Mamba2Spec, ShortConvSpec

NORM_EPS = 1e-6
"""Added to the sums of squares when q and k are normalized."""

Moved = tuple[torch.Tensor, torch.Tensor]


def gated_delta(
    spec: GatedDeltaSpec,
    state: torch.Tensor,
    inputs: GatedDeltaInputs,
) -> Moved:
    """Compute GatedDeltaSpec's formula, as transformers' torch_recurrent_gated_delta_rule."""
    q, k, v, g, beta = (part.to(state.dtype) for part in inputs)
    if spec.normalizes:
        q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
    q = q * spec.key_dim**-0.5
    repeats = spec.num_v_heads // spec.num_k_heads
    q, k = (x.repeat_interleave(repeats, 1) for x in (q, k))
    decay = g.exp()
    out = torch.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t, :, None, None]
        read = (state * k[t, :, :, None]).sum(1)
        delta = beta[t, :, None] * (v[t] - read)
        state = state + k[t, :, :, None] * delta[:, None]
        out[t] = (state * q[t, :, :, None]).sum(1)
    return out, state


def mamba2(
    spec: Mamba2Spec,
    state: torch.Tensor,
    inputs: Mamba2Inputs,
    weights: Mamba2Weights,
) -> Moved:
    """Compute Mamba2Spec's formula, as transformers' mamba2_selective_state_update."""
    x, dt, b, c = (part.to(state.dtype) for part in inputs)
    if weights.dt_bias is not None:
        dt = dt + weights.dt_bias.to(state.dtype)
    dt = softplus(dt).clamp(spec.min_step, spec.max_step)
    decay = (dt * weights.a.to(state.dtype)).exp()
    repeats = spec.num_heads // spec.num_groups
    b, c = (part.repeat_interleave(repeats, 1) for part in (b, c))
    out = torch.empty_like(x)
    for t in range(len(x)):
        step = dt[t, :, None] * x[t]
        state = state * decay[t, :, None, None] + b[t, :, :, None] * step[:, None]
        out[t] = (state * c[t, :, :, None]).sum(1)
    if weights.d is not None:
        out += weights.d.to(state.dtype)[:, None] * x
    return out, state


def short_conv(
    spec: ShortConvSpec,
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Moved:
    """Compute ShortConvSpec's formula."""
    inputs = torch.cat([state, x.to(state.dtype)])
    taps = weight.to(state.dtype)
    out = torch.zeros(x.shape, dtype=state.dtype, device=x.device)
    if bias is not None:
        out += bias.to(state.dtype)
    for i in range(spec.width):
        out += taps[:, i] * inputs[i : i + len(x)]
    return silu(out) if spec.has_silu else out, inputs[len(x) :]
