"""From a folder to its config."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.layers.rotary import DefaultRope, RopeLimits
from quire.models.architectures import MODELS
from quire.models.config import DecoderConfig
from quire.models.families.qwen3 import Qwen3Config
from quire.models.interface import TextModel
from quire.models.registry import load_config


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


@pytest.mark.parametrize("names", [["BloomForCausalLM"], ["LlamaForCausalLM"] * 2, "Llama"])
def test_an_unknown_architecture_is_refused(names, tmp_path):
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(_folder(tmp_path, architectures=names))
    assert str(tmp_path) in str(caught.value) and repr(names) in str(caught.value)
    assert "docs/models.md lists all" in str(caught.value)


@pytest.mark.parametrize("fields", [{}, {"architectures": None}, {"architectures": []}])
def test_without_a_class_and_a_known_type_it_is_refused(fields, tmp_path):
    with pytest.raises(UnsupportedModelError, match="knows no model_type 'new'") as caught:
        load_config(_folder(tmp_path, model_type="new", **fields))
    assert "architectures names no class" in str(caught.value)


@pytest.mark.parametrize("architectures", [None, [], "absent"])
def test_without_a_class_the_model_type_says_it(architectures, tmp_path):
    raw = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    raw["architectures"] = architectures
    if architectures == "absent":
        del raw["architectures"]
    expected = load_config(EMBEDDED_MODEL)
    assert load_config(_folder(tmp_path, **raw)) == expected
    other = {"architectures": None, "hidden_act": "silu"}
    assert load_config(EMBEDDED_MODEL, overrides=other) == expected


def test_fields_that_no_model_reads_are_known_of_a_config_but_refused_as_overrides(tmp_path):
    raw = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    noted = load_config(_folder(tmp_path, **raw, my_note="a", training_dtype="bf16"))
    assert noted == replace(load_config(EMBEDDED_MODEL), left_out=("my_note", "training_dtype"))
    with pytest.raises(ConfigurationError, match="hf_overrides has rope_paramters, which no model"):
        load_config(tmp_path, overrides={"rope_paramters": {"rope_theta": 1e4}})
    with pytest.raises(ConfigurationError, match=r"has rope_parameters\.thetta, which no model"):
        load_config(tmp_path, overrides={"rope_scaling": {"type": "default", "thetta": 1e4}})


def test_a_refused_field_is_left_out_by_an_override(tmp_path):
    raw = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    folder = _folder(tmp_path, **raw, clip_qkv=8)
    with pytest.raises(UnsupportedModelError, match=r"--hf-overrides '\{\"clip_qkv\": null\}'"):
        load_config(folder)
    assert load_config(folder, overrides={"clip_qkv": None}) == load_config(EMBEDDED_MODEL)


def test_a_refusal_names_what_is_called_alike(tmp_path):
    with pytest.raises(
        UnsupportedModelError, match=r"those with similar names are .*Qwen3ForCausalLM"
    ):
        load_config(_folder(tmp_path, architectures=["Qwen3ForCausalML"]), from_transformers=False)


def test_a_refusal_names_nothing_that_is_called_otherwise(tmp_path):
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(_folder(tmp_path, architectures=["BloomForCausalLM"]), from_transformers=False)
    assert "with similar names" not in str(caught.value)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_config(tmp_path)


# Of families that call fields otherwise, or know none of that name.
_OTHER_FIELDS = {
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "vocab_size_per_layer_input": 8,
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention"]},
    "FalconH1ForCausalLM": {"mamba_n_heads": 2, "mamba_d_ssm": 32},
    "Lfm2ForCausalLM": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "GPT2LMHeadModel": {"intermediate_size": None, "num_key_value_heads": None},
    "OPTForCausalLM": {"intermediate_size": None, "num_key_value_heads": None, "ffn_dim": 8},
    "StableLmForCausalLM": {"partial_rotary_factor": 1.0},
    # With a layer of each kind.
    "Qwen3NextForCausalLM": {"num_hidden_layers": 4},
    "Qwen3_5ForCausalLM": {"num_hidden_layers": 4},
    "Qwen3_5MoeForCausalLM": {"num_hidden_layers": 4},
}


def test_every_entry_names_the_parts_of_the_fused_linears(tmp_path):
    for name, entry in MODELS.items():
        raw = {
            "architectures": [name],
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 8,
        }
        if issubclass(entry.config, DecoderConfig):
            raw["num_key_value_heads"] = 1
        raw |= _OTHER_FIELDS.get(name, {})
        config = entry.config.from_hf({key: raw[key] for key in raw if raw[key] is not None})
        assert issubclass(entry.model, TextModel)
        assert entry.generates == name.endswith(("ForCausalLM", "LMHeadModel"))
        model = entry.model(
            config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8
        )
        leaves = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        assert entry.checkpoint_parts.keys() <= leaves


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def _published(kind, sizes, positions, theta, **others):
    """A config.json of the hub. sizes: vocabulary, hidden, MLP, layers, heads, KV heads."""
    names = ("vocab", "hidden", "intermediate")
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        **{f"{name}_size": size for name, size in zip(names, sizes, strict=False)},
        "num_hidden_layers": sizes[3],
        "num_attention_heads": sizes[4],
        "num_key_value_heads": sizes[5],
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-05,
        "rope_theta": theta,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0",
        "use_cache": True,
        **others,
    }


PUBLISHED = {
    "Llama 1 7B": _published(
        "Llama", (32000, 4096, 11008, 32, 32, 32), 2048, 1e4, max_sequence_length=2048
    ),
    "Llama 3.1 405B": _published(
        "Llama", (128256, 16384, 53248, 126, 128, 8), 131072, 5e5, rope_scaling=_LLAMA3,
        pretraining_tp=1, mlp_bias=False, attention_bias=False,
    ),
    "Llama 3.2 1B": _published(
        "Llama", (128256, 2048, 8192, 16, 32, 8), 131072, 5e5, tie_word_embeddings=True,
        head_dim=64, rope_scaling=_LLAMA3 | {"factor": 32.0},
    ),
    "Llama 3 of 4M positions": _published(
        "Llama", (128256, 4096, 14336, 32, 32, 8), 4194304, 45845221440
    ),
    "Vicuna 16k": _published(
        "Llama", (32000, 4096, 11008, 32, 32, 32), 4096, 1e4,
        rope_scaling={"factor": 4.0, "type": "linear"},
    ),
    "Yi 1.5": _published("Llama", (64000, 4096, 11008, 48, 32, 4), 200000, 1e7),
    "Mistral 7B v0.1": _published(
        "Mistral", (32000, 4096, 14336, 32, 32, 8), 32768, 1e4, sliding_window=4096
    ),
    "Mistral Nemo": _published(
        "Mistral", (131072, 5120, 14336, 40, 32, 8), 1024000, 1e6, sliding_window=None, head_dim=128
    ),
    "Qwen2.5 0.5B": _published(
        "Qwen2", (151936, 896, 4864, 24, 14, 2), 32768, 1e6, sliding_window=32768,
        max_window_layers=21, use_sliding_window=False, use_mrope=False, tie_word_embeddings=True,
    ),
    "Qwen2.5 72B, stretched": _published(
        "Qwen2", (152064, 8192, 29568, 80, 64, 8), 32768, 1e6, sliding_window=131072,
        max_window_layers=70, use_sliding_window=False, rope_scaling=_YARN,
    ),
    "Qwen2.5 with windows": _published(
        "Qwen2", (151936, 1536, 8960, 28, 12, 2), 32768, 1e6, sliding_window=4096,
        max_window_layers=21, use_sliding_window=True,
    ),
    "Qwen3 4B 2507": _published(
        "Qwen3", (151936, 2560, 9728, 36, 32, 8), 262144, 5000000, sliding_window=None,
        max_window_layers=36, use_sliding_window=False, head_dim=128, attention_bias=False,
    ),
    "Qwen3 8B, stretched as DeepSeek's": _published(
        "Qwen3", (151936, 4096, 12288, 36, 32, 8), 40960, 1e6, head_dim=128,
        rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_written_anew", [False, True], ids=["published", "transformers 5"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(name, is_written_anew, tmp_path):
    folder = _folder(tmp_path, **PUBLISHED[name])
    theirs = AutoConfig.from_pretrained(folder)
    if is_written_anew:
        (folder / "config.json").write_text(theirs.to_json_string(use_diff=False))
    ours = load_config(folder)
    for mine, their in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("dtype", "dtype"),
    ):
        assert getattr(ours, mine) == getattr(theirs, their), mine
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    positions = ours.max_position_embeddings
    limits = RopeLimits(ours.head_dim, positions, positions)
    frequencies, factor = ours.rope.frequencies(limits)
    rope_type = theirs.rope_parameters["rope_type"]
    if rope_type == "default":
        assert ours.rope == DefaultRope(theirs.rope_parameters["rope_theta"])
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[rope_type](theirs, "cpu")
        torch.testing.assert_close(frequencies, expected)
        assert factor == pytest.approx(expected_factor)
    kinds = getattr(theirs, "layer_types", None) or []
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    if "Mistral" in name:
        windows = [theirs.sliding_window] * ours.num_layers
    assert list(ours.windows) == (windows or [None] * ours.num_layers)
