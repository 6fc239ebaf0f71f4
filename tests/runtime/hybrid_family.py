"""A small model with layers of every kind of memory, and what moves its states, in plain torch.

Its weights are random. It has no positions of its own: the order of tokens is in windows, states
and convolutions. Registered in this process as docs/extending.md describes.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import nn

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, LinearKind
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent import RecurrentModule
from quire.layers.residual import ResidualStream
from quire.models.checkpoints.loader import checkpoint_slots
from quire.models.config import ModelConfig
from quire.models.config_fields import ConfigFields
from quire.models.interface import CausalLM, ModelOutput
from quire.models.registry import CHECKPOINT_PARTS, MODELS, ModelEntry
from quire.recurrence import backends
from quire.recurrence.backends import RecurrentEntry, register
from quire.recurrence.state_backend import LayerStates, StateBatch

ARCHITECTURE = "TinyHybridForCausalLM"
HAS_LATENT = "value_dim" in {field.name for field in fields(AttentionSpec)}
UNIT = 16
LAYERS = ("delta", "window", "full", "conv", "delta", "window", "full")
if HAS_LATENT:
    LAYERS += ("latent",)


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """[key_dim][value_dim] of each head, cut in units of 16 columns."""

    num_heads: int = 2
    key_dim: int = 16
    value_dim: int = 32

    @property
    def num_units(self) -> int:
        return self.num_heads * self.value_dim // UNIT

    @property
    def unit_bytes(self) -> int:
        return self.key_dim * UNIT * 4


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """The last width - 1 inputs of each channel, cut in units of 16 channels."""

    num_channels: int = 32
    width: int = 4

    @property
    def num_units(self) -> int:
        return self.num_channels // UNIT

    @property
    def unit_bytes(self) -> int:
        return (self.width - 1) * UNIT * 4


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
RECURRENT = {"delta": DeltaSpec(), "conv": ConvSpec()}


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
    def recurrent_specs(self) -> tuple[DeltaSpec | ConvSpec, ...]:
        return tuple(RECURRENT[kind] for kind in self.layer_types if kind in RECURRENT)

    def first_layer(self) -> Self:
        return replace(self, tie_word_embeddings=False)  # no layer stands for the others


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
        return self.o_proj(attention(self.layer, q, k, v, sinks).flatten(-2))


class HybridDelta(RecurrentModule):
    def __init__(self, layer: int, hidden: int, spec: DeltaSpec, where: Where) -> None:
        super().__init__(layer)
        self.spec = spec
        self.qk_proj = linear(hidden, 2 * spec.num_heads * spec.key_dim, where)
        self.v_proj = linear(hidden, spec.num_heads * spec.value_dim, where)
        self.gate_proj = linear(hidden, 2 * spec.num_heads, where)
        self.o_proj = linear(spec.num_heads * spec.value_dim, hidden, where)

    def forward(self, x: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        qk = self.qk_proj(x).unflatten(-1, (2, self.spec.num_heads, self.spec.key_dim))
        v = self.v_proj(x).unflatten(-1, (self.spec.num_heads, self.spec.value_dim))
        gates = self.gate_proj(x).unflatten(-1, (2, self.spec.num_heads))
        return self.o_proj(self.states.delta(self.layer, qk, v, gates).flatten(-2))


class HybridConv(RecurrentModule):
    def __init__(self, layer: int, hidden: int, spec: ConvSpec, where: Where) -> None:
        super().__init__(layer)
        self.in_proj = linear(hidden, spec.num_channels, where)
        shape = (spec.width, spec.num_channels)
        self.taps = nn.Parameter(torch.zeros(shape, **where), requires_grad=False)
        self.o_proj = linear(spec.num_channels, hidden, where)

    def forward(self, x: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        return self.o_proj(self.states.conv(self.layer, self.in_proj(x), self.taps))


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

    def forward(self, token_ids, positions, attention, *, input_embeds=None, capture_layers=()):
        stream = ResidualStream(self.embed(token_ids), self.operators)
        for index, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            stream.add(mixer(stream.normed(self.norms[2 * index]), attention))
            stream.add(mlp(stream.normed(self.norms[2 * index + 1])))
        return ModelOutput(stream.normed(self.norm))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)


class UnitStates:
    """Reads and writes states unit by unit, as the layout has them, and token by token."""

    serves_graphs = False

    @classmethod
    def create(cls, kernels: object) -> "UnitStates":
        return cls()

    def bind(self, specs: tuple[Any, ...], layers: tuple[LayerStates, ...]) -> None:
        self._layers = list(zip(specs, layers, strict=True))

    def plan(self, batch: StateBatch) -> None:
        self._batch = batch

    def delta(
        self, layer: int, qk: torch.Tensor, v: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """qk [T, 2, H, dk], v [T, H, dv], gates [T, 2, H] -> [T, H, dv]; arXiv:2412.06464."""
        spec: DeltaSpec = self._layers[layer][0]
        out = torch.empty_like(v)
        shape = (spec.num_heads, spec.value_dim // UNIT, spec.key_dim, UNIT)
        for _, span, units in self._sequences(layer):
            state = units.view(shape).transpose(1, 2).reshape(spec.num_heads, spec.key_dim, -1)
            for token in span:
                q, k = torch.nn.functional.normalize(qk[token], dim=-1)
                decay, beta = torch.sigmoid(gates[token])
                state = state * decay[:, None, None]
                seen = (state * k[:, :, None]).sum(1)
                change = (v[token] - seen) * beta[:, None]
                state = state + k[:, :, None] * change[:, None, :]
                out[token] = (state * q[:, :, None]).sum(1)
            cut = state.reshape(spec.num_heads, spec.key_dim, -1, UNIT).transpose(1, 2)
            units.copy_(cut.reshape(units.shape))
        return out

    def conv(self, layer: int, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        """x [T, C], taps [width, C] -> [T, C]."""
        spec: ConvSpec = self._layers[layer][0]
        out = torch.empty_like(x)
        for _, span, units in self._sequences(layer):
            past = units.view(-1, spec.width - 1, UNIT).transpose(0, 1).reshape(spec.width - 1, -1)
            for token in span:
                inputs = torch.cat([past, x[token][None]])
                out[token] = (inputs * taps).sum(0)
                past = inputs[1:]
            cut = past.reshape(spec.width - 1, -1, UNIT).transpose(0, 1)
            units.copy_(cut.reshape(units.shape))
        return out

    def _sequences(self, layer: int):
        """(sequence, its tokens in the step, its units [U, elements]); the units are written back
        to the pages after each."""
        (spec, place), batch = self._layers[layer], self._batch
        starts = batch.query_start.tolist()
        lens = zip(batch.query_lens_list, batch.context_lens_list, batch.rows_list, strict=True)
        for index, (length, context, row) in enumerate(lens):
            table = batch.tables[place.group][row]
            views = []
            for unit in range(place.first_unit, place.first_unit + spec.num_units):
                page, offset = divmod(unit, place.units_per_page)
                first = offset * spec.unit_bytes
                views.append(place.pages[int(table[page]), first : first + spec.unit_bytes])
            units = torch.stack([view.view(torch.float32) for view in views])
            if length == context:
                units.zero_()
            yield index, range(starts[index], starts[index] + length), units
            for view, unit in zip(views, units, strict=True):
                view.copy_(unit.view(torch.uint8))


@contextmanager
def registered() -> Iterator[None]:
    """The family is known, and what moves its states, until the end of the `with`."""
    MODELS[ARCHITECTURE] = ModelEntry(
        HybridConfig,
        HybridForCausalLM,
        embedding="embed_tokens.weight",
        first_layer="no layer stands for the others",
    )
    register("units", RecurrentEntry(f"{__name__}:UnitStates", frozenset({"cpu"})))
    try:
        yield
    finally:
        del MODELS[ARCHITECTURE], backends._BACKENDS["units"]


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
