"""Weights that are rounded again for the inputs of a prompt: which, how, and the same each time."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.distributed.ranks import run_ranks
from tests.engine.checkpoints import COMMON
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from quire.assembly.format_checks import compensated_rounding
from quire.assembly.format_checks.calibration_prompt import FIRST_TOKEN, NUM_TOKENS
from quire.assembly.format_checks.compensated_rounding import compensate_rounding
from quire.assembly.format_checks.watched_products import TOKEN_STRIDE, watched_products
from quire.assembly.format_checks.weight_format_check import NUM_TOKENS as NUM_CHECKED
from quire.attention.kv_rounding import divergence
from quire.attention.whole_sequence import ExactAttention
from quire.distributed.group import ProcessGroup
from quire.formats.format_registry import load_weight_format
from quire.formats.packed import packed
from quire.formats.weight_format import LinearModule
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.kernels.compensation import compensate_int8, error_feedback
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.quantize import INT8_GROUP
from quire.layers.linear import Linear
from quire.layers.sharded import LinearMethods, Sharding
from quire.models.checkpoints.loader import load_again, load_model
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.interface import CausalLM, TextModel
from quire.models.registry import load_config

CPU = torch.device("cpu")
MODEL_LEN = 256
O_PROJ = "model.layers.2.self_attn.o_proj"
Reload = Callable[[Collection[Linear]], None]


@pytest.fixture(scope="module")
def kernels(native_library: NativeLibrary) -> NativeKernels:
    return NativeKernels(native_library, num_threads=1)


def load(
    folder: Path,
    quantization: str | None = None,
    kernels: NativeKernels | None = None,
    group: ProcessGroup | None = None,
) -> tuple[CausalLM, Reload]:
    """A model as `load_model` returns it, and the function that fills its linears again."""
    config, weight_format = load_config(folder), load_weight_format(quantization)
    dense = load_weight_format(None).method(kernels)
    methods = LinearMethods(weight_format.method(kernels), dense=dense)
    if group is not None:
        methods = replace(methods, sharding=Sharding(group, config.vocab_size))
    model = load_model(
        folder,
        config,
        dtype=torch.float32,
        device=CPU,
        max_model_len=MODEL_LEN,
        methods=methods,
    )
    assert isinstance(model, CausalLM)
    again = partial(load_again, model=model, folder=folder, config=config, methods=methods)
    return model, again


def linears(model: TextModel) -> dict[str, Linear]:
    return {path: each for path, each in model.named_modules() if isinstance(each, Linear)}


def stored(model: TextModel) -> dict[str, torch.Tensor]:
    """The bytes of all packed weights, by path."""
    return {path: packed(linear)._weights.clone() for path, linear in linears(model).items()}


@torch.inference_mode()
def log_probabilities(model: CausalLM, first_token: int = 0) -> torch.Tensor:
    places = torch.arange(NUM_TOKENS)
    token_ids = (places + first_token) * TOKEN_STRIDE % model.vocab_size
    hidden = model(token_ids, places, ExactAttention(model.attention_specs))
    return torch.log_softmax(model.logits(hidden), dim=-1)


def test_weights_are_rounded_for_inputs_of_the_prompt(kernels: NativeKernels) -> None:
    model, again = load(EMBEDDED_MODEL, "int8", kernels)
    linear = linears(model)[O_PROJ]
    inputs: dict[LinearModule, torch.Tensor] = {}

    def keep(linear: LinearModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inputs[linear] = x
        return y

    with watched_products(linears(model).values(), keep):
        log_probabilities(model, FIRST_TOKEN)
    plain = stored(model)
    compensate_rounding(model, MODEL_LEN, again)
    found = stored(model)
    assert len(found) == 17 and not any(torch.equal(found[path], plain[path]) for path in plain)
    # One of them is as computed from its inputs and the checkpoint's weight.
    with safe_open(EMBEDDED_MODEL / "model.safetensors", "pt") as file:
        weight = file.get_tensor(f"{O_PROJ}.weight")
    expected = PackedLinear(WeightLayout.INT8, *weight.shape, group_size=INT8_GROUP)
    expected.pack_int8(*compensate_int8(weight, error_feedback(inputs[linear])), 0)
    assert torch.equal(found[O_PROJ], expected._weights)
    assert torch.equal(packed(linear)._scales, expected._scales)


def test_distributions_of_other_tokens_come_closer(kernels: NativeKernels) -> None:
    exact = log_probabilities(load(EMBEDDED_MODEL)[0])
    model, again = load(EMBEDDED_MODEL, "int8", kernels)
    plain = divergence(exact, log_probabilities(model)).mean()
    compensate_rounding(model, MODEL_LEN, again)
    assert 0 < divergence(exact, log_probabilities(model)).mean() < 0.8 * plain


def test_the_check_of_formats_reads_other_tokens() -> None:
    prompts = [range(NUM_CHECKED), range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS)]
    for vocab_size in (4096, 32_000, 49_152, 151_936):
        checked, shown = ({k * TOKEN_STRIDE % vocab_size for k in ids} for ids in prompts)
        assert (len(checked), len(shown)) == (NUM_CHECKED, NUM_TOKENS)
        if vocab_size > 4096:
            assert not checked & shown


def test_each_start_gives_the_same_numbers_with_any_threads(
    kernels: NativeKernels, native_library: NativeLibrary
) -> None:
    found, digests = [], []
    for each in (kernels, NativeKernels(native_library, num_threads=2)):
        model, again = load(EMBEDDED_MODEL, "int8", each)
        digest = WeightsDigest()
        compensate_rounding(model, MODEL_LEN, again, digest)
        found.append(stored(model))
        digests.append(digest.digest())
    assert all(torch.equal(found[1][path], weights) for path, weights in found[0].items())
    assert digests[0] == digests[1] != WeightsDigest().digest()


def test_nothing_remains_of_the_inputs(kernels: NativeKernels) -> None:
    model, again = load(EMBEDDED_MODEL, "int8", kernels)
    methods = {linear: linear.method for linear in linears(model).values()}
    compensate_rounding(model, MODEL_LEN, again)
    for linear, method in methods.items():
        assert linear.method is method
        assert linear.state.feedback is None  # type: ignore[attr-defined]


def refuse(chosen: Collection[Linear]) -> None:
    raise AssertionError(f"{len(chosen)} linears are read again")


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_other_formats_are_left_alone(
    quantization: str | None, kernels: NativeKernels, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, compensated_rounding.__name__):
        for each in (kernels, None):
            compensate_rounding(load(EMBEDDED_MODEL, quantization, each)[0], MODEL_LEN, refuse)
    assert not caplog.records


def test_models_that_cannot_run_the_prompt_are_rounded_to_nearest(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, _ = load(EMBEDDED_MODEL, "int8")
    recurrent, _ = load(EMBEDDED_MODEL, "int8", kernels)
    monkeypatch.setattr(recurrent, "recurrent_specs", (object(),))
    with caplog.at_level(logging.INFO, compensated_rounding.__name__):
        for model in (slow, recurrent):
            compensate_rounding(model, MODEL_LEN, refuse)
    reasons = [record.getMessage().partition(", as ")[2] for record in caplog.records]
    assert reasons == [
        "no native kernels multiply on the CPU, which would take long",
        "the model has recurrent layers",
    ]


def test_experts_are_rounded_to_nearest(tmp_path: Path, kernels: NativeKernels) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    torch.manual_seed(1)
    config = Qwen3MoeConfig(**COMMON | sizes | experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, again = load(tmp_path, "int8", kernels)
    plain = stored(model)
    compensate_rounding(model, MODEL_LEN, again)
    changed = {path for path, each in stored(model).items() if not torch.equal(each, plain[path])}
    layers = [f"model.layers.{layer}.self_attn" for layer in range(3)]
    attention = {f"{layer}.{leaf}" for layer in layers for leaf in ("qkv_proj", "o_proj")}
    assert changed == attention | {"lm_head"}


def test_each_rank_compensates_its_share(kernels: NativeKernels) -> None:
    exact = log_probabilities(load(EMBEDDED_MODEL)[0])

    def compute(group: ProcessGroup) -> list[torch.Tensor]:
        own = NativeKernels(kernels.library, num_threads=1)
        model, again = load(EMBEDDED_MODEL, "int8", own, group)
        plain = log_probabilities(model)
        compensate_rounding(model, MODEL_LEN, again)
        return [plain, log_probabilities(model)]

    ranks = run_ranks(2, compute)
    assert all(map(torch.equal, *ranks))
    plain, compensated = (divergence(exact, each).mean() for each in ranks[0])
    assert 0 < compensated < 0.9 * plain
