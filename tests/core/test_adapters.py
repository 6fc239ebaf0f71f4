"""LoRARequest: vLLM's names and positions, and what it refuses."""

import pytest

from quire.core.adapters import LoRARequest
from quire.errors import InvalidRequestError


def test_it_has_vllms_fields_and_positions():
    request = LoRARequest("sql", 3, "/adapters/sql")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == (
        "sql",
        3,
        "/adapters/sql",
    )
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("", 1, "/a"), "lora_name"),
        ((7, 1, "/a"), "lora_name"),
        (("a", 0, "/a"), "lora_int_id"),
        (("a", True, "/a"), "lora_int_id"),
        (("a", "1", "/a"), "lora_int_id"),
        (("a", 1, None), "lora_path"),
        (("a", 1, ""), "lora_path"),
    ],
)
def test_wrong_fields_are_named(arguments, field):
    with pytest.raises(InvalidRequestError, match=f"{field} is ") as raised:
        LoRARequest(*arguments)
    assert raised.value.param == field
