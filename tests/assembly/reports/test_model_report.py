"""What is said of a folder or a hub id before it is served."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.hub.conftest import SHARDS, model_files
from tests.hub.conftest import start_hub as start_hub
from tests.hub.hub_server import FakeHub

from quire.assembly.reports.model_report import kv_kinds, report_on
from quire.errors import UnsupportedModelError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.registry import load_config
from quire.offline.llm import LLM

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def test_report_on_the_embedded_model() -> None:
    found = report_on(str(EMBEDDED_MODEL), None, 100)
    config = load_config(EMBEDDED_MODEL)
    assert (found.architecture, found.generates) == (config.architecture, True)
    assert (found.problem, found.tokenizer_problem, found.has_weights) == (None, None, True)
    assert found.num_weights == found.num_active_weights - config.hidden_size  # a tied row, twice
    assert found.kv_kinds == (("full", config.num_layers),)
    sizes = {each.name: each for each in found.precisions}
    assert [*sizes] == ["bfloat16", "float32", "int8", "int4"]
    weights = [sizes[name].weight_bytes for name in ("float32", "bfloat16", "int8")]
    assert weights == sorted(weights, reverse=True)
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    for name, item_bytes in (("bfloat16", 2), ("float32", 4)):
        assert sizes[name].kv_bytes == 112 * token * item_bytes  # 7 blocks of 16


def test_the_slots_of_adapters_take_what_the_engine_says() -> None:
    found = report_on(str(EMBEDDED_MODEL), None, 100)
    llm = LLM(enable_lora=True, num_blocks=16, max_model_len=64)
    assert found.adapter_bytes == llm.engine.facts["adapter_bytes"] > 0


def test_a_sequence_is_no_longer_than_the_model_takes() -> None:
    found = report_on(str(EMBEDDED_MODEL), None, 10**9)
    assert found.num_tokens == found.max_positions


def test_a_report_on_a_hub_model_fetches_no_weights(
    start_hub: Callable[[FakeHub], FakeHub],
) -> None:
    hub = start_hub(FakeHub(model_files() | {"config.json": json.dumps(LLAMA).encode()}))
    found = report_on("org/model", "main", 64)
    assert not found.has_weights and not {*hub.fetched()} & {*SHARDS}
    assert found.problem is None
    assert found.tokenizer_problem is not None  # `{"version": "1.0"}` is none


def test_quantized_weights_of_a_hub_model_are_not_sized_before_they_are_fetched(
    start_hub: Callable[[FakeHub], FakeHub],
) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    config = json.dumps(LLAMA | {"quantization_config": awq}).encode()
    start_hub(FakeHub(model_files() | {"config.json": config}))
    found = report_on("org/model", "main", 64)
    assert [each.name for each in found.precisions] == ["as stored", "int8", "int4"]
    assert "until their files are fetched" in str(found.precisions[0].obstacle)
    assert "quantized by AWQ already" in str(found.precisions[1].obstacle)


def test_weights_of_another_model_are_a_problem(tmp_path: Path) -> None:
    for file in EMBEDDED_MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert "the weights lack" in str(report_on(str(tmp_path), None, 10).problem)


def test_an_architecture_that_is_not_served_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["Nobodys"]}))
    with pytest.raises(UnsupportedModelError, match="Nobodys"):
        report_on(str(tmp_path), None, 10)


def test_kinds_of_layers_are_counted() -> None:
    config = load_config(EMBEDDED_MODEL)
    windows = (8, *config.windows[1:])  # type: ignore[attr-defined]
    mixed = replace(config, windows=windows)  # type: ignore[call-arg]
    assert kv_kinds(mixed) == (("window of 8", 1), ("full", config.num_layers - 1))
