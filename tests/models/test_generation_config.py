"""A model's own end tokens and sampling defaults."""

import json
import subprocess
import sys

import pytest
from tests.gguf_writer import write_gguf

from quire.core.sampling_params import SamplingDefaults
from quire.errors import CheckpointError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.generation_config import GenerationConfig, load_generation_config


@pytest.fixture
def write(tmp_path):
    def write(generation, config=None):
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        return tmp_path

    return write


def test_without_a_file_there_are_defaults(write):
    assert load_generation_config(write(None)) == GenerationConfig()
    assert GenerationConfig().defaults == SamplingDefaults()


def test_the_embedded_model_is_greedy_and_has_two_end_tokens():
    config = load_generation_config(EMBEDDED_MODEL)
    assert config.defaults.temperature == 0.0
    assert config.end_token_ids == (2, 0)


def test_reads_what_sampling_knows_and_nothing_else(write):
    config = load_generation_config(
        write(
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_p": 0.95,
                "top_k": 20,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "max_new_tokens": 7,
                "transformers_version": "4.51.0",
            }
        )
    )
    assert config.defaults == SamplingDefaults(0.6, 0.95, 20, 0.05, 1.1)


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": None}, 1.0),
        ({"do_sample": None, "temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
    ],
)
def test_greedy_only_where_the_file_says_so(fields, temperature, write):
    assert load_generation_config(write(fields)).defaults.temperature == temperature


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({"eos_token_id": [5, 7, 5]}, {}, (5, 7)),
        ({"eos_token_id": []}, {"eos_token_id": 6}, ()),
        ({"eos_token_id": None}, {"eos_token_id": 6}, (6,)),
        ({}, {"eos_token_id": [6, 8]}, (6, 8)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {}, ()),
    ],
)
def test_end_tokens_fall_back_on_the_models_config(generation, config, expected, write):
    assert load_generation_config(write(generation, config)).end_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": -0.5}, "top_p is -0.5"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"min_p": "a"}, "min_p is 'a'"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, -2]}, r"eos_token_id is \[1, -2\]"),
        ({"eos_token_id": True}, "eos_token_id is True"),
    ],
)
def test_bad_values_name_the_file_and_the_field(fields, message, write):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {message}"):
        load_generation_config(write(fields))


def test_a_bad_end_token_of_the_models_config_names_that_file(write):
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id is 'x'"):
        load_generation_config(write(None, {"eos_token_id": "x"}))


def test_broken_and_missing_files_are_named(write, tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_generation_config(tmp_path / "nowhere")
    write(None)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        load_generation_config(tmp_path)


def test_api_server_reads_it_without_torch():
    script = (
        "import sys, quire.models.generation_config, quire.hub.model_folder; "
        "sys.exit(' '.join({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_gguf_file_says_both(tmp_path):
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>"],
        "tokenizer.ggml.token_type": [1, 3, 3],
        "tokenizer.ggml.eos_token_id": 1,
        "general.sampling.temp": 0.7,
    }
    path = write_gguf(tmp_path / "m.gguf", metadata, {})
    found = load_generation_config(path)
    assert found.end_token_ids == (1, 2)
    assert found.defaults.temperature == 0.7
    write_gguf(path, metadata | {"general.sampling.temp": -1.0}, {})
    with pytest.raises(CheckpointError, match=rf"{path}: temperature is -1"):
        load_generation_config(path)
