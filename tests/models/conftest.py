"""Small random checkpoints made by transformers, and the comparison of our models with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.family_shapes import SMALL
from tests.models.plain_states import PlainStates
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from quire.attention.interface import AttentionSpec, rotated
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.models.checkpoints.loader import load_model
from quire.models.interface import CausalLM
from quire.models.registry import load_config

CPU = torch.device("cpu")


class DenseAttention:
    """Attention over everything seen so far, by the definition. Tokens come in order, from 0."""

    def __init__(self, specs: tuple[AttentionSpec, ...]) -> None:
        self.specs = specs
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def __call__(self, layer, inputs):
        spec, v, sinks = self.specs[layer], inputs.v, inputs.sinks
        assert (sinks is not None) == spec.has_sinks
        q, k = rotated(inputs)
        assert q.shape[1:] == (spec.num_heads, spec.head_dim)
        if k is not None:  # else an earlier call has stored them
            assert k.shape[1:] == (spec.num_kv_heads, spec.head_dim)
            if spec.value_dim is not None:
                v = k
            else:
                assert v.shape[1:] == (spec.num_kv_heads, spec.output_dim)
            self.keys[layer] = torch.cat((self.keys.get(layer, k[:0]), k))
            self.values[layer] = torch.cat((self.values.get(layer, v[:0]), v))
        keys, values = self.keys[layer], self.values[layer]
        repeats = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(repeats, 1)) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        key_at = torch.arange(len(keys))
        query_at = key_at[len(keys) - len(q) :, None]
        seen = key_at <= query_at
        if spec.window is not None:
            seen &= key_at > query_at - spec.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        attended = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(repeats, 1))
        return attended[..., : spec.output_dim]


@pytest.fixture
def dense_attention() -> Callable[[CausalLM], DenseAttention]:
    return lambda model: DenseAttention(model.attention_specs)


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, PreTrainedModel]]:
    """save(config class, **fields) -> (folder, the transformers model in it). base: fields of all
    families, for one that has other names for them."""

    def save(
        config_class: type[PreTrainedConfig],
        *,
        max_shard_size: str = "1GB",
        base: dict[str, Any] = SMALL,
        **fields: Any,
    ) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(0)
        config = config_class(**(base | fields))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Weights, biases and norms all differ from what an initialiser would give them.
                parameter.normal_(0, 0.15)
                if ("norm" in name or "ln_" in name) and name.endswith("weight"):
                    parameter += 1
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
        folder = tmp_path / "model"
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder, model

    return save


@pytest.fixture
def load() -> Callable[..., CausalLM]:
    def load(folder: Path, dtype: torch.dtype = torch.float32, max_model_len: int = 48) -> CausalLM:
        return load_model(
            folder, load_config(folder), dtype=dtype, device=CPU, max_model_len=max_model_len
        )

    return load


@pytest.fixture(scope="session")
def kernels(native_library: NativeLibrary) -> NativeKernels:
    """The best of this processor, with two threads."""
    return NativeKernels(native_library, num_threads=2)


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """edit(folder, remove=(names), **fields) changes its config.json."""

    def edit(folder: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: config[name] for name in config.keys() - set(remove)}))

    return edit


@pytest.fixture
def run() -> Callable[..., torch.Tensor]:
    """run(model, token ids, chunk lengths) -> logits at every position."""

    def run(model: CausalLM, token_ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
        assert sum(chunks) == len(token_ids)
        attention, states = DenseAttention(model.attention_specs), PlainStates(model)
        positions = torch.arange(len(token_ids)).split(chunks)
        logits = []
        with torch.inference_mode():
            for ids, at in zip(token_ids.split(chunks), positions, strict=True):
                states.plan(len(ids))
                logits.append(model.logits(model(ids, at, attention)))
        return torch.cat(logits)

    return run


@pytest.fixture
def assert_same_logits(load, run) -> Callable[..., CausalLM]:
    """Our model of `folder` has the reference's logits: whole, in chunks, and one by one.

    rounding: how far two right results may be apart where the logits' deviation is 1.
    """

    def check(
        folder: Path,
        reference: PreTrainedModel,
        *,
        num_tokens: int = 48,
        rounding: float = 1e-4,
    ) -> CausalLM:
        model = load(folder, max_model_len=num_tokens)
        generator = torch.Generator().manual_seed(1)
        token_ids = torch.randint(0, model.vocab_size, (num_tokens,), generator=generator)
        with torch.inference_mode():
            expected = reference(token_ids[None]).logits[0]
        assert expected.std() > 0.5  # large enough for the tolerance to mean something
        assert expected.argmax(-1).unique().numel() > 8
        # Rounding errors grow with the logits, which a checkpoint's multipliers may scale.
        atol = rounding * max(1.0, expected.std().item())
        for chunks in ([num_tokens], [17, 1, 5, num_tokens - 23], [1] * num_tokens):
            logits = run(model, token_ids, chunks)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, expected, atol=atol, rtol=1e-5)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        return model

    return check
