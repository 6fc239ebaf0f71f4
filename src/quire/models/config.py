"""The base classes of model configs, which are read from config.json.

Each decoder family's config derives from `DecoderConfig`, and its `from_hf` reads the fields in
which the family differs from Llama.
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
"""Other names of dtypes in configs. Models in double precision are computed in single precision."""
ROTARY_ITEM_BYTES = 4
"""Bytes of an element of `layers.rotary.RotaryEmbedding.table`."""
TOKEN_CLASSIFIER_SUFFIX = "ForTokenClassification"
_LEARNED = "each of which has a learned vector"
_CLASSIFIER_SUFFIXES = ("ForSequenceClassification", TOKEN_CLASSIFIER_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ABC):
    """The config of any model, with the fields that the engine reads."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    #: The checkpoint's dtype; None if its config has none.
    dtype: torch.dtype | None
    tie_word_embeddings: bool = False
    #: The number of scores of a classification head; 0 if the model has no such head.
    num_labels: int = 0
    #: Name of the multimodal architecture that contains this language model; None for a text model.
    wrapper: str | None = None
    #: The number of layers at the end that predict further tokens (DeepSeek-V3's MTP). They are not
    #: part of `num_layers`. The first one is loaded to draft, as a head (`models.heads.mtp`).
    num_predicting_layers: int = 0
    #: The quantization of the checkpoint's weights; None if they are not quantized.
    quantized: Quantized | None = None
    #: Names of the fields of config.json that were ignored because no model reads them.
    left_out: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read the contents of config.json.

        Raises UnsupportedModelError for an unsupported field or value, and CheckpointError for a
        missing or malformed one.
        """

    @property
    @abstractmethod
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The specs of the attention layers, in order."""

    @property
    def recurrent_specs(self) -> tuple[RecurrentSpec, ...]:
        """The specs of the recurrent layers, in order."""
        return ()

    @property
    def is_causal(self) -> bool:
        """Whether no token attends to later tokens."""
        return all(spec.causal for spec in self.attention_specs)

    @property
    def reads_contents_whole(self) -> bool:
        """Whether one step must compute all tokens of a content, such as an image."""
        return any(spec.sees_ahead for spec in self.attention_specs)

    @property
    def num_token_types(self) -> int:
        """See `core.sampling_params.ModelLimits`."""
        return 1

    @property
    def num_experts_per_token(self) -> int:
        """The number of a token's experts in a layer; 0 if no layer is a mixture of experts."""
        return 0

    @property
    def max_supported_positions(self) -> int:
        """The largest possible max_model_len."""
        return self.max_position_embeddings

    @property
    def position_origin(self) -> str:
        """The end of a message that says where max_supported_positions comes from."""
        return _LEARNED

    @property
    def bytes_per_position(self) -> int:
        """Number of bytes per position of the tables of cosines and sines."""
        return 0

    def position_key(self, max_model_len: int) -> bytes:
        """A key of a length. Two lengths may have equal keys only if the model computes the same
        results with both."""
        return str(max_model_len).encode()

    def why_not_split(self, num_ranks: int) -> str | None:
        """The end of a message that says why the model can't be split; None if it can."""
        return None if num_ranks == 1 else "this architecture is computed by one rank only"

    def share_of(self, rank: int, num_ranks: int) -> Self:
        """The config of one rank's shard of the model: some heads, and parts of the MLPs and the
        vocabulary.

        `why_not_split` must allow `num_ranks`.
        """
        return self

    def check_size(self, num_layer_weights: int) -> None:
        """Raise CheckpointError if the model is impossibly large.

        `num_layer_weights` is the approximate number of one layer's weights.
        """
        num_weights = self.num_layers * num_layer_weights + 2 * self.vocab_size * self.hidden_size
        if num_weights > MAX_WEIGHTS:
            raise CheckpointError(
                f"config.json describes a model of {num_weights} weights ({self.num_layers} layers "
                f"of {num_layer_weights}), but at most {MAX_WEIGHTS} are allowed; fetch it again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder with grouped-query attention.

    The defaults are RMSNorm, rotary positions and a gated MLP. A family sets fields that have
    defaults, which `models.decoder` implements, or adds fields in a subclass.
    """

    #: The eps of all norms, LayerNorms included.
    rms_norm_eps: float
    #: The rotation of q and k. If it is None, each position has a learned vector, which is added to
    #: the token's embedding.
    rope: Rope | None
    #: For each layer, the number of keys that a query attends to, including its own; None if all.
    windows: tuple[int | None, ...]
    #: See `AttentionSpec`; the same for all layers.
    sees_ahead: bool = False
    #: The kind of norms; "plain layer" is LayerNorm without weight and bias.
    norm: Literal["rms", "layer", "plain layer"] = "rms"
    #: Whether the MLP is gated; otherwise it is `layers.encoder.FeedForward`.
    is_gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    #: Whether q and k are normalised before the rotation: each "head" separately, or all heads
    #: together ("width").
    qk_norm: Literal["head", "width"] | None = None
    #: The offset of all norms; see `kernels.rms_norm`.
    norm_offset: float | None = None
    #: The activation of the MLP.
    activation: ActivationFunction = ActivationFunction.SILU
    #: For each layer, its mixture of experts, or None for a dense MLP of `intermediate_size`. The
    #: field is None if all layers are dense.
    mixtures: tuple[MoESpec | None, ...] | None = None
    #: The number of elements that rotate at the start of each head of q and k; None if all.
    rotary_dim: int | None = None
    #: Rotations that some layers have instead of `rope`.
    other_ropes: tuple[LayerRope, ...] = ()
    #: For each layer, 0 for `rope`, i for `other_ropes[i - 1]`, or None for no rotation. The field
    #: is None if all layers have `rope`.
    layer_ropes: tuple[int | None, ...] | None = None
    #: The soft cap of attention scores; see `AttentionSpec`.
    attention_soft_cap: float | None = None
    #: The soft cap of logits; see `kernels.activations.soft_cap`.
    logits_soft_cap: float | None = None
    #: Whether heads have attention sinks; see `AttentionSpec`.
    has_sinks: bool = False
    #: The factor of q·k; None means 1 / sqrt(head_dim).
    attention_scale: float | None = None
    #: How queries grow with their position; None if they don't.
    query_growth: QueryGrowth | None = None
    #: Whether attention's output is gated; see `layers.attention`.
    has_attention_gate: bool = False
    embedding_scale: float = 1.0
    #: The factor of each block's output before it is added to the residual stream.
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    @classmethod
    def read(
        cls,
        fields: ConfigFields,
        *,
        activations: tuple[str, ...] = ("silu",),
        partial_rotary: float | None = None,
        attention_bias: bool = False,
        **difference: Any,
    ) -> Self:
        """Read the fields that all decoders share, and refuse remaining fields.

        `activations` are the names in config.json that the family supports; the first is the
        default. `partial_rotary` is the default of partial_rotary_factor, the share of a head that
        rotates; None if whole heads rotate and the field is refused. With `attention_bias`, all
        linears of attention have biases. `difference` maps fields of the dataclass to values that
        replace those read here.
        """
        # First, read the fields that others depend on.
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        max_position_embeddings = fields.integer("max_position_embeddings")
        fields.flag("is_decoder", True)  # read and ignored, since the model is a decoder
        if "silu" in activations:
            activations = (*activations, "swish")
        num_layers = fields.integer("num_hidden_layers")
        head_dim = fields.head_dim()
        rotary_dim = None
        if partial_rotary is not None:
            rotary_dim = read_rotary_dim(fields, head_dim=head_dim, default_factor=partial_rotary)
        # Then, read the others.
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
            "qkv_bias": attention_bias,
            "output_bias": attention_bias,
            "activation": HF_ACTIVATIONS[fields.choice("hidden_act", activations[0], activations)],
        }
        if "rope" not in difference:
            shared["rope"] = read_rope(
                fields,
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rotary_dim=rotary_dim,
            )
        # Last, refuse fields that were not read, and check the sizes together.
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
                f"most {MAX_EXPERTS} are allowed; fetch it again"
            )
        num_projected = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        num_mlp_weights = max(map(self.num_mlp_weights, range(self.num_layers)), default=0)
        self.check_size(self.hidden_size * num_projected + num_mlp_weights)

    def mixture_of(self, layer: int) -> MoESpec | None:
        """A layer's mixture of experts; None if its MLP is dense."""
        return None if self.mixtures is None else self.mixtures[layer]

    @property
    def num_experts_per_token(self) -> int:
        return max((each.router.top_k for each in filter(None, self.mixtures or ())), default=0)

    def num_mlp_weights(self, layer: int, *, active: bool = False) -> int:
        """The number of a layer's MLP weights, without biases.

        With `active`, only the weights that one token reads are counted.
        """
        mixture = self.mixture_of(layer)
        if mixture is None:
            return 3 * self.hidden_size * self.intermediate_size
        return mixture.num_weights(self.hidden_size, active=active)

    @property
    def max_supported_positions(self) -> int:
        """max_position_embeddings, or the length to which the rope type extends it."""
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
        """All rotations of the layers, in the order of the indices in `layer_ropes`."""
        if self.rope is None:
            return ()
        return (LayerRope(self.rope, self.rotary_dim or self.head_dim), *self.other_ropes)

    def rope_of(self, layer: int) -> int | None:
        """The index in `ropes` of a layer's rotation; None if the layer has no rotation."""
        if self.layer_ropes is None:
            return None if self.rope is None else 0
        return self.layer_ropes[layer]

    @property
    def bytes_per_position(self) -> int:
        return sum(each.rotary_dim for each in self.ropes) * ROTARY_ITEM_BYTES

    def position_key(self, max_model_len: int) -> bytes:
        """The frequencies of the rotations at this length. Most rope types have the same
        frequencies at every length.

        Subclasses that use the length elsewhere override this method.
        """
        key = b""
        for each in self.ropes:
            limits = RopeLimits(each.rotary_dim, self.max_position_embeddings, max_model_len)
            frequencies, factor = each.rope.frequencies(limits)
            key += frequencies.numpy().tobytes() + float(factor).hex().encode()
        return key

    def attention_spec(self, layer: int) -> AttentionSpec:
        """A layer's attention spec. Subclasses override it if layers differ in other ways."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            window=self.windows[layer],
            sees_ahead=self.sees_ahead,
            soft_cap=self.attention_soft_cap,
            has_sinks=self.has_sinks,
        )

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(map(self.attention_spec, self.attention_layers))

    @property
    def attention_layers(self) -> Sequence[int]:
        """Indices of the layers that have attention; the attention call's `layer` is a position in
        this list."""
        return range(self.num_layers)

    @property
    def norm_of_q_and_k(self) -> QKNorm | None:
        """The norm of q and k for `layers.attention`; None if there is none."""
        if self.qk_norm is None:
            return None
        return QKNorm(self.rms_norm_eps, self.qk_norm == "head", self.norm_offset)

    def why_not_split(self, num_ranks: int) -> str | None:
        if self.num_heads % num_ranks:
            return f"the model's {self.num_heads} attention heads can't be divided equally"
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            return (
                f"it neither divides nor is a multiple of the model's {self.num_kv_heads} KV heads"
            )
        mixtures = self.mixtures or (None,)
        if None in mixtures and self.intermediate_size % num_ranks:
            return f"the model's intermediate_size, {self.intermediate_size}, is no multiple of it"
        for mixture in filter(None, mixtures):
            reason = mixture.why_not_split(num_ranks)
            if reason is not None:
                return reason
        if not vocab_share(self.vocab_size, num_ranks - 1, num_ranks):
            return f"the last rank would get none of the model's {self.vocab_size} tokens"
        if self.qk_norm == "width" and num_ranks > 1:
            return "the model normalises q and k over all heads, and each rank has only some heads"
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
    """Read the windows of Qwen's layers, which exist only with `use_sliding_window`.

    `layer_types` names the kinds of the layers. If it is missing, the layers from
    `max_window_layers` on have the window.
    """
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
    """Read the number of labels of a sequence or token classifier; 0 for other models."""
    names = fields.value("architectures")
    if not isinstance(names, list) or not str(names[0]).endswith(_CLASSIFIER_SUFFIXES):
        return 0
    labels, count = fields.value("id2label"), fields.optional_integer("num_labels")
    if isinstance(labels, dict) and labels:
        count = len(labels)
    return checked_integer("config.json: num_labels", "num_labels", 2 if count is None else count)


def read_architecture(fields: ConfigFields) -> str:
    """Read the single class name in `architectures`."""
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json: architectures is {shown(names)}, but must be a list of one name"
        )
    return names[0]


def read_dtype(fields: ConfigFields) -> torch.dtype | None:
    """Read the checkpoint's dtype; None if the config has none."""
    name = fields.value("dtype") or fields.value("torch_dtype")
    # A dict has the dtypes of parts of the model; the key "" stands for all other parts.
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
