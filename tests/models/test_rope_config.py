"""Reading rope parameters in both of transformers' forms."""

import pytest

from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.rotary import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    YarnRope,
)
from quire.models.config_fields import ConfigFields
from quire.models.rope_config import read_rope, read_rotary_dim

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
UNREAD = {"finetuned": True, "my_note": 1, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1, 1.5], "long_factor": [2.0, 3.0]}


def _read(**raw):
    fields = ConfigFields(raw)
    rope = read_rope(fields, head_dim=4, max_position_embeddings=64)
    fields.finish()
    return rope


@pytest.mark.parametrize(
    ("raw", "rope"),
    [
        ({}, DefaultRope(10000.0)),
        ({"rope_theta": 500000}, DefaultRope(500000.0)),
        ({"rope_scaling": None, "rope_theta": None}, DefaultRope(10000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, DefaultRope(7.0)),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, DefaultRope(7.0)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 9.0}, DefaultRope(9.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(10000.0, 2.0)),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.5}},
            DynamicRope(10000.0, 2.5),
        ),
        (
            {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
            Llama3Rope(500000.0, 8.0, 1.0, 4.0, 8192),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, YarnRope(10000.0, 64, 4.0)),
        (
            {"rope_scaling": {"type": "yarn", "factor": None, "truncate": False}},
            YarnRope(10000.0, 64, None, truncate=False),
        ),
        (
            {"rope_parameters": LONG | {"rope_type": "longrope"}},
            LongRope(10000.0, 64, (1.0, 1.5), (2.0, 3.0)),
        ),
        (  # the config's own field goes before the one among the parameters
            {
                "rope_scaling": LONG | {"type": "longrope", "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 16,
            },
            LongRope(10000.0, 16, (1.0, 1.5), (2.0, 3.0)),
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
            DefaultRope(10000.0),
        ),
        (  # nor does transformers read these
            {"rope_scaling": {"type": "linear", "factor": 2.0} | UNREAD},
            LinearRope(10000.0, 2.0),
        ),
    ],
)
def test_reads_both_forms(raw, rope):
    assert _read(**raw) == rope


@pytest.mark.parametrize("rope_type", ["mrope", "axial", "su", 3])
def test_an_unknown_type_is_refused_with_the_list(rope_type):
    with pytest.raises(UnsupportedModelError) as caught:
        _read(rope_scaling={"type": rope_type, "factor": 2.0})
    assert f"the rope type is {rope_type!r}" in str(caught.value)
    assert "default, linear, dynamic, llama3, yarn, longrope, proportional" in str(caught.value)


def test_an_unknown_parameter_is_refused_with_the_list():
    with pytest.raises(UnsupportedModelError, match=r"'linear' has mscale, .*rope_theta, factor"):
        _read(rope_scaling={"type": "linear", "factor": 2.0, "mscale": 1.0})


def test_parameters_that_no_model_reads_are_left_out_and_named():
    fields = ConfigFields({"rope_scaling": {"type": "linear", "factor": 2.0} | UNREAD})
    read_rope(fields, head_dim=4, max_position_embeddings=64)
    assert sorted(fields.finish()) == ["rope_parameters.finetuned", "rope_parameters.my_note"]
    inner = ConfigFields({"transformers_version": "9.0.0"}).inner({"rope_parameters": UNREAD})
    with pytest.raises(UnsupportedModelError, match="'default' has finetuned, my_note"):
        read_rope(inner, head_dim=4, max_position_embeddings=64)


def test_parameters_that_are_left_out_are_named_in_the_files_order():
    """Each process has sets in another order, and replicas compare their configs."""
    names = [f"note_{letter}" for letter in "hbgcfde"]
    scaling = {"type": "linear", "factor": 2.0} | dict.fromkeys(names, 1)
    fields = ConfigFields({"rope_scaling": scaling})
    read_rope(fields, head_dim=4, max_position_embeddings=64)
    assert list(fields.finish()) == [f"rope_parameters.{name}" for name in names]


def test_parameters_by_layer_type_are_refused():
    nested = {"full_attention": {"rope_type": "default"}}
    with pytest.raises(UnsupportedModelError, match="has full_attention"):
        _read(rope_parameters=nested)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"type": "linear"}, "'linear' needs factor"),
        ({"type": "dynamic", "factor": None}, "'dynamic' needs factor"),
        ({"type": "llama3", "factor": 8.0}, "needs high_freq_factor, low_freq_factor"),
        ({"type": "longrope", "short_factor": [1, 1]}, "needs long_factor"),
        ({"type": "linear", "factor": 0}, "factor of the rope type 'linear' is 0"),
        ({"type": "linear", "factor": "2"}, "must be a number from 0.001 to 1e"),
        ({"type": "yarn", "factor": 2.0, "truncate": 1}, "must be true or false"),
        (LONG | {"type": "longrope", "long_factor": [1.0]}, "must be a list of 2 numbers"),
        (LONG | {"type": "longrope", "long_factor": 3.0}, "must be a list of 2 numbers"),
        (LONG | {"type": "longrope", "short_factor": [1, "a"]}, "an entry of config.json"),
    ],
)
def test_malformed_parameters_are_named(raw, message):
    with pytest.raises(CheckpointError, match=message):
        _read(rope_scaling=raw)


def test_rope_parameters_must_be_an_object():
    with pytest.raises(CheckpointError, match="the rope parameters are 'linear'"):
        _read(rope_scaling="linear")


@pytest.mark.parametrize(
    ("raw", "rotary_dim"),
    [
        ({}, 20),
        ({"partial_rotary_factor": None}, 20),
        ({"partial_rotary_factor": 0.5}, 40),
        ({"partial_rotary_factor": 0.78}, 62),  # 62.4
        ({"partial_rotary_factor": 1}, 80),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, 60),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.75}}, 60),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.5}, 60),
    ],
)
def test_the_rotary_dim_follows_partial_rotary_factor(raw, rotary_dim):
    fields = ConfigFields(raw)
    assert read_rotary_dim(fields, head_dim=80, default_factor=0.25) == rotary_dim
    read_rope(fields, head_dim=80, max_position_embeddings=64, rotary_dim=rotary_dim)
    fields.finish()


@pytest.mark.parametrize("factor", [0, -0.5, 1.01, 0.001, 0.34, 0.02, "0.5", True, float("nan")])
@pytest.mark.parametrize("is_inner", [False, True])
def test_an_impossible_part_of_a_head_is_named(factor, is_inner):
    raw = {"partial_rotary_factor": factor}
    with pytest.raises(CheckpointError, match="partial_rotary_factor is"):
        read_rotary_dim(
            ConfigFields({"rope_parameters": raw} if is_inner else raw),
            head_dim=80,
            default_factor=1.0,
        )


def test_lists_of_factors_have_one_of_each_pair_that_rotates():
    fields = ConfigFields({"rope_parameters": LONG | {"rope_type": "longrope"}})
    rope = read_rope(fields, head_dim=16, max_position_embeddings=64, rotary_dim=4)
    assert rope == LongRope(10000.0, 64, (1.0, 1.5), (2.0, 3.0))


def test_heads_that_rotate_in_part_are_refused():
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        _read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
