"""The references against transformers' own recurrences, token by token and in chunks."""

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from quire.errors import ConfigurationError
from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.recurrence import reference
from quire.recurrence.state_specs import GatedDeltaSpec, Mamba2Spec, ShortConvSpec


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heads", [(2, 2), (2, 6)])
def test_gated_delta(heads: tuple[int, int]) -> None:
    spec = GatedDeltaSpec(*heads, key_dim=24, value_dim=32)
    num_tokens, (hk, hv) = 70, heads
    q, k = (random(num_tokens, hk, 24, seed=seed) for seed in (0, 1))
    v, g = random(num_tokens, hv, 32, seed=2), -random(num_tokens, hv, seed=3).abs()
    beta = random(num_tokens, hv, seed=4).sigmoid()
    state = random(hv, 24, 32, seed=5)
    ours, last = reference.gated_delta(spec, state.double(), GatedDeltaInputs(q, k, v, g, beta))
    for theirs in (
        modeling_qwen3_next.torch_recurrent_gated_delta_rule,
        modeling_qwen3_next.torch_chunk_gated_delta_rule,
    ):
        out, end = theirs(
            *(x[None] for x in (q, k, v)),
            g=g[None],
            beta=beta[None],
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[0], ours.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(end[0], last.float(), rtol=1e-4, atol=1e-4)


def test_mamba2() -> None:
    spec = Mamba2Spec(num_heads=4, head_dim=16, state_size=24, num_groups=2)
    x, dt = random(70, 4, 16, seed=0), random(70, 4, seed=1)
    b, c = (random(70, 2, 24, seed=seed) for seed in (2, 3))
    weights = Mamba2Weights(-random(4, seed=4).exp(), random(4, seed=5), random(4, seed=6))
    state = random(4, 24, 16, seed=7)
    ours, last = reference.mamba2(spec, state.double(), Mamba2Inputs(x, dt, b, c), weights)
    out, end = modeling_mamba2.mamba2_chunk_scan(
        *(part[None] for part in (x, dt)),
        weights.a,
        b[None],
        c[None],
        chunk_size=32,
        D=weights.d,
        dt_bias=weights.dt_bias,
        initial_states=state.transpose(1, 2)[None],
        dt_softplus=True,
        return_final_states=True,
    )
    torch.testing.assert_close(out[0], ours.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end[0].transpose(1, 2), last.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_silu", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_short_conv(width: int, has_silu: bool) -> None:
    spec = ShortConvSpec(20, width, has_silu)
    x, weight, bias = random(9, 20, seed=0), random(20, width, seed=1), random(20, seed=2)
    zeros = torch.zeros(width - 1, 20)
    ours, last = reference.short_conv(spec, zeros, x, weight, bias)
    activation = "silu" if has_silu else None
    theirs = modeling_mamba2.causal_conv1d_fn(x.T[None], weight, bias, activation)
    torch.testing.assert_close(theirs[0].T, ours)
    assert torch.equal(last, x[9 - width + 1 :])


def test_units_of_a_state() -> None:
    delta = GatedDeltaSpec(16, 32, key_dim=128, value_dim=128)
    assert (delta.num_units, delta.unit_bytes) == (256, 8192)
    mamba = Mamba2Spec(num_heads=24, head_dim=64, state_size=128)
    assert (mamba.num_units, mamba.unit_bytes) == (96, 8192)
    conv = ShortConvSpec(8200, width=4)
    assert (conv.num_units, conv.unit_bytes) == (129, 768)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GatedDeltaSpec(2, 3, 16, 16), "num_v_heads=3"),
        (lambda: GatedDeltaSpec(2, 2, 16, 24), "value_dim=24"),
        (lambda: GatedDeltaSpec(2, 0, 16, 16), "below 1"),
        (lambda: Mamba2Spec(3, 16, 16, num_groups=2), "num_heads=3"),
        (lambda: Mamba2Spec(2, 24, 16), "head_dim=24"),
        (lambda: Mamba2Spec(2, 16, 0), "below 1"),
        (lambda: ShortConvSpec(0, 4), "num_channels=0"),
        (lambda: ShortConvSpec(64, 5), "width=5"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: object, name: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigurationError, match=name):
        make()
