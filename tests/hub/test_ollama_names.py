"""Names of Ollama's library become ids of the hub."""

import pytest
from huggingface_hub.utils import validate_repo_id

from quire.hub.ollama_names import _FAMILIES, advice_for


@pytest.mark.parametrize("family", _FAMILIES)
def test_each_tag_maps_to_a_valid_repo_id(family):
    entry = _FAMILIES[family]
    ids = {entry.named(size) for size in entry.sizes or ("latest",)}
    assert len(ids) == max(1, len(entry.sizes))
    for each in ids:
        validate_repo_id(each)
        assert each.count("/") == 1


def test_a_tag_that_is_not_known_gets_the_usual_one():
    assert advice_for("qwen3:30b-a3b") == advice_for("qwen3")


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "org/qwen3", "", "bert-base-uncased"])
def test_possible_hub_ids_are_not_taken_for_ollama_names(name):
    assert advice_for(name) is None
