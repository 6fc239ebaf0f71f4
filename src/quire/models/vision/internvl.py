"""The tower of InternVL: InternViT, and a connector that merges neighbouring patches.

Source: InternVL 1.5 (arXiv:2404.16821, section 3.1) and InternVL3 (arXiv:2504.10479). The encoder's
differences from SigLIP:

- a class token stands before the patches, takes part in attention, and is left out at the end;
- the outputs of attention and MLP are scaled by learned factors, one for each element;
- large encoders normalise q and k over all heads together, and have RMSNorms.

The connector stacks a square of patches ("pixel shuffle"), and projects it by a norm and two
linears. An image comes as square tiles of one size, and each tile is one content.

Shapes: P patches of a tile, R rows of a piece, F patches of a side of the square that becomes one
embedding, H hidden size of the tower, O that of the language model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import nn

from quire.errors import CheckpointError, InvalidRequestError
from quire.formats.weight_format import empty_parameter
from quire.kernels.activations import HF_ACTIVATIONS, ActivationFunction
from quire.layers.encoder import FeedForward
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.storage import Storage
from quire.models.config_bounds import checked_integer
from quire.models.config_fields import ConfigFields
from quire.models.vision.connectors import SquareConnector
from quire.models.vision.patches import (
    IMAGE_GRID,
    NUM_CHANNELS,
    PatchProjection,
    stack_squares,
    to_patches,
)
from quire.models.vision.slices import WIDE_PIECE_ROWS, EncoderLayer, in_pieces
from quire.models.vision.vision_tower import (
    Grid,
    Slices,
    VisionConfig,
    VisionTower,
    vision_config_of,
)

_QK_EPS = 1e-6
"""The eps of the norms of q and k, which is not in configs."""
# transformers' values for fields that a vision_config leaves out.
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
_IGNORED = (
    "dropout",
    "hidden_dropout_prob",
    "initializer_factor",
    "layer_scale_init_value",
    "projection_dropout",
)
"""Fields that matter in training only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLConfig(VisionConfig):
    """The config of the encoder and the connector."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    #: Height and width of a tile, in pixels.
    image_size: int
    #: Height and width of a patch, in pixels.
    patch_size: int
    #: Patches along each side of the square that becomes one embedding.
    merge_size: int
    activation: ActivationFunction
    norm_eps: float
    #: Whether the layers' norms are RMSNorms instead of LayerNorms.
    has_rms_norms: bool
    has_qk_norms: bool
    #: Whether the projections to q, k and v have biases.
    has_qkv_bias: bool
    #: Whether a LayerNorm follows the last layer.
    has_last_norm: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        # First, read the connector's fields.
        connector, vision = ConfigFields(raw), vision_config_of(raw)
        connector.choice("projector_hidden_act", "gelu", ("gelu",))
        connector.plain("vision_feature_layer", -1)
        connector.plain("vision_feature_select_strategy", "default")
        ratio = connector.number("downsample_ratio", 0.5)
        # Then, read the encoder's.
        fields = connector.inner({**_DEFAULTS, **vision})
        fields.plain("num_channels", NUM_CHANNELS)
        fields.plain("use_mask_token", False)
        fields.plain("use_absolute_position_embeddings", True)
        for name in _IGNORED:
            fields.value(name)
        hidden_size, num_heads = (
            fields.integer(name) for name in ("hidden_size", "num_attention_heads")
        )
        image_size, patch_size = (_side(fields, name) for name in ("image_size", "patch_size"))
        if hidden_size % num_heads or image_size % patch_size:
            raise CheckpointError(
                f"config.json: the vision_config has num_attention_heads {num_heads}, which must"
                f" divide its hidden_size {hidden_size}, and patch_size {patch_size}, which must"
                f" divide its image_size {image_size}"
            )
        merge_size = round(min(1 / ratio, image_size)) if ratio > 0 else 0
        if merge_size * ratio != 1.0 or image_size // patch_size % merge_size:
            raise CheckpointError(
                f"config.json: downsample_ratio is {ratio}, but must be 1 / n for a whole n that"
                f" divides {image_size // patch_size}, the number of patches of a side"
            )
        # Last, read the others.
        kinds = ("gelu", "gelu_pytorch_tanh", "gelu_new")
        norms = ("layer_norm", "rms_norm")
        config = cls(
            output_size=output_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            image_size=image_size,
            patch_size=patch_size,
            merge_size=merge_size,
            activation=HF_ACTIVATIONS[fields.choice("hidden_act", "gelu", kinds)],
            norm_eps=fields.number("layer_norm_eps", 1e-6),
            has_rms_norms=fields.choice("norm_type", "layer_norm", norms) == "rms_norm",
            has_qk_norms=fields.flag("use_qk_norm", False),
            has_qkv_bias=fields.flag("attention_bias", False),
            has_last_norm=not fields.flag("use_mean_pooling", True),
        )
        return replace(config, left_out=fields.finish())


def _side(fields: ConfigFields, name: str) -> int:
    """A side of a square, in pixels, which configs have once or twice. Raises CheckpointError."""
    value = fields.value(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return checked_integer(f"config.json: {name} of the vision_config", name, value)


class _InternVLEmbeddings(nn.Module):
    """The embeddings of the class token and of patches, plus those of their positions."""

    def __init__(self, config: InternVLConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        num_patches = (config.image_size // config.patch_size) ** 2
        self.cls_token = empty_parameter((1, 1, config.hidden_size), **storage)
        kernel = (NUM_CHANNELS, config.patch_size, config.patch_size)
        projection = PatchProjection("projection", kernel, config.hidden_size, bias=True, **storage)
        self.patch_embeddings = nn.ModuleDict({"projection": projection})
        self.position_embeddings = empty_parameter(
            (1, 1 + num_patches, config.hidden_size), **storage
        )

    def encode(self, patches: torch.Tensor) -> Slices[torch.Tensor]:
        """patches [P, elements of a patch] of any dtype -> [1 + P, H]."""
        first, places = self.position_embeddings[0, :1], self.position_embeddings[0, 1:]

        def embed(piece: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            projected: torch.Tensor = self.patch_embeddings["projection"](piece.to(positions.dtype))
            return projected + positions

        hidden = yield from in_pieces(embed, patches, places)
        return torch.cat((self.cls_token[0] + first, hidden))


class _InternVLAttention(nn.Module):
    """The projections of attention, and the norms of q and k."""

    def __init__(self, config: InternVLConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.has_qkv_bias
        self.qkv_proj = Linear(size, (size,) * 3, LinearKind.REPLICATED, bias=bias, **storage)
        self.projection_layer = Linear(size, (size,), LinearKind.REPLICATED, bias=True, **storage)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_qk_norms:
            self.q_norm, self.k_norm = (RMSNorm(size, _QK_EPS, **storage) for _ in range(2))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, H] -> q, k and v, side by side [R, 3H]."""
        qkv: torch.Tensor = self.qkv_proj(x)
        if self.q_norm is None or self.k_norm is None:
            return qkv
        q, k, v = (each.contiguous() for each in qkv.chunk(3, dim=1))
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)


