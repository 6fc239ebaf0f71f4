"""Models split over ranks compute what they compute whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.models.conftest import DenseAttention
from transformers import (
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from quire.distributed.group import ProcessGroup
from quire.errors import ConfigurationError
from quire.formats.dense import DenseMethod
from quire.formats.format_registry import load_weight_format
from quire.kernels.cpu.library import NativeKernels, load_library
from quire.layers.linear import Linear
from quire.layers.sharded import LinearMethods, Sharding
from quire.models.checkpoints.loader import load_model
from quire.models.registry import load_config
from quire.models.sharding import check_split, split_config

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 1013, 37)
BIASES = {"attention_bias": True, "mlp_bias": True}
ONE_KV_HEAD = {"num_key_value_heads": 1}
EXPERTS = {"num_experts_per_tok": 3, "head_dim": 16, "num_local_experts": 7}


@torch.inference_mode()
def compute(
    folder: Path,
    group: ProcessGroup | None = None,
    *,
    is_native: bool = False,
    quantization: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the hidden states of all tokens, their logits)."""
    config = load_config(folder)
    # Threads of a pool work for one rank only.
    kernels = NativeKernels(load_library(), num_threads=1) if is_native else None
    methods = LinearMethods(load_weight_format(quantization).method(kernels))
    if group is not None:
        methods = replace(methods, sharding=Sharding(group, config.vocab_size))
    model = load_model(
        folder, config, dtype=torch.float32, device=CPU, max_model_len=64, methods=methods
    )
    assert model.vocab_size == config.vocab_size
    attention = DenseAttention(model.attention_specs)
    hidden = model(TOKENS, torch.arange(len(TOKENS)), attention)
    return hidden, model.logits(hidden)


@pytest.fixture(params=[False, True], ids=["torch", "native"])
def is_native(request: pytest.FixtureRequest) -> bool:
    """Who computes the linears."""
    if request.param:
        request.getfixturevalue("kernels")  # skips where there are none
    return bool(request.param)


@pytest.mark.parametrize(
    ("kind", "fields", "sizes"),
    [
        (LlamaConfig, {}, (2,)),
        (LlamaConfig, BIASES | ONE_KV_HEAD, (2, 4)),
        (MistralConfig, {"sliding_window": 8, "head_dim": 24}, (4,)),
        (Qwen2Config, {"tie_word_embeddings": True}, (2,)),
        (Qwen3Config, {"tie_word_embeddings": True, "num_key_value_heads": 4}, (2, 4)),
        (Qwen3Config, {}, (4,)),
        (Qwen3MoeConfig, EXPERTS | {"moe_intermediate_size": 24, "mlp_only_layers": [1]}, (2, 4)),
        (GptOssConfig, EXPERTS | {"sliding_window": 8}, (2, 4)),
        (
            Glm4MoeConfig,
            {"num_experts_per_tok": 3, "head_dim": 16, "n_routed_experts": 8}
            | {"moe_intermediate_size": 24, "n_group": 2},
            (2,),
        ),
    ],
)
def test_equal_to_the_whole(
    kind: type[PreTrainedConfig],
    fields: dict[str, Any],
    sizes: tuple[int, ...],
    is_native: bool,
    save_checkpoint: Callable[..., Any],
) -> None:
    folder, _ = save_checkpoint(kind, **fields)
    _, expected = compute(folder, is_native=is_native)
    for size in sizes:
        found = run_ranks(size, lambda group: compute(folder, group, is_native=is_native))
        for hidden, logits in found:  # all ranks have the same bits to sample from
            assert torch.equal(hidden, found[0][0]) and torch.equal(logits, found[0][1])
        torch.testing.assert_close(found[0][1], expected, rtol=0, atol=2e-5)
        assert torch.equal(found[0][1].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("quantization", "largest"), [("int8", 0.05), ("int4", 0.3)])
