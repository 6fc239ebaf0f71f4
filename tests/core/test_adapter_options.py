"""The options of adapters, alone and together."""

import pytest

from quire.core.adapter_options import AdapterOptions
from quire.errors import ConfigurationError


def test_without_adapters_there_are_no_slots():
    assert AdapterOptions().num_lora_slots == 0


def test_options_left_out_have_defaults():
    options = AdapterOptions(enable_lora=True)
    assert (options.num_lora_slots, options.lora_rank, options.num_cpu_loras) == (8, 16, 32)
    given = AdapterOptions(enable_lora=True, max_loras=2, max_lora_rank=64, max_cpu_loras=5)
    assert (given.num_lora_slots, given.lora_rank, given.num_cpu_loras) == (2, 64, 5)


def test_a_highest_rank_is_kept_where_there_are_no_adapters():
    assert AdapterOptions(max_lora_rank=16).num_lora_slots == 0


@pytest.mark.parametrize("name", ["max_loras", "max_cpu_loras"])
def test_numbers_of_adapters_do_not_go_without_enable_lora(name):
    with pytest.raises(ConfigurationError, match=f"{name} is 4, but adapters are not served"):
        AdapterOptions(**{name: 4})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_loras": 0}, "max_loras is 0, but must be at least 1"),
        ({"max_lora_rank": 257}, "max_lora_rank is 257, but must be at most 256"),
        (
            {"max_loras": 9, "max_cpu_loras": 8},
            "max_cpu_loras is 8, but must be at least max_loras, 9",
        ),
    ],
)
def test_bounds_are_named(given, message):
    with pytest.raises(ConfigurationError, match=message):
        AdapterOptions(enable_lora=True, **given)