class _InternVLLayer(EncoderLayer):
    """Attention and MLP, each with a norm before it, scaled, and added to its input."""

    def __init__(self, config: InternVLConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config.hidden_size, config.num_heads)
        size = config.hidden_size
        norm = RMSNorm if config.has_rms_norms else LayerNorm
        self.layernorm_before, self.layernorm_after = (
            norm(size, config.norm_eps, **storage) for _ in range(2)
        )
        self.attention = _InternVLAttention(config, **storage)
        self.mlp = FeedForward(
            size, config.intermediate_size, activation=config.activation, **storage
        )
        self.lambda_1, self.lambda_2 = (empty_parameter((size,), **storage) for _ in range(2))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention.project(self.layernorm_before(hidden))

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        operators = self.operators
        mixed = operators.scale_columns(self.attention.projection_layer(attended), self.lambda_1)
        hidden = operators.add(mixed, hidden)
        inner = operators.scale_columns(self.mlp(self.layernorm_after(hidden)), self.lambda_2)
        return operators.add(inner, hidden)


class _InternVLEncoder(nn.Module):
    """The tower without its connector."""

    def __init__(self, config: InternVLConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.embeddings = _InternVLEmbeddings(config, **storage)
        layers = (_InternVLLayer(config, **storage) for _ in range(config.num_layers))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.layernorm: LayerNorm | None = None
        if config.has_last_norm:
            self.layernorm = LayerNorm(config.hidden_size, config.norm_eps, **storage)

    def encode(self, values: torch.Tensor) -> Slices[torch.Tensor]:
        """values [3, height, width] -> [P, H], without the class token."""
        hidden = yield from self.embeddings.encode(to_patches(values, self.patch_size))
        for layer in self.encoder["layer"].children():
            assert isinstance(layer, _InternVLLayer)
            hidden = yield from layer.encode(hidden)
        patches = hidden[1:]
        if self.layernorm is None:
            return patches
        return (yield from in_pieces(self.layernorm, patches))


class InternVLTower(VisionTower):
    """The encoder and the connector."""

    def __init__(self, config: InternVLConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self._config = config
        self._side = config.image_size // config.patch_size
        self.max_content_tokens = (self._side // config.merge_size) ** 2
        self.vision_tower = _InternVLEncoder(config, **storage)
        square, size = config.hidden_size * config.merge_size**2, config.output_size
        self.multi_modal_projector = SquareConnector((square, size, size), **storage)

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        expected = (NUM_CHANNELS, self._config.image_size, self._config.image_size)
        if tuple(shape) != expected or grid != IMAGE_GRID:
            raise InvalidRequestError(
                f"a tile's array has the shape {list(shape)} and the grid {list(grid)}, but must be"
                f" {list(expected)} without a grid",
                "prompt",
            )
        return self.max_content_tokens

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        side = self._config.image_size
        return (NUM_CHANNELS, side, side), IMAGE_GRID

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        hidden = yield from self.vision_tower.encode(values)
        squares = stack_squares(hidden, self._side, self._config.merge_size)
        connector = self.multi_modal_projector
        return (yield from in_pieces(connector, squares, num_rows=WIDE_PIECE_ROWS))
