"""The check of weight formats at the start: it warns of models that lose by one, and no other."""

import json
import logging
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.embedded_gguf import write_embedded_gguf
from tests.engine.checkpoints import COMMON, save_checkpoint
from tests.outlier_model import make_outlier_activations
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from quire.assembly.build import build_engine
from quire.assembly.device_setup import choose_device, choose_setup
from quire.assembly.format_checks import weight_format_check
from quire.assembly.format_checks.weight_format_check import (
    MOST_DIVERGENCE,
    CheckedSetup,
    WeightNoise,
    check_weights,
    measure_weights,
    rounding_of,
)
from quire.assembly.model_kind import ModelKind, choose_kind
from quire.attention.kv_rounding import divergence
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.linear_weights import LinearWeights
from quire.models.checkpoints.loader import load_model
from quire.models.interface import CausalLM
from quire.options.engine_options import EngineOptions

MODEL_LEN = 64
SMALL = {"max_model_len": MODEL_LEN, "num_blocks": 8, "max_num_seqs": 1}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take longer than a start waits."""
    monkeypatch.setattr(weight_format_check, "MOST_SECONDS", 600.0)


@lru_cache(maxsize=4)
def _load(**options: object) -> tuple[ModelKind, CausalLM]:
    """A model that tests share: the check leaves it as it was."""
    kind = choose_kind(
        EngineOptions.from_mapping({"device": "cpu", "skip_tokenizer_init": True, **options})
    )
    device = choose_device("cpu")
    setup = choose_setup(kind.options, kind.config, device, 1)
    model = load_model(
        kind.folder,
        kind.config,
        dtype=setup.dtype,
        device=device,
        max_model_len=MODEL_LEN,
        methods=setup.methods,
    )
    use_operators(model, setup.operators)
    assert isinstance(model, CausalLM)
    return kind, model


@pytest.fixture(scope="module", autouse=True)
def _shared_models() -> Iterator[None]:
    """Native weights must be gone before the interpreter ends."""
    yield
    _load.cache_clear()


def write_w8a8(source: Path, folder: Path) -> Path:
    """The model of `source` as compressed-tensors writes int8 weights with a scale an output, and
    activations with one a token."""
    shutil.copytree(source, folder)
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors = {}
    for name, weight in load_file(path).items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            scales = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
            tensors[name] = (
                (weight.float() / scales.float()).round().clamp(-127, 127).to(torch.int8)
            )
            tensors[f"{name}_scale"] = scales
    for file in (path, config):
        file.chmod(0o644)
    save_file(tensors, path, metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    fields = json.loads(config.read_text())
    fields["quantization_config"] = {**settings, "config_groups": {"group_0": group}}
    config.write_text(json.dumps(fields))
    return folder


def _measure(**options: object) -> WeightNoise:
    kind, model = _load(**options)
    weights = LinearWeights(kind.folder, kind.config, model)
    return measure_weights(model, weights, torch.bfloat16, MODEL_LEN)


@torch.inference_mode()
def _log_probabilities(model: CausalLM) -> torch.Tensor:
    places = torch.arange(weight_format_check.NUM_TOKENS)
    return weight_format_check._log_probabilities(model, places, lambda linear, x, y: y)


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One channel of 16 is 4,096 times itself: neither a rotation nor scales of groups help."""
    return make_outlier_activations(tmp_path_factory.mktemp("model") / "outliers", 4096, 16)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_noise_grows_as_bits_fall(kernels: str) -> None:
    exact, int8, int4 = (
        _measure(dtype="bfloat16", kernels=kernels, quantization=name)
        for name in (None, "int8", "int4")
    )
    assert exact.divergence < 0.001 < int8.divergence < int4.divergence < MOST_DIVERGENCE
    assert not int4.is_bad and len(int4.errors) == 4 * 4 + 1
    errors = list(int4.errors.values())
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.05
    assert max(exact.errors.values()) < 1e-4


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_outliers_are_bad_for_a_format_that_rounds(outliers: Path, name: str) -> None:
    found = _measure(model=str(outliers), quantization=name)
    assert found.is_bad and found.divergence > 4 * MOST_DIVERGENCE
    assert next(iter(found.errors)).endswith(("qkv_proj", "gate_up_proj"))


def test_unquantized_weights_diverge_little_despite_outliers(outliers: Path) -> None:
    assert _measure(model=str(outliers), dtype="bfloat16").divergence < 0.001


