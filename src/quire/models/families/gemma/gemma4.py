"""The text model of Gemma 4: Gemma 3 with two kinds of heads and shared keys.

Source: the model cards of Gemma 4. Its differences from Gemma 3:

- layers without a window have another head size, by default 512, of which a quarter rotates, and
  may have another number of KV heads; with `attention_k_eq_v`, they use the keys (before norm and
  rotation) as values;
- heads of v are normalised without weights; scores are not scaled; norms multiply by their weight;
- the last layers may store no keys and values. They read what the last earlier layer of their kind
  has stored, and may have MLPs of twice the size;
- each layer may have its own embedding of the token, gated by a projection of the residual stream;
- each layer multiplies the residual stream by its own factor;
- in some models, the tokens of an image attend to each other in both directions in layers with a
  window, and in others in no layer;
- each layer may have a mixture of experts beside its MLP, with a norm in the router and a factor
  for each expert.

The modules are in `gemma4_layers.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from quire.attention.interface import AttentionSpec
from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.kernels.activations import HF_ACTIVATIONS, Gating
from quire.layers.experts import MoESpec
from quire.models.checkpoints.arranged import Arrangement
from quire.models.config import DecoderConfig
from quire.models.config_bounds import INTEGERS, checked_integer
from quire.models.config_fields import ConfigFields
from quire.models.families.gemma.gemma2 import ACTIVATIONS, gemma_fields, gemma_parts
from quire.models.layer_kinds import (
    FULL,
    SLIDING,
    chosen_ropes,
    read_layer_ropes,
    read_layer_types,
    read_windows,
)
from quire.models.mixture_config import checked_router, replaced

# transformers' values for fields that a config leaves out.
_PATTERN = 6
_DEFAULTS = {
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "query_pre_attn_scalar": None,
}
_GLOBAL_HEAD_DIM = 512
_ROPES: Mapping[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """The config of Gemma 4. The inherited head_dim and num_kv_heads are for layers with a window.

    Either all layers have a mixture of experts beside their MLP, or none has.
    """

    #: The kind of each layer, SLIDING or FULL.
    layer_types: tuple[str, ...]
    #: The head size of layers without a window.
    global_head_dim: int
    #: The number of KV heads of layers without a window.
    num_global_kv_heads: int
    #: Whether layers without a window use their keys as values.
    keys_are_values: bool
    #: Number of layers at the end that store no keys and values, but read those of earlier layers.
    num_shared_layers: int
    #: The size of each layer's own embedding of a token; 0 if there is none.
    per_layer_size: int
    #: Whether the MLPs of layers that store no keys have twice the intermediate size.
    is_double_wide: bool
    #: The token whose per-layer embeddings are used at positions of contents, such as images.
    pad_token_id: int

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = gemma_fields(_of_text(raw), _DEFAULTS)
        fields.plain("query_pre_attn_scalar", None)
        kinds = read_layer_types(fields, lambda layer: SLIDING if (layer + 1) % _PATTERN else FULL)
        kinds = (*kinds[:-1], FULL)  # as in transformers, the last layer has no window
        keys_are_values = fields.flag("attention_k_eq_v", False)
        head_dim, num_kv_heads = _read_global_heads(fields, kinds, keys_are_values)
        ropes = read_layer_ropes(
            fields,
            head_dims={FULL: head_dim, SLIDING: fields.head_dim()},
            thetas={kind: _ROPES[kind]["rope_theta"] for kind in _ROPES},
        )
        config = cls.read(
            fields,
            **gemma_parts(fields) | {"norm_offset": 0.0, "attention_scale": 1.0},
            windows=read_windows(fields, kinds),
            sees_ahead=raw.get("use_bidirectional_attention") == "vision",
            layer_types=kinds,
            global_head_dim=head_dim,
            num_global_kv_heads=num_kv_heads,
            keys_are_values=keys_are_values,
            num_shared_layers=_read_shared_layers(fields, kinds),
            per_layer_size=_read_per_layer_size(fields),
            pad_token_id=_read_pad_token(raw, fields.integer("vocab_size")),
            is_double_wide=fields.flag("use_double_wide_mlp", False),
            mixtures=_read_mixtures(fields),
            **chosen_ropes(ropes, kinds),
        )
        if config.num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads is {config.num_heads}, but must be a multiple"
                f" of num_global_key_value_heads, {num_kv_heads}"
            )
        return config

    @property
    def num_storing_layers(self) -> int:
        """Number of layers that store keys and values; they come first."""
        return self.num_layers - self.num_shared_layers

    def stored_by(self, layer: int) -> int:
        """The layer whose stored keys and values this layer reads; `layer` if it stores its own."""
        kinds = self.layer_types[: self.num_storing_layers]
        if layer < len(kinds):
            return layer
        return len(kinds) - 1 - kinds[::-1].index(self.layer_types[layer])

    def mlp_size(self, layer: int) -> int:
        """The intermediate size of a layer's MLP."""
        is_wide = self.is_double_wide and layer >= self.num_storing_layers
        return self.intermediate_size * (2 if is_wide else 1)

    def attention_spec(self, layer: int) -> AttentionSpec:
        spec = DecoderConfig.attention_spec(self, layer)
        if self.layer_types[layer] == SLIDING:
            return spec
        return replace(
            spec,
            head_dim=self.global_head_dim,
            num_kv_heads=self.num_global_kv_heads,
            sees_ahead=False,
        )

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(map(self.attention_spec, range(self.num_storing_layers)))

    def num_mlp_weights(self, layer: int, *, active: bool = False) -> int:
        mixed = 0
        if self.mixtures is not None:
            mixed = DecoderConfig.num_mlp_weights(self, layer, active=active)
        return mixed + 3 * self.hidden_size * self.mlp_size(layer)

    def why_not_split(self, num_ranks: int) -> str | None:
        if self.intermediate_size % num_ranks:
            return f"the model's intermediate_size, {self.intermediate_size}, is no multiple of it"
        if self.num_global_kv_heads % num_ranks and num_ranks % self.num_global_kv_heads:
            return (
                f"it neither divides nor is a multiple of the {self.num_global_kv_heads} KV heads"
                " of the model's layers with full attention"
            )
        return DecoderConfig.why_not_split(self, num_ranks)

    def share_of(self, rank: int, num_ranks: int) -> Self:
        share = DecoderConfig.share_of(self, rank, num_ranks)
        return replace(share, num_global_kv_heads=max(1, self.num_global_kv_heads // num_ranks))


def _of_text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Add transformers' default rotations if there are none.

    Removes `use_bidirectional_attention` if it concerns only images.
    """
    found = dict(raw)
    if not raw.get("rope_parameters"):
        found["rope_parameters"] = _ROPES
    if raw.get("use_bidirectional_attention") == "vision":
        del found["use_bidirectional_attention"]
    return found


def _read_pad_token(raw: Mapping[str, Any], vocab_size: int) -> int:
    token_id = raw.get("pad_token_id", 0)
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise CheckpointError(
            f"config.json: pad_token_id is {shown(token_id)}, but must be a token of the"
            f" vocabulary, of {vocab_size}"
        )
    return token_id


def _read_global_heads(
    fields: ConfigFields, kinds: tuple[str, ...], keys_are_values: bool
) -> tuple[int, int]:
    """Read the head size and the number of KV heads of layers with full attention."""
    size, count = _GLOBAL_HEAD_DIM, fields.integer("num_key_value_heads")
    given = {"head_dim": fields.value("global_head_dim")}
    num_kv_heads = fields.value("num_global_key_value_heads")
    if keys_are_values:
        given["num_key_value_heads"] = num_kv_heads
    by_layer = fields.value("per_layer_config")
    if by_layer is not None:
        size, given = fields.head_dim(), _differences(by_layer, kinds)
    if given.get("head_dim") is not None:
        size = checked_integer("config.json: global_head_dim", "head_dim", given["head_dim"])
    if given.get("num_key_value_heads") is not None:
        what = "config.json: num_global_key_value_heads"
        count = checked_integer(what, "num_key_value_heads", given["num_key_value_heads"])
    return size, count


def _differences(by_layer: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Read the fields that have other values for layers with full attention.

    transformers 5 writes them in `per_layer_config`, with zero-padded layer numbers as keys.
    """
    changes: dict[Any, Any] = by_layer if isinstance(by_layer, dict) else {"": None}
    layers = {int(name) if _is_layer(str(name)) else -1 for name in changes}
    first: Any = next(iter(changes.values()), {})
    is_known = isinstance(first, dict) and first.keys() <= {"head_dim", "num_key_value_heads"}
    is_alike = all(each == first for each in changes.values())
    full = {layer for layer, kind in enumerate(kinds) if kind == FULL}
    if not is_known or not is_alike or layers not in (set(), full):
        raise UnsupportedModelError(
            f"config.json: per_layer_config is {shown(by_layer)}, but only a head_dim and "
            "num_key_value_heads that all layers of full attention have is understood"
        )
    return dict(first)


def _is_layer(name: str) -> bool:
    return name.isdecimal() and len(name) <= len(str(INTEGERS["num_hidden_layers"].highest))


def _read_shared_layers(fields: ConfigFields, kinds: tuple[str, ...]) -> int:
    count = fields.integer("num_kv_shared_layers", 0)
    if count and not set(kinds[-count:]) <= set(kinds[:-count]):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {count}, but before these layers there must"
            f" be a layer of each of their kinds, {', '.join(sorted(set(kinds[-count:])))}"
        )
    return count


def _read_mixtures(fields: ConfigFields) -> tuple[MoESpec, ...] | None:
    if not fields.flag("enable_moe_block", False):
        for name in _OF_EXPERTS:
            fields.value(name)
        return None
    num_experts, top_k, size = (fields.integer(name) for name in _OF_EXPERTS)
    router = checked_router(
        num_experts=num_experts, top_k=top_k, renormalizes=True, has_scales=True
    )
    activation = HF_ACTIVATIONS[fields.choice("hidden_act", ACTIVATIONS[0], ACTIVATIONS)]
    mixture = MoESpec(router=router, intermediate_size=size, gating=Gating(activation))
    return (mixture,) * fields.integer("num_hidden_layers")


def _read_per_layer_size(fields: ConfigFields) -> int:
    size = fields.integer("hidden_size_per_layer_input")
    num_tokens, known = fields.integer("vocab_size"), fields.integer("vocab_size_per_layer_input")
    if size and num_tokens != known:
        raise UnsupportedModelError(
            f"config.json: vocab_size_per_layer_input is {known}, but only vocab_size, "
            f"{num_tokens}, is understood: all tokens have an embedding of each layer"
        )
    return size


def unused_keys(config: Gemma4Config) -> Arrangement:
    """Ignore the k and v projections of layers that store none; some files have them."""
    layers = range(config.num_storing_layers, config.num_layers)
    names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return Arrangement(
        unused=tuple(f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in names)
    )


_PER_LAYER = (
    "embed_tokens_per_layer.",
    "per_layer_model_projection.",
    "per_layer_projection_norm.",
)


_OF_MIXTURE = {
    ".router.per_expert_scale": ".mixture.gate.e_score_correction_bias",
    ".router.proj.": ".mixture.gate.",
    ".router.scale": ".mixture.scale",
    ".experts.": ".mixture.experts.",
}


def rename_gemma4(name: str) -> str:
    """Map the names of tensors of per-layer inputs, experts and routers to the model's modules."""
    inner = name.removeprefix("model.")
    if inner.startswith(_PER_LAYER):
        return f"per_layer_inputs.{inner}"
    return replaced(name, _OF_MIXTURE)
