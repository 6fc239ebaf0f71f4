"""Configs of all families with values of wrong types are refused by a sentence, or understood."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.models.family_shapes import FAMILIES, make_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.errors import QuireError
from quire.models.architectures import MODELS

WRONG: tuple[Any, ...] = ("x", 3.5, -1, 10**30, [], {}, [1], [None], {"a": 1}, True, None)
BESIDE = ("rope_scaling", "rope_theta", "partial_rotary_factor", "layer_types", "head_dim")


def _paths(fields: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *inner) for inner in _paths(value))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_a_wrong_type_is_no_traceback(family: str) -> None:
    raw = json.loads(json.dumps(make_config(family).to_dict(), default=str))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[raw["model_type"]]
    raw["architectures"] = [architecture]
    read = MODELS.get(architecture).config.from_hf
    read(raw)
    num_refused = 0
    for path in (*_paths(raw), *((name,) for name in BESIDE)):
        for value in WRONG:
            changed = copy.deepcopy(raw)
            place = changed
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = value
            try:
                read(changed)
            except QuireError:
                num_refused += 1
    assert num_refused > len(WRONG)