@pytest.mark.parametrize(("bears", "level"), [(True, "INFO"), (False, "WARNING")])
def test_scales_a_token_of_a_checkpoint_are_measured(
    outliers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, bears: bool, level: str
) -> None:
    model = write_w8a8(EMBEDDED_MODEL if bears else outliers, tmp_path / "w8a8")
    with caplog.at_level(logging.INFO, weight_format_check.__name__):
        build_engine({"model": str(model), **SMALL})
    (record,) = (each for each in caplog.records if each.name == weight_format_check.__name__)
    said = "rounding activations with one scale a token, as compressed-tensors says,"
    assert record.levelname == level and record.getMessage().startswith(said)
    assert ("use the original checkpoint" in record.getMessage().lower()) is not bears


def test_weights_of_a_gguf_file_are_read_again(tmp_path: Path) -> None:
    model = write_embedded_gguf(tmp_path / "model.gguf")
    found, expected = (
        _measure(model=name, quantization="int8") for name in (str(model), str(EMBEDDED_MODEL))
    )
    assert found.errors.keys() == expected.errors.keys()
    assert found.divergence == pytest.approx(expected.divergence, rel=0.2)


@pytest.mark.parametrize("name", ["granite", "llama", "mistral", "olmo2", "qwen2", "qwen3"])
def test_the_estimate_is_about_the_true_divergence(name: str, tmp_path: Path) -> None:
    options = {"model": str(save_checkpoint(name, tmp_path)), "dtype": "float32"}
    exact, rounded = (
        _log_probabilities(_load(**options, quantization=each)[1]) for each in (None, "int8")
    )
    true = divergence(exact, rounded).median().item()
    found = _measure(**options, quantization="int8")
    assert len(found.errors) == 3 * 4 + 1
    assert true / 3 < found.divergence < 6 * true


def test_two_experts_speak_for_a_layer(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = _measure(model=str(tmp_path), quantization="int8")
    experts = {path for path in found.errors if "experts" in path}
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{leaf}"
        for layer in range(3)
        for leaf in ("gate_up_proj", "down_proj")
    }
    assert all(0.0 < found.errors[path] < 0.02 for path in experts)


def test_the_model_is_left_as_it_was() -> None:
    kind, model = _load(quantization="int8")
    methods = [getattr(module, "method", None) for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = (
        measure_weights(model, LinearWeights(kind.folder, kind.config, model), torch.float32, 64)
        for _ in range(2)
    )
    assert first == second
    assert torch.equal(torch.rand(1), expected), "the noise is from a generator of its own"
    assert [getattr(module, "method", None) for module in model.modules()] == methods


def test_not_a_number_is_bad() -> None:
    assert WeightNoise(float("nan"), {}).is_bad


@pytest.mark.parametrize(
    ("quantization", "level", "message"),
    [
        ("int8", "WARNING", "quantization=int8 is bad for this model"),
        (None, None, ""),
    ],
)
def test_the_start_warns(
    outliers: Path,
    caplog: pytest.LogCaptureFixture,
    quantization: str | None,
    level: str | None,
    message: str,
) -> None:
    with caplog.at_level(logging.INFO, weight_format_check.__name__):
        build_engine({"model": str(outliers), "quantization": quantization, **SMALL})
    records = [each for each in caplog.records if each.name == weight_format_check.__name__]
    assert [record.levelname for record in records] == [level] * bool(level)
    for record in records:
        said = record.getMessage()
        assert message in said and "has cost 3% of perplexity" in said
        assert f"quire bench perplexity FILE --model {outliers}" in said


def test_the_start_says_what_a_format_costs_a_model_that_bears_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, weight_format_check.__name__):
        build_engine({"quantization": "int8", **SMALL})
    (record,) = (each for each in caplog.records if each.name == weight_format_check.__name__)
    assert record.levelname == "INFO"
    assert record.getMessage().startswith("quantization=int8 moves next-token distributions by")


def test_setups_that_are_not_measured_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    kind, model = _load(quantization="int8")
    rounding = rounding_of("int8", kind.config)
    assert rounding is not None
    with caplog.at_level(logging.INFO, weight_format_check.__name__):
        setup = CheckedSetup(kind.folder, kind.config, torch.float32, num_ranks=2)
        check_weights(model, setup, rounding, MODEL_LEN)
    assert "is not measured, as each rank has a share of it" in caplog.text


def test_a_check_that_fails_does_not_end_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, model = _load(quantization="int8")
    rounding = rounding_of("int8", kind.config)
    assert rounding is not None
    setup = CheckedSetup(tmp_path, kind.config, torch.float32, num_ranks=1)
    check_weights(model, setup, rounding, MODEL_LEN)
    (record,) = caplog.records
    assert "what quantization=int8 costs this model can't be measured" in record.getMessage()
