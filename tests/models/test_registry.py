"""From a folder to its config."""

import json

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.hub import EMBEDDED_MODEL
from quire.models.llama import LlamaForCausalLM
from quire.models.qwen3 import Qwen3Config
from quire.models.registry import MODELS, load_config


def _folder(tmp_path, **fields):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_reads_the_embedded_model():
    config = load_config(EMBEDDED_MODEL)
    assert isinstance(config, Qwen3Config)
    assert config.architecture == "Qwen3ForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (4096, 256, 4)
    assert config.max_position_embeddings == 4096
    assert config.dtype == torch.bfloat16
    assert len(config.attention_specs) == 4


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, ["LlamaForCausalLM"] * 2])
def test_an_unknown_architecture_is_refused_with_the_list(names, tmp_path):
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(_folder(tmp_path, architectures=names))
    assert str(tmp_path) in str(caught.value) and repr(names) in str(caught.value)
    assert all(name in str(caught.value) for name in MODELS)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_config(tmp_path)


def test_every_entry_names_the_parts_of_the_fused_linears(tmp_path):
    for name, entry in MODELS.items():
        config = entry.config.from_hf(
            {
                "architectures": [name],
                "vocab_size": 8,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 8,
            }
        )
        assert issubclass(entry.model, LlamaForCausalLM)
        model = entry.model(
            config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8
        )
        leaves = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        assert entry.checkpoint_parts.keys() <= leaves
