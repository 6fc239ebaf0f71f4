"""Activations and gates: bitwise equal to transformers' own."""

import pytest
import torch
from transformers.activations import ACT2FN

from quire.kernels.activations import (
    HF_ACTIVATIONS,
    ActivationFunction,
    Gating,
    activate,
    gate,
    gated,
    soft_cap,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(HF_ACTIVATIONS.keys() - {"gelu_new"}))
def test_equals_transformers_to_the_bit(name, dtype):
    gate_up = random(7, 128, dtype=dtype)  # rows of whole vectors
    before = gate_up.clone()
    # In transformers each is a product of its own.
    first, up = (part.contiguous() for part in gate_up.chunk(2, dim=-1))
    assert torch.equal(activate(first, HF_ACTIVATIONS[name]), ACT2FN[name](first))
    assert torch.equal(gated(gate_up, Gating(HF_ACTIVATIONS[name])), ACT2FN[name](first) * up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("size", [3, 17, 70])
@pytest.mark.parametrize("function", ActivationFunction, ids=lambda function: function.value)
def test_company_changes_no_bit(function, size, dtype):
    computed = [
        lambda rows: activate(rows[:, :size].contiguous(), function),
        lambda rows: gated(rows, Gating(function)),
        lambda rows: gated(rows, Gating(limit=3.0, alpha=1.7, up_offset=1.0)),
    ]
    rows = random(9, 2 * size, dtype=dtype)
    for compute in computed:
        whole = compute(rows)
        for first, last in ((0, 1), (3, 5), (8, 9), (2, 9)):
            assert torch.equal(compute(rows[first:last]), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 160), (48, 3, 34), (0, 8)])
def test_the_plain_gate_is_that_of_silu_to_the_bit(shape, dtype):
    gate_up = random(*shape, dtype=dtype)
    before = gate_up.clone()
    first, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(gated(gate_up, Gating()), ACT2FN["silu"](first) * up)
    assert torch.equal(gate_up, before)


def test_the_gate_comes_before_up():
    gate_up = torch.tensor([[0.0, 100.0, 3.0, 5.0]])
    assert gated(gate_up, Gating()).tolist() == [[0.0, 500.0]]


def test_the_old_name_of_gelu_by_tanh():
    x = random(3, 50)
    torch.testing.assert_close(activate(x, HF_ACTIVATIONS["gelu_new"]), ACT2FN["gelu_new"](x))


def test_a_gate_with_limits_by_the_definition():
    gate_up = random(5, 12)
    first, up = gate_up.double().chunk(2, dim=-1)
    first, up = first.clamp(max=3.0), up.clamp(-3.0, 3.0)
    expected = first * torch.sigmoid(1.7 * first) * (up + 1)
    found = gated(gate_up, Gating(limit=3.0, alpha=1.7, up_offset=1.0))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_gate_by_elements_and_by_rows():
    x, by = random(5, 12), random(5, 12).flip(0)
    torch.testing.assert_close(gate(x, by, ActivationFunction.SIGMOID), x * torch.sigmoid(by))
    assert torch.equal(
        gate(x, by[:, :1], ActivationFunction.SILU),
        x * activate(by[:, :1], ActivationFunction.SILU),
    )
    with pytest.raises(ValueError, match=r"by is \(5, 3\).*a last dimension of 1"):
        gate(x, by[:, :3], ActivationFunction.SIGMOID)


def test_a_soft_cap_bounds():
    x = random(4, 9) * 100
    assert torch.equal(soft_cap(x, 30.0), torch.tanh(x / 30.0) * 30.0)


def test_an_odd_size_is_named():
    with pytest.raises(ValueError, match=r"gate_up is \(2, 5\).*must be even"):
        gated(torch.zeros(2, 5), Gating(ActivationFunction.GELU))
