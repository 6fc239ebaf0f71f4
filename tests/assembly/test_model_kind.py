"""What a model is served as, and what is refused before its weights are fetched."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.hub.conftest import SHARDS, model_files
from tests.hub.conftest import start_hub as start_hub
from tests.hub.hub_server import FakeHub

from quire.assembly.model_kind import choose_kind, log_unexpected_properties
from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.options.engine_options import EngineOptions

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


TEXT = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_a_multimodal_model_is_served_for_text_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["LlavaForConditionalGeneration"]
    config = {"architectures": names, "text_config": TEXT, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = choose_kind(EngineOptions(model=str(tmp_path)))
    with caplog.at_level(logging.WARNING, logger="quire.assembly.model_kind"):
        log_unexpected_properties(kind)
    assert kind.generates
    assert kind.config.architecture == "LlamaForCausalLM"
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "LlavaForConditionalGeneration is served for text, by its language model (LlamaForCausalLM)"
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"language_model_only": True}, "language_model_only"),
        ({"tensor_parallel_size": 2}, None),
        ({"model_impl": "transformers"}, "class of transformers"),
        ({"kernels": "triton"}, None),
        ({"runner": "pooling"}, ""),
    ],
)
def test_images_are_taken_or_it_is_said_why_not(
    options: dict[str, Any],
    reason: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ["SmolVLMForConditionalGeneration"]
    config = {"architectures": names, "text_config": TEXT, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = choose_kind(EngineOptions(model=str(tmp_path), device="cpu", **options))
    with caplog.at_level(logging.WARNING, logger="quire.assembly.model_kind"):
        log_unexpected_properties(kind)
    said = [record.getMessage() for record in caplog.records]
    assert (kind.tower is not None) == (reason is None)
    assert any("is served for text" in each and (reason or "") in each for each in said) == (
        reason is not None
    )


def test_an_unknown_field_of_a_tower_is_refused(tmp_path: Path) -> None:
    names = ["SmolVLMForConditionalGeneration"]
    config = {"architectures": names, "text_config": TEXT, "vision_config": {"hidden_act": "relu"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="set language_model_only"):
        choose_kind(EngineOptions(model=str(tmp_path)))
    kind = choose_kind(EngineOptions(model=str(tmp_path), language_model_only=True))
    assert kind.tower is None


def _hub(start: Callable[[FakeHub], FakeHub], **changes: Any) -> FakeHub:
    return start(FakeHub(model_files() | {"config.json": json.dumps(LLAMA | changes).encode()}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM"),
        ({"clip_qkv": 1}, "clip_qkv"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
)
def test_unsupported_models_are_refused_before_their_weights_are_fetched(
    changes: dict[str, Any], expected: str, start_hub: Callable[[FakeHub], FakeHub]
) -> None:
    hub = _hub(start_hub, **changes)
    with pytest.raises(UnsupportedModelError, match=expected):
        choose_kind(EngineOptions(model="org/model"))
    assert "config.json" in hub.fetched() and not {*hub.fetched()} & {*SHARDS}


def test_models_that_need_transformers_are_refused_under_model_impl_native(
    start_hub: Callable[[FakeHub], FakeHub],
) -> None:
    hub = _hub(start_hub, architectures=["HeliumForCausalLM"], model_type="helium")
    with pytest.raises(UnsupportedModelError, match="model_impl is 'native'"):
        choose_kind(EngineOptions(model="org/model", model_impl="native"))
    assert not {*hub.fetched()} & {*SHARDS}


@pytest.mark.parametrize("elsewhere", [{"tokenizer": "a/folder"}, {"skip_tokenizer_init": True}])
def test_a_missing_tokenizer_matters_where_it_is_read(
    elsewhere: dict[str, Any], start_hub: Callable[[FakeHub], FakeHub]
) -> None:
    hub = _hub(start_hub)
    del hub.files["tokenizer.json"]
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        choose_kind(EngineOptions(model="org/model"))
    assert not {*hub.fetched()} & {*SHARDS}
    kind = choose_kind(EngineOptions(model="org/model", **elsewhere))
    assert kind.config.architecture == "LlamaForCausalLM"
    assert {*hub.fetched()} >= {*SHARDS}


def test_progress_of_a_download_is_reported(start_hub: Callable[[FakeHub], FakeHub]) -> None:
    _hub(start_hub)
    told = []
    choose_kind(EngineOptions(model="org/model"), lambda *report: told.append(report))
    assert told[-1] == ("downloading org/model", 500_000, 500_000)


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"has no config\.json"):
        choose_kind(EngineOptions(model=str(tmp_path)))


def test_fields_that_no_model_reads_are_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noted = LLAMA | {"my_note": "a", "training_dtype": "b"}
    (tmp_path / "config.json").write_text(json.dumps(noted))
    kind = choose_kind(EngineOptions(model=str(tmp_path)))
    with caplog.at_level(logging.WARNING, logger="quire.assembly.model_kind"):
        log_unexpected_properties(kind)
    (record,) = caplog.records
    assert "the fields my_note, training_dtype are left out" in record.getMessage()
