"""Which classes of transformers are taken, and why others are refused."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch
from tests.models.fallback.conftest import raw_config
from tests.source_tree import Tree

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.fallback import hf_classes
from quire.models.fallback.hf_classes import build, find_class
from quire.models.fallback.interfaces import register_functions


def test_a_class_is_found_by_its_name():
    config, kind = find_class(raw_config("gpt2"))
    assert (config.model_type, kind.__name__) == ("gpt2", "GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (lambda: raw_config("rwkv"), "carry a state"),
        (lambda: raw_config("bloom"), "doesn't pass its attention through"),
        (lambda: raw_config("llama4_text"), "layers of the kind chunked_attention"),
        (lambda: raw_config("gpt2") | {"architectures": ["GPT2Model"]}, "is GPT2LMHeadModel"),
        (lambda: raw_config("gpt2") | {"model_type": "gpt9"}, "knows no model_type 'gpt9'"),
        (
            lambda: {"architectures": ["X"], "model_type": "x", "auto_map": {"AutoModel": "x.X"}},
            r"code in the model's folder \(auto_map\), which is never run",
        ),
        (
            lambda: {"model_type": "gpt2", "architectures": "GPT2LMHeadModel"},
            "architectures is 'GPT2LMHeadModel', but must be a list of one name",
        ),
    ],
)
def test_classes_that_cannot_run_are_refused_with_the_reason(raw, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        find_class(raw())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be"),
        ({"layer_types": ["full_attention"]}, "Gemma2Config doesn't accept this config"),
    ],
)
def test_fields_that_cannot_be_are_named(fields, reason):
    with pytest.raises(CheckpointError, match=reason):
        find_class(raw_config("gemma2") | {"layer_types": None} | fields)


def test_a_config_names_no_code():
    asked = {"_attn_implementation": "someone/kernel", "attn_implementation": "someone/kernel"}
    config, _ = find_class(raw_config("llama") | asked)
    assert config._attn_implementation != "someone/kernel"


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'transformers>=5\.0'"):
        find_class({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})


def test_an_old_package_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(UnsupportedModelError, match=r"transformers 4\.57\.1 is too old"):
        find_class({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})


def test_a_built_model_has_its_buffers_and_no_parameter_memory():
    register_functions()
    model = build(*find_class(raw_config("llama")), dtype=torch.float32)
    assert all(each.is_meta for each in model.parameters())
    assert all(not each.is_meta for each in model.buffers())


def test_the_package_is_imported_only_by_functions():
    folder = Path(hf_classes.__file__).parent
    sources = {f"models/fallback/{path.name}": path.read_text() for path in folder.glob("*.py")}
    for imports in Tree(sources).imports.values():
        of_package = [each for each in imports if each.target.split(".")[0] == "transformers"]
        assert all(each.where == "function" for each in of_package)


@pytest.mark.parametrize("architectures", [None, [], ["GPT2LMHeadModel"]])
def test_a_config_that_names_no_class_has_that_of_its_type(architectures):
    _, kind = find_class(raw_config("gpt2") | {"architectures": architectures})
    assert kind.__name__ == "GPT2LMHeadModel"