def test_each_rank_quantizes_its_share(
    quantization: str,
    largest: float,
    is_native: bool,
    save_checkpoint: Callable[..., Any],
) -> None:
    """A row linear's scales are of other groups of inputs then, so the results are only near."""
    folder, _ = save_checkpoint(LlamaConfig, tie_word_embeddings=True, **BIASES)
    _, expected = compute(folder, is_native=is_native, quantization=quantization)
    found = run_ranks(
        2, lambda group: compute(folder, group, is_native=is_native, quantization=quantization)
    )
    assert torch.equal(found[0][1], found[1][1])
    error = (found[0][1] - expected).norm() / expected.norm()
    assert 0 < error < largest


def test_a_rank_builds_a_smaller_model(save_checkpoint: Callable[..., Any]) -> None:
    folder, _ = save_checkpoint(LlamaConfig)
    config = load_config(folder)
    shares = [split_config(config, rank, 2) for rank in range(2)]
    for share in shares:
        assert (share.num_heads, share.num_kv_heads, share.intermediate_size) == (2, 1, 48)
        assert (share.hidden_size, share.head_dim) == (config.hidden_size, config.head_dim)
    assert [share.vocab_size for share in shares] == [507, 506]
    assert split_config(config, 0, 1) == config


def test_ranks_hold_each_weight_once_but_for_the_norms(
    save_checkpoint: Callable[..., Any],
) -> None:
    folder, whole = save_checkpoint(LlamaConfig)
    config = load_config(folder)

    def count(group: ProcessGroup) -> int:
        methods = LinearMethods(DenseMethod(), Sharding(group, config.vocab_size))
        model = load_model(
            folder, config, dtype=torch.float32, device=CPU, max_model_len=8, methods=methods
        )
        return sum(parameter.numel() for parameter in model.parameters())

    num_whole = sum(parameter.numel() for parameter in whole.parameters())
    num_norms = (2 * config.num_layers + 1) * config.hidden_size
    assert sum(run_ranks(2, count)) == num_whole + num_norms


def test_an_experts_size_must_be_shared_out(save_checkpoint: Callable[..., Any]) -> None:
    fields = EXPERTS | {"moe_intermediate_size": 25}
    folder, _ = save_checkpoint(Qwen3MoeConfig, **fields)
    with pytest.raises(ConfigurationError, match="the intermediate size of an expert, 25, is no"):
        check_split(load_config(folder), 2)


def test_routers_stay_dense_in_every_format(
    is_native: bool, save_checkpoint: Callable[..., Any]
) -> None:
    folder, _ = save_checkpoint(Qwen3MoeConfig, **EXPERTS, moe_intermediate_size=24)
    config = load_config(folder)
    kernels = NativeKernels(load_library(), num_threads=1) if is_native else None
    rounded, exact = (load_weight_format(name).method(kernels) for name in ("int8", None))

    def split(group: ProcessGroup) -> set[str]:
        methods = LinearMethods(rounded, Sharding(group, config.vocab_size), exact)
        options = {"dtype": torch.float32, "device": CPU, "max_model_len": 8}
        model = load_model(folder, config, methods=methods, **options)
        linears = [each for each in model.named_modules() if isinstance(each[1], Linear)]
        return {name.rpartition(".")[2] for name, each in linears if each.method is exact}

    assert run_ranks(2, split) == [{"gate"}] * 2


@pytest.mark.parametrize(
    ("fields", "num_ranks", "reason"),
    [
        ({}, 3, "tensor_parallel_size is 3, but the model's 4 attention heads can't be divided"),
        ({}, 8, "this model can be split over 1, 2, 4"),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            "it neither divides nor is a multiple of the model's 3 KV heads; this model can be"
            " split over 1, 3, 6, 12",
        ),
        ({"intermediate_size": 99}, 2, "intermediate_size, 99, is no multiple of it"),
        ({"vocab_size": 5}, 4, "the last rank would get none of the model's 5 tokens"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    fields: dict[str, Any],
    num_ranks: int,
    reason: str,
    save_checkpoint: Callable[..., Any],
) -> None:
    config = load_config(save_checkpoint(LlamaConfig, **fields)[0])
    check_split(config, 1)
    with pytest.raises(ConfigurationError, match=reason):
        check_split(config, num_ranks)
