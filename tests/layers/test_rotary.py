"""Rope types against transformers' own functions, to the bit, with the numbers of real models."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.layers.rotary import (
    ROPE_TYPES,
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    RopeLimits,
    RotaryEmbedding,
    YarnRope,
)

CPU = torch.device("cpu")
TRAINED = 4096
_SHORT = tuple(1.0 + index / 50 for index in range(64))
_LONG = tuple(1.0 + index for index in range(64))

LLAMA_31 = Llama3Rope(500000.0, 8.0, 1.0, 4.0, 8192)
ROPES = [
    ("default", DefaultRope(10000.0), 1024),
    ("default", DefaultRope(1000000.0), 131072),
    ("linear", LinearRope(10000.0, 4.0), 1024),
    ("dynamic", DynamicRope(10000.0, 2.0), 1024),  # below what was trained: as the default
    ("dynamic", DynamicRope(10000.0, 2.0), 8192),
    ("dynamic", DynamicRope(10000.0, 4.0), 10000),
    ("llama3", LLAMA_31, 131072),
    ("llama3", Llama3Rope(500000.0, 32.0, 1.0, 4.0, 8192), 131072),
    ("yarn", YarnRope(1000000.0, 32768, 4.0), 131072),
    ("yarn", YarnRope(10000.0, 1024, 16.0, beta_fast=24.0, beta_slow=2.0), 4096),
    ("yarn", YarnRope(10000.0, 1024, 16.0, truncate=False), 4096),
    ("yarn", YarnRope(10000.0, 1024, 40.0, mscale=0.707, mscale_all_dim=1.0), 4096),
    ("yarn", YarnRope(10000.0, 1024, 16.0, attention_factor=1.5), 4096),
    ("yarn", YarnRope(10000.0, 1024, None), 4096),
    ("yarn", YarnRope(10000.0, 1024, 1.0), 4096),
    ("longrope", LongRope(10000.0, 1024, _SHORT, _LONG), 1024),
    ("longrope", LongRope(10000.0, 1024, _SHORT, _LONG), 1025),
    ("longrope", LongRope(10000.0, 1024, _SHORT, _LONG, factor=32.0), 4096),
    ("longrope", LongRope(10000.0, 1024, _SHORT, _LONG, attention_factor=1.1), 4096),
    ("longrope", LongRope(10000.0, 4096, _SHORT, _LONG), 4096),
    ("proportional", ProportionalRope(1e6, 0.25), 4096),
    ("proportional", ProportionalRope(1e6, 0.3, 8.0), 4096),
    ("proportional", ProportionalRope(1e6), 4096),
]


def _config(rope_type, rope, head_dim=128, **parameters_too):
    given = {name: getattr(rope, name) for name in rope.__dataclass_fields__}
    parameters = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value is not None or name == "factor"
    }
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": rope_type} | parameters | parameters_too,
    )


@pytest.mark.parametrize(("rope_type", "rope", "max_model_len"), ROPES)
def test_frequencies_equal_transformers_to_the_bit(rope_type, rope, max_model_len):
    config = _config(rope_type, rope)
    if rope_type == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope_type](config, CPU, seq_len=max_model_len)
    ours, our_factor = rope.frequencies(RopeLimits(128, TRAINED, max_model_len))
    assert ours.dtype == torch.float32 and ours.shape == (64,)
    assert torch.equal(ours, expected)
    assert our_factor == factor


@pytest.mark.parametrize(
    ("rope_type", "rope", "max_model_len"),
    [row for row in ROPES if row[0] not in ("default", "proportional")],
)
def test_frequencies_of_a_part_of_each_head_equal_transformers(rope_type, rope, max_model_len):
    """Their dimension is how many elements rotate: here 128 of 256, or 0.5."""
    config = _config(rope_type, rope, head_dim=256, partial_rotary_factor=0.5)
    expected, factor = ROPE_INIT_FUNCTIONS[rope_type](config, CPU, seq_len=max_model_len)
    ours, our_factor = rope.frequencies(RopeLimits(128, TRAINED, max_model_len))
    assert torch.equal(ours, expected) and our_factor == factor


def test_attn_factor_multiplies_the_factor_of_yarn():
    """As DeepSeek-R1-0528-Qwen3-8B has it, which so leaves cosines and sines as they are."""
    limits = RopeLimits(128, 131072, 131072)
    ours, factor = YarnRope(1e6, 32768, 4.0, attn_factor=0.8782488562869419).frequencies(limits)
    plain, plain_factor = YarnRope(1e6, 32768, 4.0).frequencies(limits)
    assert torch.equal(ours, plain)
    assert plain_factor == pytest.approx(1.1386, abs=1e-4) and factor == pytest.approx(
        1.0, abs=1e-9
    )
    fixed = YarnRope(1e6, 32768, 4.0, attention_factor=1.5, attn_factor=0.5)
    assert fixed.frequencies(limits)[1] == 1.5


def test_every_type_is_compared():
    assert {rope_type for rope_type, _, _ in ROPES} == ROPE_TYPES.keys()
    assert all(ROPE_TYPES[rope_type] is type(rope) for rope_type, rope, _ in ROPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [DefaultRope(10000.0), YarnRope(10000.0, 1024, 16.0)])
def test_cosines_and_sines_equal_transformers_to_the_bit(rope, dtype):
    rope_type = next(name for name, kind in ROPE_TYPES.items() if kind is type(rope))
    reference = LlamaRotaryEmbedding(_config(rope_type, rope, head_dim=80))
    layer = RotaryEmbedding(rope, RopeLimits(80, TRAINED, 2000), dtype=dtype, device=CPU)
    positions = torch.tensor([0, 1, 1999, 3, 3, 1024])
    expected = reference(torch.empty(0, dtype=dtype), positions[None])
    for ours, theirs in zip(layer(positions).cos_sin(), expected, strict=True):
        assert ours.dtype == dtype and ours.shape == (6, 80)
        assert torch.equal(ours, theirs[0])


def test_the_table_is_fp32_over_all_positions_and_no_part_of_a_checkpoint():
    layer = RotaryEmbedding(
        DefaultRope(10000.0), RopeLimits(8, TRAINED, 33), dtype=torch.bfloat16, device=CPU
    )
    assert layer.table.shape == (33, 8) and layer.table.dtype == torch.float32
    assert not layer.state_dict()
    with pytest.raises(IndexError):
        layer(torch.tensor([33])).cos_sin()


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_looks_up_as_many_rows_as_asked(num_tokens):
    layer = RotaryEmbedding(
        DefaultRope(10000.0), RopeLimits(8, TRAINED, 33), dtype=torch.float32, device=CPU
    )
    cos, sin = layer(torch.arange(num_tokens)).cos_sin()
    assert cos.shape == sin.shape == (num_tokens, 8)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (DefaultRope(1e4), 4096),
        (LinearRope(1e4, 2.5), 10240),
        (DynamicRope(1e4, 4.0), 16384),
        (LinearRope(1e4, 0.5), 4096),
        (Llama3Rope(1e4, 8.0, 1.0, 4.0, 1024), 4096),
        (YarnRope(1e4, 4096, 4.0), 16384),  # the original length is named
        (YarnRope(1e4, 1024, 4.0), 4096),  # the stretched length is named
        (YarnRope(1e4, 1024, 2.0), 4096),
        (YarnRope(1e4, 1024), 4096),
        (LongRope(1e4, 1024, (1.0,), (2.0,), 4.0), 4096),
    ],
)
def test_how_far_a_type_stretches_the_length_that_a_checkpoint_names(rope, longest):
    assert rope.max_positions(4096) == longest


def test_a_fixed_length_makes_dynamic_and_longrope_independent_of_the_context():
    dynamic = DynamicRope(10000.0, 2.0)
    short = dynamic.frequencies(RopeLimits(64, 2048, 2048))[0]
    long = dynamic.frequencies(RopeLimits(64, 2048, 4096))[0]
    assert torch.equal(short, DefaultRope(10000.0).frequencies(RopeLimits(64, 2048, 1))[0])
    assert not torch.equal(short, long)
