"""The rotation: bitwise equal to transformers' own, in place and out, on strided views too."""

import pytest
import torch
from tests.pairwise import pairwise
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_to_first_elements

from quire.kernels.rms_norm import rms_norm
from quire.kernels.rotary import Angles, Rotation, rotary, rotate, rotate_queries

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARTS = [(64, 16), (64, 32), (64, 48), (128, 32), (128, 64), (128, 96), (80, 20), (12, 2)]
"""D, R"""
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


@pairwise()
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), PARTS)
def test_partial_rotation_equals_transformers_to_the_bit(head_dim, rotary_dim, dtype, in_place):
    q, k, _, _ = _inputs(5, 4, 2, head_dim, dtype)
    _, _, cos, sin = _inputs(5, 4, 2, rotary_dim, dtype)
    rest = q[..., rotary_dim:].clone(), k[..., rotary_dim:].clone()
    theirs = apply_to_first_elements(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    ours = rotary(q, k, cos, sin, in_place=in_place)
    for rotated, expected, unchanged, given in zip(ours, theirs, rest, (q, k), strict=True):
        assert torch.equal(rotated, expected[0].transpose(0, 1))
        assert torch.equal(rotated[..., rotary_dim:], unchanged)
        assert (rotated is given) == in_place


@pytest.mark.parametrize(("head_dim", "rotary_dim"), PARTS)
def test_partial_rotation_equals_the_definition(head_dim, rotary_dim):
    q, k, _, _ = _inputs(5, 4, 2, head_dim, torch.float32)
    angles = torch.rand(5, rotary_dim // 2, dtype=torch.float64) * 6
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    wide = torch.cat((angles, angles), -1)
    rotated, _ = rotary(q, k, wide.cos().float(), wide.sin().float())
    first, second = q.double()[..., :rotary_dim].chunk(2, dim=-1)
    numbers = torch.complex(first, second) * turns
    exact = torch.cat((numbers.real, numbers.imag, q.double()[..., rotary_dim:]), -1)
    torch.testing.assert_close(rotated.double(), exact, rtol=0, atol=1e-6)


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
        [(3, 4, 8), (3, 2, 8), (3, 10), (3, 10)],
        [(3, 4, 8), (3, 2, 8), (3, 3), (3, 3)],
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes):
    with pytest.raises(ValueError, match=r"k is .*, cos .* and sin .*, but for q, \(3, 4, 8\)"):
        rotary(*(torch.zeros(shape) for shape in shapes))


def test_mixed_dtypes_are_refused():
    q, k, cos, sin = _inputs(2, 1, 1, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="must have one dtype"):
        rotary(q, k, cos.float(), sin)


@pytest.mark.parametrize("offset", [None, 1.0])
def test_a_rotation_norms_then_turns_what_it_is_given(offset):
    angles = Angles(torch.randn(9, 16), torch.tensor([3, 0, 8]), torch.float32)
    q, k, _, _ = _inputs(3, 4, 2, 16, torch.float32)
    q_norm, k_norm = torch.randn(2, 16)
    normed = rms_norm(q, q_norm, 1e-6, offset), rms_norm(k, k_norm, 1e-6, offset)
    turned = rotary(*normed, *angles.cos_sin())
    for given, expected in ((None, normed), (angles, turned)):
        rotation = Rotation(given, q_norm, k_norm, 1e-6, offset)
        found = rotate(q.clone(), k.clone(), rotation)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert torch.equal(rotate_queries(q.clone(), rotation), expected[0])
    plain = rotate(q, k, Rotation(None))
    assert plain[0] is q and plain[1] is k
