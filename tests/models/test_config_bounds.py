"""Both ends of every number of a config, and what is beyond them."""

import math

import pytest

from quire.errors import CheckpointError
from quire.models.config_bounds import INTEGERS, NUMBERS, checked_integer, checked_number
from quire.models.config_fields import ConfigFields
from quire.models.families.llama import LlamaConfig

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("name", "bounds"), INTEGERS.items())
def test_integers_end_at_their_bounds(name, bounds):
    lowest, highest, step = int(bounds.lowest), int(bounds.highest), bounds.multiple_of
    for value in (lowest, highest):
        assert ConfigFields({name: value}).integer(name) == value
    for value in (lowest - step, highest + step, 2**63, 10**30, -1, 1.0, True, "1", math.inf):
        with pytest.raises(
            CheckpointError, match=rf"it is .*, but must be .* {lowest} to {highest}"
        ):
            checked_integer("it", name, value)


@pytest.mark.parametrize(("name", "bounds"), NUMBERS.items())
def test_numbers_are_finite_and_end_at_their_bounds(name, bounds):
    for value in (bounds.lowest, bounds.highest):
        assert checked_number("it", name, value) == value
    below, above = math.nextafter(bounds.lowest, -1), math.nextafter(bounds.highest, math.inf)
    for value in (below, above, math.inf, -math.inf, math.nan, 10**400, True, "1", None, [1.0]):
        with pytest.raises(CheckpointError, match=r"it is .*, but must be a number from"):
            checked_number("it", name, value)


def test_a_number_is_a_float():
    value = checked_number("it", "factor", 3)
    assert value == 3.0 and isinstance(value, float)


def test_a_billion_layers_are_refused_before_anything_is_made_of_them():
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers is 1000000000, .* from 1 to 4096"
    ):
        LlamaConfig.from_hf(RAW | {"num_hidden_layers": 10**9})


def test_an_infinite_epsilon_is_refused():
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is inf, but must be a number from"):
        LlamaConfig.from_hf(RAW | {"rms_norm_eps": math.inf})


def test_sizes_that_are_sound_one_by_one_may_be_too_many_weights():
    sizes = {"hidden_size": 1 << 20, "intermediate_size": 1 << 21, "num_attention_heads": 64}
    LlamaConfig.from_hf(RAW | sizes | {"num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"describes a model of \d+ weights \(4096 layers"):
        LlamaConfig.from_hf(RAW | sizes | {"num_hidden_layers": 4096})


@pytest.mark.parametrize("name", ["architectures", "torch_dtype", "hidden_act", "rope_scaling"])
@pytest.mark.parametrize(
    "value", [[["a"]], {"factor": []}, [{}], "\ud800\n", 10**400, {"type": []}]
)
def test_values_of_any_kind_are_refused_in_a_line(name, value):
    with pytest.raises((CheckpointError, ValueError)) as caught:
        LlamaConfig.from_hf(RAW | {name: value})
    assert str(caught.value).startswith("config.json: ") and str(caught.value).isprintable()
