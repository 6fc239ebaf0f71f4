"""The rotation: bitwise equal to transformers' own, in place and out, on strided views too."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quire.kernels.rotary import rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1, 2), (5, 7, 1, 80), (48, 4, 2, 64), (0, 4, 2, 64), (3, 14, 2, 12)]


def _inputs(num_tokens, num_heads, num_kv_heads, head_dim, dtype):
    """q and k as the attention block has them: views of one fused tensor."""
    generator = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(num_tokens, num_heads + num_kv_heads, head_dim, generator=generator)
    angles = torch.randn(num_tokens, head_dim // 2, generator=generator) * 5
    angles = torch.cat((angles, angles), -1)
    q, k = fused.to(dtype).split((num_heads, num_kv_heads), dim=1)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def _transformers(q, k, cos, sin):
    """Its layout is [batch, heads, tokens, head size]."""
    rotated = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    return tuple(part[0].transpose(0, 1) for part in rotated)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers_to_the_bit(shape, dtype, in_place):
    q, k, cos, sin = _inputs(*shape, dtype)
    before = q.clone(), k.clone()
    expected = _transformers(q, k, cos, sin)
    rotated_q, rotated_k = rotary(q, k, cos, sin, in_place=in_place)
    assert torch.equal(rotated_q, expected[0]) and torch.equal(rotated_k, expected[1])
    if in_place:
        assert rotated_q is q and rotated_k is k
    else:
        assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def test_the_formula():
    angle = torch.tensor([[0.3, 1.1]])
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    rotated, _ = rotary(x, x, cos, sin)
    for pair, theta in enumerate((0.3, 1.1)):
        number = complex(x[0, 0, pair], x[0, 0, pair + 2]) * torch.polar(
            torch.tensor(1.0), torch.tensor(theta)
        )
        torch.testing.assert_close(rotated[0, 0, pair], number.real)
        torch.testing.assert_close(rotated[0, 0, pair + 2], number.imag)


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 4, 8), (2, 2, 8), (3, 8), (3, 8)],
        [(3, 4, 8), (3, 2, 6), (3, 8), (3, 8)],
        [(3, 4, 8), (3, 2, 8), (3, 4), (3, 8)],
        [(3, 4, 8), (3, 2, 8), (3, 8), (1, 8)],
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes):
    with pytest.raises(ValueError, match=r"k is .*, cos .* and sin .*, but q, \(3, 4, 8\)"):
        rotary(*(torch.zeros(shape) for shape in shapes))


def test_mixed_dtypes_are_refused():
    q, k, cos, sin = _inputs(2, 1, 1, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="must have one dtype"):
        rotary(q, k, cos.float(), sin)
