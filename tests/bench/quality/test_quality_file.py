"""What formats cost a model is found again by its files, and only if it was measured on enough."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.quality import quality_file
from quire.bench.quality.quality_file import LEAST_TOKENS, find_quality, store_quality
from quire.hub.model_folder import EMBEDDED_MODEL

RESULT: dict[str, Any] = {
    "model_id": "m",
    "quantization": "int8",
    "kv_cache_dtype": "auto",
    "dtype": "bfloat16",
    "change": 0.01,
    "loss_change_error": 0.002,
    "divergence": 0.003,
    "agreement": 0.97,
    "num_tokens": LEAST_TOKENS,
}
ORIGIN = {"reference": "m", "texts": "t.txt", "date": "2026-01-02", "version": "9"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_it_is_found_by_the_models_files(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "quality.json"
    store_quality(path, model, RESULT, ORIGIN)
    store_quality(path, model, {**RESULT, "quantization": None, "kv_cache_dtype": "fp8"}, ORIGIN)
    store_quality(path, model, {**RESULT, "change": 0.02}, ORIGIN)
    fp8, int8 = find_quality(path, model)
    assert (fp8.quantization, fp8.kv_cache_dtype, fp8.change) == (None, "fp8", 0.01)
    assert (int8.quantization, int8.change, int8.texts) == ("int8", 0.02, "t.txt")
    model.write_bytes(b"others!")
    assert find_quality(path, model) == []


def test_too_few_tokens_are_not_kept(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "quality.json"
    store_quality(path, model, {**RESULT, "num_tokens": LEAST_TOKENS - 1}, ORIGIN)
    assert not path.exists() and find_quality(path, model) == []


def test_rows_of_an_earlier_arithmetic_are_not_found(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "quality.json"
    store_quality(path, model, RESULT, ORIGIN)
    store_quality(path, model, {**RESULT, "quantization": "int4"}, ORIGIN)
    monkeypatch.setitem(quality_file._ARITHMETIC, "int8", 99)
    assert [each.quantization for each in find_quality(path, model)] == ["int4"]
    store_quality(path, model, {**RESULT, "change": 0.02}, ORIGIN)
    assert {each.quantization: each.change for each in find_quality(path, model)} == {
        "int4": 0.01,
        "int8": 0.02,
    }


def test_entries_without_an_arithmetic_are_not_found(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "quality.json"
    store_quality(path, model, RESULT, ORIGIN)
    data = json.loads(path.read_text())
    for entry in data["quality"].values():
        del entry["facts"]["arithmetic"]
    path.write_text(json.dumps(data))
    assert find_quality(path, model) == []


def test_a_damaged_entry_is_left_out(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quality.json"
    store_quality(path, model, RESULT, ORIGIN)
    path.write_text(path.read_text().replace('"divergence"', '"distance"'))
    assert find_quality(path, model) == []
    assert "is damaged" in caplog.text


def test_quire_knows_its_own_model_and_own_measurements_come_first(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    known = find_quality(path, EMBEDDED_MODEL)
    found = {(each.quantization, each.kv_cache_dtype): each for each in known}
    assert {("int8", "auto"), ("int4", "auto"), (None, "int8")} <= found.keys()
    assert all(-0.01 < each.change < 0.03 and each.num_tokens > 10_000 for each in known)
    store_quality(path, EMBEDDED_MODEL, {**RESULT, "change": 0.5}, ORIGIN)
    own = find_quality(path, EMBEDDED_MODEL)
    assert len(own) == len(known) and 0.5 in {each.change for each in own}
    assert len(json.loads(path.read_text())["quality"]) == 1
