"""Checks before an engine starts refuse bad options, and nothing that the engine accepts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_writer import write_gguf

from quire.engine_client import early_checks
from quire.engine_client.early_checks import check_before_start, check_device, check_memory
from quire.errors import CheckpointError, ConfigurationError, InsufficientMemoryError
from quire.hub.found_model import FoundModel
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.options.engine_options import EngineOptions


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"text_config": {"max_position_embeddings": 100}, "max_position_embeddings": 7}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4}}, 400),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {
                    "full_attention": {
                        "factor": 4.0,
                        "original_max_position_embeddings": 200,
                    }
                },
            },
            800,
        ),
    ],
)
def test_a_length_beyond_the_models_is_refused(
    config: dict[str, Any], most: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = FoundModel(tmp_path, has_weights=False)
    check_before_start(EngineOptions(max_model_len=most), model)
    with pytest.raises(ConfigurationError, match=f"max_model_len is {most + 1}, but the model"):
        check_before_start(EngineOptions(max_model_len=most + 1), model)
    check_before_start(EngineOptions(max_model_len=most + 1, hf_overrides={"a": 1}), model)


def test_what_the_config_does_not_say_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_positions": 5}')
    check_before_start(EngineOptions(max_model_len=6), FoundModel(tmp_path, has_weights=False))


def test_a_length_beyond_that_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    fields = {"general.architecture": "llama", "llama.context_length": 100}
    path = tmp_path / "model.gguf"
    write_gguf(path, fields, {})
    model = FoundModel(path, has_weights=False)
    check_before_start(EngineOptions(max_model_len=100), model)
    with pytest.raises(
        ConfigurationError, match=r"at most 100 positions \(llama.context_length in"
    ):
        check_before_start(EngineOptions(max_model_len=101), model)
    write_gguf(path, fields | {"llama.rope.scaling.factor": 4.0}, {})
    check_before_start(EngineOptions(max_model_len=400), model)


def test_a_kv_cache_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_checks, "total_memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr(early_checks, "lacks_gpu", lambda: True)
    check_memory(EngineOptions(kv_cache_memory="8GiB"))
    for device in ("auto", "cpu"):
        with pytest.raises(
            InsufficientMemoryError, match=r"is 900\.0 GiB, but the machine has 8\.0"
        ):
            check_memory(EngineOptions(kv_cache_memory="900GiB", device=device))
    monkeypatch.setattr(early_checks, "lacks_gpu", lambda: False)
    check_memory(EngineOptions(kv_cache_memory="900GiB"))


def test_files_are_checked_where_they_are(tmp_path: Path) -> None:
    check_before_start(EngineOptions(), FoundModel(EMBEDDED_MODEL))
    with pytest.raises(CheckpointError, match="has no weights"):
        check_before_start(EngineOptions(), FoundModel(tmp_path))
    check_before_start(EngineOptions(), FoundModel(tmp_path, has_weights=False))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_checks, "lacks_gpu", lambda: True)
    check_device("cpu")
    check_device("auto")
    with pytest.raises(ConfigurationError, match=r"device is 'cuda:1', but torch .* sees no GPU"):
        check_device("cuda:1")
    monkeypatch.setattr(early_checks, "lacks_gpu", lambda: False)
    check_device("cuda")
