"""The check of a model's keys at the start: it warns of outliers, and of nothing else."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.outlier_model import make_outlier_model

from quire.assembly.build import build_engine
from quire.assembly.format_checks.kv_format_check import MOST_DIVERGENCE, check_keys, measure_keys
from quire.attention.quantized_kv import FP8, INT8
from quire.errors import ConfigurationError
from quire.hub.model_folder import resolve_model_folder
from quire.models.checkpoints.loader import load_model
from quire.models.interface import TextModel
from quire.models.registry import load_config

MODEL_LEN = 40
"""Shorter than the prompt would be."""


def _model(folder: Path) -> TextModel:
    return load_model(
        folder,
        load_config(folder),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_model_len=MODEL_LEN,
    )


@pytest.fixture(scope="module")
def embedded() -> TextModel:
    return _model(resolve_model_folder(None, None))


@pytest.fixture(scope="module")
def outliers(tmp_path_factory) -> TextModel:
    return _model(make_outlier_model(tmp_path_factory.mktemp("model") / "x256", 256))


@pytest.mark.parametrize("form", [INT8, FP8])
def test_the_embedded_model_is_not_warned_of(embedded, form, caplog):
    with caplog.at_level(logging.INFO):
        check_keys(embedded, form, MODEL_LEN)
    (record,) = caplog.records
    assert record.levelname == "INFO" and f"kv_cache_dtype={form.name}" in record.getMessage()


def test_outlier_keys_are_warned_of(outliers, caplog):
    check_keys(outliers, INT8, MODEL_LEN)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "kv_cache_dtype=int8 is bad for this model" in record.getMessage()
    assert "use kv_cache_dtype=auto" in record.getMessage()


def test_a_floating_format_bears_the_same_outliers(outliers):
    assert not measure_keys(outliers, FP8, MODEL_LEN).is_bad


def test_outliers_make_int8_worse_by_far(embedded, outliers):
    before, after = (
        measure_keys(embedded, INT8, MODEL_LEN).mean,
        measure_keys(outliers, INT8, MODEL_LEN).mean,
    )
    assert before < MOST_DIVERGENCE / 10 < MOST_DIVERGENCE < after


def test_keys_that_are_no_numbers_are_bad():
    model = _model(resolve_model_folder(None, None))
    with torch.inference_mode():
        model.get_parameter("model.layers.2.self_attn.k_norm.weight")[5] = float("nan")
    found = measure_keys(model, INT8, MODEL_LEN)
    assert found.is_bad and found.layer >= 2


def test_keys_that_are_rotated_bear_more(outliers):
    rotated = measure_keys(outliers, INT8, MODEL_LEN).mean
    plain = replace(INT8, rotates_keys=False)
    assert rotated < measure_keys(outliers, plain, MODEL_LEN).mean / 4


@pytest.mark.parametrize(
    ("kernels", "factor", "num_warnings"),
    [("triton", 32, 0), ("triton", 256, 1), ("torch", 256, 1)],
)
def test_the_start_says_so(tmp_path, caplog, kernels, factor, num_warnings):
    model = make_outlier_model(tmp_path / "model", factor)
    options = {"kernels": kernels, "kv_cache_dtype": "int8", "max_model_len": 64, "num_blocks": 8}
    build_engine({"model": str(model), **options})
    warnings = [record for record in caplog.records if "is bad for this" in record.getMessage()]
    assert len(warnings) == num_warnings


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("int4", "reads auto or int8: .* 3% to 25% on keys with outliers"),
        ("fp8", "is 'fp8', but .* reads auto or int8; 'int8' takes as many"),
    ],
)
def test_unavailable_kv_formats_are_refused_by_name(name, match):
    with pytest.raises(ConfigurationError, match=match):
        build_engine({"kv_cache_dtype": name, "device": "cpu", "max_model_len": 64})
