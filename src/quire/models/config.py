"""The configs that all models, and all decoders, share, and their reading.

Each decoder family's config derives from `DecoderConfig` and says its difference in `from_hf`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from quire.attention.interface import AttentionSpec
from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.kernels.activations import HF_ACTIVATIONS, ActivationFunction
from quire.layers.attention import QKNorm
from quire.layers.experts import MoESpec
from quire.layers.position_scale import QueryGrowth
from quire.layers.rotary import LayerRope, Rope, RopeLimits
from quire.layers.sharded import vocab_share
from quire.models.checkpoints.quantized.settings import Quantized
from quire.models.config_bounds import MAX_EXPERTS, MAX_WEIGHTS, checked_integer
from quire.models.config_fields import ConfigFields
from quire.models.layer_kinds import FULL, SLIDING, read_layer_types
from quire.models.rope_config import read_rope, read_rotary_dim
from quire.recurrence.state_backend import RecurrentSpec

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_OTHER_DTYPES = {
    **{"float": "float32", "fp32": "float32", "double": "float32", "float64": "float32"},
    **{"half": "float16", "fp16": "float16", "bf16": "bfloat16"},
}
"""Other names in configs; double precision is computed in single."""
ROTARY_ITEM_BYTES = 4
"""Of `layers.rotary.RotaryEmbedding.table`."""
TOKEN_CLASSIFIER_SUFFIX = "ForTokenClassification"
_LEARNED = "each of which has a learned vector"
_CLASSIFIER_SUFFIXES = ("ForSequenceClassification", TOKEN_CLASSIFIER_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ABC):
    """What the engine reads of any model's config.

    dtype: the checkpoint's own, as its config says; None: it doesn't say.
    num_labels: what the model's head scores; 0: it has no such head.
    wrapper: the multimodal architecture of which this is the language model; None: it is whole.
    quantized: how the checkpoint's weights are; None: they are not.
    num_predicting_layers: that follow the model's own in its files and predict tokens further on
        (DeepSeek-V3's MTP); they are left out.
    left_out: names of fields of config.json that are set and that no model reads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: torch.dtype | None
    tie_word_embeddings: bool = False
    num_labels: int = 0
    wrapper: str | None = None
    num_predicting_layers: int = 0
    quantized: Quantized | None = None
    left_out: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """From the contents of config.json. Raises UnsupportedModelError for a field, or a value,
        that is not understood, and CheckpointError for one that is missing or malformed."""

    @property
    @abstractmethod
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One for each attention layer, in order."""

    @property
    def recurrent_specs(self) -> tuple[RecurrentSpec, ...]:
        """One for each recurrent layer, in order."""
        return ()

    @property
    def is_causal(self) -> bool:
        """Whether no token attends to those behind it."""
        return all(spec.causal for spec in self.attention_specs)

    @property
    def num_token_types(self) -> int:
        """See `core.sampling_params.ModelLimits`."""
        return 1

    @property
    def num_experts_per_token(self) -> int:
        """Of a layer that is a mixture of experts; 0: no layer is one."""
        return 0

    @property
    def max_supported_positions(self) -> int:
        """The longest max_model_len."""
        return self.max_position_embeddings

    @property
    def position_origin(self) -> str:
        """Where max_supported_positions comes from, as a sentence goes on."""
        return _LEARNED

    @property
    def bytes_per_position(self) -> int:
        """Of a table that grows with max_model_len."""
        return 0

    def position_key(self, max_model_len: int) -> bytes:
        """Equal for two lengths under which the model computes the same of the same tokens."""
        return str(max_model_len).encode()

    def why_not_split(self, num_ranks: int) -> str | None:
        """Why the model can't be split over so many ranks, as a sentence goes on; None: it can."""
        return None if num_ranks == 1 else "this architecture is computed by one rank only"

    def share_of(self, rank: int, num_ranks: int) -> Self:
        """The model that a rank builds: with its share of heads, MLP and vocabulary.

        num_ranks: one that `why_not_split` allows.
        """
        return self

    def check_size(self, num_layer_weights: int) -> None:
        """Raises CheckpointError for a model that is out of all bounds.

        num_layer_weights: of one layer, about.
        """
        num_weights = self.num_layers * num_layer_weights + 2 * self.vocab_size * self.hidden_size
        if num_weights > MAX_WEIGHTS:
            raise CheckpointError(
                f"config.json describes a model of {num_weights} weights ({self.num_layers} layers "
                f"of {num_layer_weights}), but at most {MAX_WEIGHTS} can be; fetch it again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder with grouped-query attention; with RMSNorm, rotary positions and a gated MLP, where
    its family says nothing else.

    The first fields are what every family's checkpoint says; those with a default are the parts
    that a family chooses (`models.decoder` obeys them), or adds to in a subclass.

    windows: for each layer, how many keys a query sees, itself included; None: all before it.
    qkv_bias, output_bias, mlp_bias: which projections have a bias.
    rope: None: each position has a learned vector, which is added to the token's.
    norm: RMSNorm; LayerNorm, whose eps is rms_norm_eps as well; or one without weight and bias.
    is_gated: whether the MLP is; else it is `layers.encoder.FeedForward`.
    qk_norm: q and k are normalised before the rotation: each "head", or the whole "width".
    norm_offset: of all norms, as `kernels.rms_norm` says.
    activation: of the MLP.
    mixtures: for each layer, the mixture of experts that is its MLP, None for a dense one of
        `intermediate_size`; None: all are dense.
    rotary_dim: how many elements of each head of q and k rotate, the first ones; None: all.
    other_ropes: rotations that some layers have in place of `rope`'s.
    layer_ropes: for each layer, 0 for `rope`, i for `other_ropes[i - 1]`, None for q and k that are
        not rotated; None: all have `rope`.
    attention_soft_cap, logits_soft_cap: see `AttentionSpec`, and `kernels.activations.soft_cap`.
    has_sinks: see `AttentionSpec`.
    attention_scale: multiplies q·k; None: one over the root of the head size.
    query_growth: what queries are multiplied by at later positions; None: nothing.
    has_attention_gate: see `layers.attention`.
    embedding_scale, residual_scale, logits_scale: multiply the embeddings, what each block adds to
        the residual stream, and the logits.
    """

    rms_norm_eps: float
    rope: Rope | None
    windows: tuple[int | None, ...]
    norm: Literal["rms", "layer", "plain layer"] = "rms"
    is_gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    norm_offset: float | None = None
    activation: ActivationFunction = ActivationFunction.SILU
    mixtures: tuple[MoESpec | None, ...] | None = None
    rotary_dim: int | None = None
    other_ropes: tuple[LayerRope, ...] = ()
    layer_ropes: tuple[int | None, ...] | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    attention_scale: float | None = None
    query_growth: QueryGrowth | None = None
    has_attention_gate: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    @classmethod
    def read(
        cls,
        fields: ConfigFields,
        *,
        activations: tuple[str, ...] = ("silu",),
        partial_rotary: float | None = None,
        **difference: Any,
    ) -> Self:
        """Read the fields that all models share, then refuse what is left.

        activations: names of those that the family may have, as config.json has them; first what
            it has where the config is silent.
        partial_rotary: the share of a head that rotates where the config has no
            partial_rotary_factor; None: heads rotate as a whole, and that field is refused.
        difference: values of the dataclass's own fields that win over those read here.
        """
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        max_position_embeddings = fields.integer("max_position_embeddings")
        fields.flag("is_decoder", True)  # which it is, whatever the config says
        if "silu" in activations:
            activations = (*activations, "swish")
        num_layers = fields.integer("num_hidden_layers")
        head_dim = fields.head_dim()
        rotary_dim = None
        if partial_rotary is not None:
            rotary_dim = read_rotary_dim(fields, head_dim=head_dim, default_factor=partial_rotary)
        shared: dict[str, Any] = {
            "architecture": read_architecture(fields),
            "num_labels": read_num_labels(fields),
            "vocab_size": fields.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": fields.integer("intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": max_position_embeddings,
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
            "rotary_dim": rotary_dim,
            "dtype": read_dtype(fields),
            "windows": (None,) * num_layers,
            "activation": HF_ACTIVATIONS[fields.choice("hidden_act", activations[0], activations)],
        }
        if "rope" not in difference:
            shared["rope"] = read_rope(
                fields,
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rotary_dim=rotary_dim,
            )
        shared["left_out"] = fields.finish()
        config = cls(**(shared | difference))
        config._check_products()
        return config

    def _check_products(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads is {self.num_heads}, but must be a multiple of "
                f"num_key_value_heads, {self.num_kv_heads}"
            )
        num_experts = sum(each.router.num_experts for each in filter(None, self.mixtures or ()))
        if num_experts > MAX_EXPERTS:
            raise CheckpointError(
                f"config.json describes a model of {num_experts} experts in all its layers, but at "
                f"most {MAX_EXPERTS} can be; fetch it again"
            )
        num_projected = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        num_mlp_weights = max(map(self.num_mlp_weights, range(self.num_layers)), default=0)
        self.check_size(self.hidden_size * num_projected + num_mlp_weights)

    def mixture_of(self, layer: int) -> MoESpec | None:
        """The mixture of experts that is a layer's MLP; None: a dense one."""
        return None if self.mixtures is None else self.mixtures[layer]

    @property
    def num_experts_per_token(self) -> int:
        return max((each.router.top_k for each in filter(None, self.mixtures or ())), default=0)

    def num_mlp_weights(self, layer: int, *, active: bool = False) -> int:
        """Of a layer, without biases. active: only those that one token reads."""
        mixture = self.mixture_of(layer)
        if mixture is None:
            return 3 * self.hidden_size * self.intermediate_size
        return mixture.num_weights(self.hidden_size, active=active)

    @property
    def max_supported_positions(self) -> int:
        """max_position_embeddings, or what the rope type stretches it to."""
        if self.rope is None:
            return self.max_position_embeddings
        return self.rope.max_positions(self.max_position_embeddings)

    @property
    def position_origin(self) -> str:
        if self.rope is None:
            return _LEARNED
        name, factor = (
            self.rope.type_name,
            self.max_supported_positions / max(1, self.max_position_embeddings),
        )
        if factor > 1:
            return f"which its rope type {name!r} stretches {factor:g} times"
        return f"and its rope type {name!r} adds none"

    @property
    def ropes(self) -> tuple[LayerRope, ...]:
        """All rotations that layers have, as `layer_ropes` counts them."""
        if self.rope is None:
            return ()
        return (LayerRope(self.rope, self.rotary_dim or self.head_dim), *self.other_ropes)

    def rope_of(self, layer: int) -> int | None:
        """Which of `ropes` a layer has; None: none."""
        if self.layer_ropes is None:
            return None if self.rope is None else 0
        return self.layer_ropes[layer]

    @property
    def bytes_per_position(self) -> int:
        return sum(each.rotary_dim for each in self.ropes) * ROTARY_ITEM_BYTES

    def position_key(self, max_model_len: int) -> bytes:
        """The frequencies of the rotations, which a few rope types choose by the length. A subclass
        that reads the length elsewhere says so here."""
        key = b""
        for each in self.ropes:
            limits = RopeLimits(each.rotary_dim, self.max_position_embeddings, max_model_len)
            frequencies, factor = each.rope.frequencies(limits)
            key += frequencies.numpy().tobytes() + float(factor).hex().encode()
        return key

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Of a layer; a subclass whose layers differ otherwise says so here."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            window=self.windows[layer],
            soft_cap=self.attention_soft_cap,
            has_sinks=self.has_sinks,
        )

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(map(self.attention_spec, self.attention_layers))

    @property
    def attention_layers(self) -> Sequence[int]:
        """The layers that have attention, in the order of the attention call's `layer`."""
        return range(self.num_layers)

    @property
    def norm_of_q_and_k(self) -> QKNorm | None:
        """As `layers.attention` has it."""
        if self.qk_norm is None:
            return None
        return QKNorm(self.rms_norm_eps, self.qk_norm == "head", self.norm_offset)

    def why_not_split(self, num_ranks: int) -> str | None:
        if self.num_heads % num_ranks:
            return f"the model's {self.num_heads} attention heads can't be shared out equally"
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            return f"neither it nor the model's {self.num_kv_heads} KV heads divide the other"
        mixtures = self.mixtures or (None,)
        if None in mixtures and self.intermediate_size % num_ranks:
            return f"the model's intermediate_size, {self.intermediate_size}, is no multiple of it"
        for mixture in filter(None, mixtures):
            reason = mixture.why_not_split(num_ranks)
            if reason is not None:
                return reason
        if not vocab_share(self.vocab_size, num_ranks - 1, num_ranks):
            return f"of the model's {self.vocab_size} tokens there would be none for the last rank"
        if self.qk_norm == "width" and num_ranks > 1:
            return "the model normalises q and k over all heads, of which each rank has a share"
        return None

    def share_of(self, rank: int, num_ranks: int) -> Self:
        mixtures = self.mixtures
        if mixtures is not None:
            mixtures = tuple(each and each.share(num_ranks) for each in mixtures)
        return replace(
            self,
            mixtures=mixtures,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
            vocab_size=len(vocab_share(self.vocab_size, rank, num_ranks)),
        )


def read_window_layers(fields: ConfigFields) -> tuple[int | None, ...]:
    """Qwen's windows: `layer_types` names each layer's kind; without it, the layers from
    `max_window_layers` on have the window, if `use_sliding_window` is on at all."""
    first = fields.integer("max_window_layers", fields.integer("num_hidden_layers"))
    window = fields.optional_integer("sliding_window")
    if not fields.flag("use_sliding_window", False):
        window = None
    kinds = read_layer_types(fields, lambda layer: SLIDING if layer >= first else FULL)
    if window is None and fields.value("layer_types") is not None and SLIDING in kinds:
        raise UnsupportedModelError(
            f"config.json: layer_types has {SLIDING}, which is understood only with "
            "use_sliding_window and a sliding_window"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_num_labels(fields: ConfigFields) -> int:
    """Of a model that classifies sequences, or tokens, as transformers has it; 0 for others."""
    names = fields.value("architectures")
    if not isinstance(names, list) or not str(names[0]).endswith(_CLASSIFIER_SUFFIXES):
        return 0
    labels, count = fields.value("id2label"), fields.optional_integer("num_labels")
    if isinstance(labels, dict) and labels:
        count = len(labels)
    return checked_integer("config.json: num_labels", "num_labels", 2 if count is None else count)


def read_architecture(fields: ConfigFields) -> str:
    """The name of the one class that the config names."""
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json: architectures is {shown(names)}, but must be a list of one name"
        )
    return names[0]


def read_dtype(fields: ConfigFields) -> torch.dtype | None:
    """The checkpoint's own; None where the config is silent."""
    name = fields.value("dtype") or fields.value("torch_dtype")
    # By the parts of a model, of which "" is all that is not named.
    if isinstance(name, dict) and all(isinstance(each, str | None) for each in name.values()):
        name = name.get("")
    if name is None or name == "auto":
        return None
    if isinstance(name, str):
        name = name.removeprefix("torch.")
        name = _OTHER_DTYPES.get(name, name)
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedModelError(
            f"config.json: dtype is {shown(name)}, but only {', '.join(_DTYPES)} are understood"
        )
    return _DTYPES[name]
