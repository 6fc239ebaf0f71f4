"""Names of Ollama's library become ids of the hub."""

import pytest
from huggingface_hub.utils import validate_repo_id

from quire.errors import CheckpointError
from quire.hub.aliases import _families, hub_id_of


@pytest.mark.parametrize("name", _families())
def test_each_tag_maps_to_a_valid_repo_id(name):
    sizes = _families()[name].get("sizes", [])
    ids = {hub_id_of(f"{name}:{size}") for size in sizes or ("latest",)}
    assert len(ids) == max(1, len(sizes))
    for each in ids:
        validate_repo_id(each)
        assert each.count("/") == 1
    assert hub_id_of(name) == hub_id_of(f"library/{name.upper()}:latest")


def test_a_name_without_a_tag_is_the_first_size():
    assert hub_id_of("qwen3") == "Qwen/Qwen3-8B"
    assert hub_id_of("qwen3:0.6b") == "Qwen/Qwen3-0.6B"
    assert hub_id_of("gemma3:1B") == "google/gemma-3-1b-it"
    assert hub_id_of("phi4") == "microsoft/phi-4"


@pytest.mark.parametrize("tag", ["30b-a3b", "0.6b-q8_0", "q4_K_M"])
def test_a_tag_that_is_no_size_is_refused(tag):
    with pytest.raises(CheckpointError, match=r"there is no model .* give qwen3:8b or qwen3:0.6b"):
        hub_id_of(f"qwen3:{tag}")


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "org/qwen3", "", "bert-base-uncased"])
def test_possible_hub_ids_are_not_taken_for_aliases(name):
    assert hub_id_of(name) is None
