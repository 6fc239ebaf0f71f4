"""A small model with layers of every kind of memory.

Its weights are random. It has no positions of its own: the order of tokens is in windows, states
and convolutions. Registered in this process as docs/extending.md describes.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from tests.registering import restored
from torch import nn

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.state_calls import GatedDeltaInputs
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, LinearKind
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import RecurrentModule
from quire.layers.residual import ResidualStream
from quire.models.architectures import MODELS
from quire.models.checkpoints.loader import checkpoint_slots
from quire.models.config import ModelConfig
from quire.models.config_fields import ConfigFields
from quire.models.interface import CausalLM
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry
from quire.recurrence.state_specs import GatedDeltaSpec, ShortConvSpec

ARCHITECTURE = "TinyHybridForCausalLM"
HAS_LATENT = "value_dim" in {field.name for field in fields(AttentionSpec)}
LAYERS = ("delta", "window", "full", "conv", "delta", "window", "full")
if HAS_LATENT:
    LAYERS += ("latent",)


WINDOW = 24
ATTENTION = {
    "full": AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=32, scale=0.2),
    "window": AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        scale=0.35,
        window=WINDOW,
        soft_cap=8.0,
        has_sinks=True,
    ),
}
if HAS_LATENT:
    ATTENTION["latent"] = AttentionSpec(
        num_heads=4, num_kv_heads=1, head_dim=32, scale=0.2, value_dim=24
    )
RECURRENT = {
    "delta": GatedDeltaSpec(2, 2, key_dim=16, value_dim=32),
    "conv": ShortConvSpec(32, width=4, has_silu=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(ModelConfig):
    layer_types: tuple[str, ...]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        found = ConfigFields(raw)
        layer_types = tuple(found.value("layer_types"))
        config = cls(
            architecture="",
            vocab_size=found.integer("vocab_size"),
            hidden_size=found.integer("hidden_size"),
            intermediate_size=found.integer("intermediate_size"),
            num_layers=len(layer_types),
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            max_position_embeddings=found.integer("max_position_embeddings"),
            dtype=None,
            layer_types=layer_types,
        )
        found.finish()
        return config

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(ATTENTION[kind] for kind in self.layer_types if kind in ATTENTION)

    @property
    def recurrent_specs(self) -> tuple[GatedDeltaSpec | ShortConvSpec, ...]:
        return tuple(RECURRENT[kind] for kind in self.layer_types if kind in RECURRENT)


Where = Mapping[str, Any]
"""dtype and device."""


def linear(num_inputs: int, num_outputs: int, where: Where) -> Linear:
    return Linear(num_inputs, (num_outputs,), LinearKind.REPLICATED, bias=False, **where)


class HybridAttention(nn.Module):
    def __init__(self, layer: int, hidden: int, spec: AttentionSpec, where: Where) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        self.value_dim = getattr(spec, "value_dim", None)
        self.q_proj = linear(hidden, spec.num_heads * spec.head_dim, where)
        self.k_proj = linear(hidden, spec.num_kv_heads * spec.head_dim, where)
        if self.value_dim is None:
            self.v_proj = linear(hidden, spec.num_kv_heads * spec.head_dim, where)
        if spec.has_sinks:
            self.sinks = nn.Parameter(torch.zeros(spec.num_heads, **where), requires_grad=False)
        size = spec.num_heads * (self.value_dim or spec.head_dim)
        self.o_proj = linear(size, hidden, where)

    def forward(self, x: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        names = ("q_proj", "k_proj", "k_proj" if self.value_dim else "v_proj")
        q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, self.spec.head_dim)) for name in names)
        sinks = self.sinks if self.spec.has_sinks else None
        return self.o_proj(attention(self.layer, AttentionInputs(q, k, v, sinks)).flatten(-2))


class HybridDelta(RecurrentModule):
    def __init__(self, layer: int, hidden: int, spec: GatedDeltaSpec, where: Where) -> None:
        super().__init__(layer)
        self.spec = spec
        self.qk_proj = linear(hidden, 2 * spec.num_k_heads * spec.key_dim, where)
        self.v_proj = linear(hidden, spec.num_v_heads * spec.value_dim, where)
        self.gate_proj = linear(hidden, 2 * spec.num_v_heads, where)
        self.o_proj = linear(spec.num_v_heads * spec.value_dim, hidden, where)

    def forward(self, x: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        qk = self.qk_proj(x).unflatten(-1, (2, self.spec.num_k_heads, self.spec.key_dim))
        v = self.v_proj(x).unflatten(-1, (self.spec.num_v_heads, self.spec.value_dim))
        decay, beta = self.gate_proj(x).unflatten(-1, (2, self.spec.num_v_heads)).unbind(-2)
        gates = torch.nn.functional.logsigmoid(decay), beta.sigmoid()
        inputs = GatedDeltaInputs(*qk.unbind(-3), v, *gates)
        return self.o_proj(self.states.gated_delta(self.layer, inputs).flatten(-2))


class HybridConv(RecurrentModule):
    def __init__(self, layer: int, hidden: int, spec: ShortConvSpec, where: Where) -> None:
        super().__init__(layer)
        self.in_proj = linear(hidden, spec.num_channels, where)
        shape = (spec.num_channels, spec.width)
        self.taps = nn.Parameter(torch.zeros(shape, **where), requires_grad=False)
        self.o_proj = linear(spec.num_channels, hidden, where)

    def forward(self, x: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        return self.o_proj(self.states.short_conv(self.layer, self.in_proj(x), self.taps, None))


class HybridForCausalLM(CausalLM):
    def __init__(
        self, config: HybridConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.attention_specs = config.attention_specs
        self.recurrent_specs = config.recurrent_specs
        where = {"dtype": dtype, "device": device}
        size = config.hidden_size
        mixers: list[nn.Module] = []
        counts = {True: 0, False: 0}
        for kind in config.layer_types:
            is_attention = kind in ATTENTION
            index, counts[is_attention] = counts[is_attention], counts[is_attention] + 1
            if is_attention:
                mixers.append(HybridAttention(index, size, ATTENTION[kind], where))
            else:
                made = HybridDelta if kind == "delta" else HybridConv
                mixers.append(made(index, size, RECURRENT[kind], where))
        self.embed_tokens = VocabEmbedding(self.vocab_size, size, **where)
        self.mixers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList(RMSNorm(size, 1e-6, **where) for _ in range(2 * len(mixers)))
        self.mlps = nn.ModuleList(
            MLP(size, config.intermediate_size, bias=False, **where) for _ in mixers
        )
        self.norm = RMSNorm(size, 1e-6, **where)
        self.lm_head = LMHead(self.embed_tokens, tied=False)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(token_ids)

    def forward(self, token_ids, positions, attention, *, input_embeds=None):
        stream = ResidualStream(self.embed(token_ids), self.operators)
        for index, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            stream.add(mixer(stream.normed(self.norms[2 * index]), attention))
            stream.add(mlp(stream.normed(self.norms[2 * index + 1])))
        return stream.normed(self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)


@contextmanager
def registered() -> Iterator[None]:
    """The family is known until the end of the `with`."""
    entry = ModelEntry(HybridConfig, HybridForCausalLM, embedding="embed_tokens.weight")
    with restored(MODELS):
        MODELS.register(ARCHITECTURE, entry)
        yield


RAW = {
    "architectures": [ARCHITECTURE],
    "vocab_size": 500,
    "hidden_size": 48,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "layer_types": LAYERS,
}


def save_hybrid(folder: Path, **changes: Any) -> Path:
    """A random checkpoint, drawn wide, so that logits lie apart; returns the folder."""
    raw = RAW | changes
    config = HybridConfig.from_hf(raw)
    small = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    slots = checkpoint_slots(HybridForCausalLM(config, **small), CHECKPOINT_PARTS)
    random = torch.Generator().manual_seed(7)
    weights = {
        name: torch.randn(slot.shape, generator=random) * (0.2 if len(slot.shape) > 1 else 0.5)
        for name, (slot,) in slots.items()
    }
    for name in weights:
        if "norm" in name:
            weights[name] += 1.0
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 499}))
    save_file(weights, folder / "model.safetensors")
    return folder
