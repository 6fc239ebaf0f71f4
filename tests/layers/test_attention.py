"""The attention block: what it hands to the attention call, and what it makes of the answer.

Its numbers as a whole are compared with transformers in tests/models.
"""

import pytest
import torch

from quire.attention.interface import AttentionSpec, rotated
from quire.kernels.rotary import Angles
from quire.layers.attention import Attention, AttentionBias, QKNorm
from quire.layers.linear import LinearKind

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=4, scale=0.5)
NUM_TOKENS, HIDDEN = 5, 10


class Recorder:
    """Returns q plus one and remembers what it was given, q and k as they are to be stored."""

    def __call__(self, layer, inputs):
        self.layer, self.sinks = layer, inputs.sinks
        q, k = rotated(inputs)
        self.q, self.k, self.v = q.clone(), k.clone(), inputs.v.clone()
        return q + 1


def _attention(qk_norm_eps=None, bias=AttentionBias()):  # noqa: B008
    block = Attention(
        3,
        HIDDEN,
        SPEC,
        bias=bias,
        qk_norm=None if qk_norm_eps is None else QKNorm(qk_norm_eps),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return block


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def _angles(turn: float) -> Angles:
    turns = torch.full((1, SPEC.head_dim // 2), turn)
    table = torch.cat((turns.cos(), turns.sin()), dim=-1)
    return Angles(table, torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.float32)


def test_hands_over_heads_and_projects_the_answer(hidden):
    block, seen = _attention(), Recorder()
    output = block(hidden, _angles(0.0), seen)
    q, k, v = block.qkv_proj(hidden).split((24, 8, 8), dim=-1)
    assert (seen.layer, seen.sinks) == (3, None)
    assert torch.equal(seen.q, q.reshape(NUM_TOKENS, 6, 4))
    assert torch.equal(seen.k, k.reshape(NUM_TOKENS, 2, 4))
    assert torch.equal(seen.v, v.reshape(NUM_TOKENS, 2, 4))
    assert torch.equal(output, block.o_proj(q + 1))


def test_turns_q_and_k_but_not_v(hidden):
    block, still, turned = _attention(), Recorder(), Recorder()
    block(hidden, _angles(0.0), still)
    block(hidden, _angles(torch.pi), turned)
    torch.testing.assert_close(turned.q, -still.q)
    torch.testing.assert_close(turned.k, -still.k)
    assert torch.equal(turned.v, still.v)


def test_norms_each_head_of_q_and_k_before_the_turn(hidden):
    block, seen = _attention(qk_norm_eps=1e-6), Recorder()
    block.q_norm.weight.fill_(2.0)
    block.k_norm.weight.fill_(3.0)
    block(hidden, _angles(0.7), seen)
    # A rotation keeps lengths: root mean square = the norm's weight.
    for heads, size in ((seen.q, 2.0), (seen.k, 3.0)):
        lengths = heads.pow(2).mean(-1).sqrt()
        torch.testing.assert_close(lengths, torch.full_like(lengths, size))
    v = block.qkv_proj(hidden)[:, 32:]
    assert torch.equal(seen.v, v.reshape(NUM_TOKENS, 2, 4))


@pytest.mark.parametrize("offset", [None, 1.0])
def test_norms_each_head_where_nothing_turns(hidden, offset):
    block, seen = _attention(qk_norm_eps=1e-6), Recorder()
    block.qk_norm = QKNorm(1e-6, offset=offset)
    block.q_norm.offset = block.k_norm.offset = offset
    block(hidden, None, seen)
    q, k, _ = block.qkv_proj(hidden).split((24, 8, 8), dim=-1)
    assert torch.equal(seen.q, block.q_norm(q.unflatten(-1, (6, 4))))
    assert torch.equal(seen.k, block.k_norm(k.unflatten(-1, (2, 4))))


def test_heads_of_values_may_be_smaller(hidden):
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=4, scale=0.5, v_head_dim=3)
    options = {"bias": AttentionBias(), "dtype": torch.float32, "device": torch.device("cpu")}
    block = Attention(3, HIDDEN, spec, **options)
    assert block.qkv_proj.part_sizes == (24, 8, 6) and block.o_proj.input_size == 18

    def attend(layer, inputs):
        assert inputs.v.shape == (NUM_TOKENS, 2, 3) and inputs.rotation is None
        return inputs.q[..., :3]

    assert block(hidden, None, attend).shape == hidden.shape


@pytest.mark.parametrize("qkv", [False, True])
@pytest.mark.parametrize("output", [False, True])
def test_biases_are_where_they_are_asked_for(qkv, output):
    block = _attention(bias=AttentionBias(qkv=qkv, output=output))
    assert (block.qkv_proj.bias is not None) is qkv
    assert (block.o_proj.bias is not None) is output


def test_is_sharded_by_heads_then_rows():
    block = _attention()
    assert block.qkv_proj.kind is LinearKind.COLUMN
    assert block.qkv_proj.part_sizes == (24, 8, 8)
    assert block.o_proj.kind is LinearKind.ROW
