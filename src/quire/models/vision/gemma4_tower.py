"""The tower of Gemma 4, which reads images of any shape.

Source: the model cards of Gemma 4, and transformers' class of the same name. Its differences from
SigLIP:

- a patch has a learned vector for its column and another for its row, and both also rotate q and k,
  one half of a head each;
- norms come before and after attention and MLP, and multiply by their weight; heads of q, k and v
  are normalised, and scores are not scaled;
- the MLP is gated, and linears may clip what they read and what they return.

The connector takes the mean of each square of patches, norms it and projects it.

Shapes: P patches of an image, T embeddings of an image, R rows of a piece, N heads, D head size. H
is the hidden size of the tower, O that of the language model. S patches are a side of a square.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import nn
from torch.nn import functional

from quire.errors import CheckpointError, InvalidRequestError, shown
from quire.formats.weight_format import empty_parameter
from quire.kernels.activations import HF_ACTIVATIONS, ActivationFunction
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage
from quire.models.config_fields import ConfigFields
from quire.models.vision.patches import IMAGE_GRID, NUM_CHANNELS
from quire.models.vision.slices import WIDE_PIECE_ROWS, AttendingModule, in_pieces
from quire.models.vision.vision_tower import (
    Grid,
    Slices,
    VisionConfig,
    VisionTower,
    vision_config_of,
)

# transformers' values for fields that a vision_config leaves out.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
}
_THETA = 100.0
_MOST_TOKENS = 1120
"""The largest number of an image's tokens that image processors allow."""
_IGNORED = (
    "default_output_length",
    "global_head_dim",
    "layer_types",
    "max_position_embeddings",
)
"""Fields of published configs that transformers' encoder does not use."""
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """The config of the encoder and the connector."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Height and width of a patch, in pixels.
    patch_size: int
    #: Patches along each side of the square that becomes one embedding.
    pool_size: int
    #: Maximum number of rows, and of columns, of patches.
    max_side: int
    rope_theta: float
    norm_eps: float
    activation: ActivationFunction
    #: Whether linears have bounds for what they read and return.
    clips: bool
    #: Whether a learned vector is subtracted from the means of squares, and another multiplies
    #: them.
    standardizes: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        # First, read the fields that may have one value only.
        outer, inner = ConfigFields(raw), vision_config_of(raw)
        fields = outer.inner({**_DEFAULTS, **inner})
        fields.plain("attention_bias", False)
        for name in _IGNORED:
            fields.value(name)
        rope = fields.value("rope_parameters") or {}
        theta = rope.get("rope_theta", _THETA)
        # Older files name the default type, which transformers takes for this one.
        is_axial = rope.get("rope_type", "axial") in ("axial", "default")
        if not is_axial or not isinstance(theta, int | float):
            raise CheckpointError(
                f"config.json: rope_parameters of the vision_config is {shown(rope)}, but must have"
                " the rope_type 'axial' and a number as rope_theta"
            )
        # Then read the sizes.
        num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads or head_dim % 4:
            raise CheckpointError(
                f"config.json: the vision_config has num_key_value_heads {num_kv_heads}, which must"
                f" divide its num_attention_heads {num_heads}, and head_dim {head_dim}, which must"
                " be a multiple of 4"
            )
        kinds = ("gelu_pytorch_tanh", "gelu", "silu")
        config = cls(
            output_size=output_size,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            patch_size=fields.integer("patch_size"),
            pool_size=fields.integer("pooling_kernel_size"),
            max_side=fields.integer("position_embedding_size"),
            rope_theta=float(theta),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            activation=HF_ACTIVATIONS[fields.choice("hidden_activation", kinds[0], kinds)],
            clips=fields.flag("use_clipped_linears", False),
            standardizes=fields.flag("standardize", False),
        )
        return replace(config, left_out=fields.finish())


class _ClippedLinear(nn.Module):
    """A linear, with bounds for its inputs and outputs if the config says so."""

    def __init__(
        self,
        config: Gemma4VisionConfig,
        num_inputs: int,
        num_outputs: int,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        self.clips = config.clips
        self.linear = Linear(
            num_inputs, (num_outputs,), LinearKind.REPLICATED, bias=False, **storage
        )
        for name in _BOUNDS if config.clips else ():
            self.register_parameter(name, empty_parameter((), **storage))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, inputs] -> [R, outputs]."""
        if not self.clips:
            plain: torch.Tensor = self.linear(x)
            return plain
        least, most, least_out, most_out = (self.get_parameter(name) for name in _BOUNDS)
        unbounded: torch.Tensor = self.linear(x.clamp(least, most))
        return unbounded.clamp(least_out, most_out)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] -> [..., D], an RMSNorm without weights."""
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class _Gemma4Attention(AttendingModule):
    """Attention of all patches to all patches of the image."""

    def __init__(self, config: Gemma4VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.config = config
        size, head_dim = config.hidden_size, config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            _ClippedLinear(config, size, count * head_dim, **storage)
            for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        self.o_proj = _ClippedLinear(config, config.num_heads * head_dim, size, **storage)
        self.q_norm, self.k_norm = (RMSNorm(head_dim, config.norm_eps, **storage) for _ in range(2))

    def project(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x [R, H], angles [R, 2, D / 4] of columns and rows -> q, k and v, heads side by side."""
        q, k, v = (
            each(x).view(len(x), -1, self.config.head_dim)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        turned = (_turn(norm(each), angles) for norm, each in ((self.q_norm, q), (self.k_norm, k)))
        parts = (*turned, _normed(v, self.config.norm_eps))
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def mix(self, qkv: torch.Tensor) -> Slices[torch.Tensor]:
        """qkv [P, heads side by side] -> the mixed values [P, N * D]."""
        config = self.config
        counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(qkv.view(len(qkv), -1, config.head_dim), counts, dim=1)
        group_size = config.num_heads // config.num_kv_heads
        k, v = (each.repeat_interleave(group_size, dim=1) for each in (k, v))
        mixed = yield from self.attend(q, k, v, 1.0)
        return mixed.flatten(1)


def _turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [R, N, D] by angles [R, 2, D / 4]: one half by columns, the other by rows."""
    cos, sin = (each.to(x.dtype)[:, None] for each in (angles.cos(), angles.sin()))
    first, second = torch.unflatten(x, -1, (2, 2, -1)).unbind(-2)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    return turned.flatten(-3)


class _Gemma4MLP(OperatorModule):
    """The gated MLP, whose linears may clip, so that they can't be fused."""

    def __init__(self, config: Gemma4VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.activation = config.activation
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (
            _ClippedLinear(config, size, inner, **storage) for _ in range(2)
        )
        self.down_proj = _ClippedLinear(config, inner, size, **storage)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, H] -> [R, H]."""
        gate = self.operators.activate(self.gate_proj(x), self.activation)
        found: torch.Tensor = self.down_proj(gate * self.up_proj(x))
        return found


class _Gemma4VisionLayer(nn.Module):
    """Attention and MLP, each between two norms and added to its input."""

    def __init__(self, config: Gemma4VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.self_attn = _Gemma4Attention(config, **storage)
        self.mlp = _Gemma4MLP(config, **storage)
        (
            self.input_layernorm,
            self.post_attention_layernorm,
            self.pre_feedforward_layernorm,
            self.post_feedforward_layernorm,
        ) = (RMSNorm(config.hidden_size, config.norm_eps, **storage) for _ in range(4))

    def encode(self, x: torch.Tensor, angles: torch.Tensor) -> Slices[torch.Tensor]:
        """x [P, H], angles [P, 2, D / 4] -> [P, H]."""
        qkv = yield from in_pieces(
            lambda rows, turns: self.self_attn.project(self.input_layernorm(rows), turns), x, angles
        )
        mixed = yield from self.self_attn.mix(qkv)
        return (yield from in_pieces(self._finish, x, mixed))

    def _finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer after its attention: x [R, H], mixed [R, N * D] -> [R, H]."""
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(mixed))
        inner: torch.Tensor = self.mlp(self.pre_feedforward_layernorm(x))
        normed: torch.Tensor = self.post_feedforward_layernorm(inner)
        return x + normed


class _Gemma4Patches(nn.Module):
    """The embeddings of patches, and those of their columns and rows."""

    def __init__(self, config: Gemma4VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_proj = Linear(
            NUM_CHANNELS * config.patch_size**2,
            (size,),
            LinearKind.REPLICATED,
            bias=False,
            **storage,
        )
        #: Vectors of columns, then of rows.
        self.position_embedding_table = empty_parameter((2, config.max_side, size), **storage)

    def embed(self, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """patches [R, elements of a patch] fp32 from 0 to 1, places [R, 2] of columns and rows ->
        [R, H]."""
        table = self.position_embedding_table
        positions = table[0, places[:, 0]] + table[1, places[:, 1]]
        projected: torch.Tensor = self.input_proj((2 * (patches - 0.5)).to(table.dtype))
        return projected + positions


class _Gemma4Encoder(nn.Module):
    """The tower without its connector."""

    def __init__(self, config: Gemma4VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.patch_embedder = _Gemma4Patches(config, **storage)
        layers = (_Gemma4VisionLayer(config, **storage) for _ in range(config.num_layers))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.std_bias: nn.Parameter | None = None
        self.std_scale: nn.Parameter | None = None
        if config.standardizes:
            self.std_bias, self.std_scale = (
                empty_parameter((config.hidden_size,), **storage) for _ in range(2)
            )


class Gemma4Tower(VisionTower):
    """The encoder and the connector."""

    def __init__(self, config: Gemma4VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self.config = config
        self.max_content_tokens = _MOST_TOKENS
        self.vision_tower = _Gemma4Encoder(config, **storage)
        sizes = config.hidden_size, (config.output_size,)
        projection = Linear(*sizes, LinearKind.REPLICATED, bias=False, **storage)
        self.embed_vision = nn.ModuleDict({"embedding_projection": projection})

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        config = self.config
        unit = config.patch_size * config.pool_size
        most = config.max_side // config.pool_size * unit
        is_image = len(shape) == 3 and shape[0] == NUM_CHANNELS and grid == IMAGE_GRID
        is_cut = is_image and all(not side % unit and unit <= side <= most for side in shape[1:])
        if not is_cut or shape[1] * shape[2] > self.max_content_tokens * unit**2:
            raise InvalidRequestError(
                f"an image's array has the shape {list(shape)} and the grid {list(grid)}, but must"
                f" be [{NUM_CHANNELS}, height, width] in multiples of {unit} up to {most}, with at"
                f" most {self.max_content_tokens} squares of this size, and without a grid",
                "prompt",
            )
        return shape[1] * shape[2] // unit**2

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        config = self.config
        most = config.max_side // config.pool_size
        side = min(self.most_square_side(max_tokens), most) * config.patch_size * config.pool_size
        return (NUM_CHANNELS, side, side), IMAGE_GRID

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        config, size, tower = self.config, self.config.patch_size, self.vision_tower
        # First, cut the image into patches, whose elements are ordered by pixel and channel.
        rows, columns = values.shape[1] // size, values.shape[2] // size
        cut = values.view(NUM_CHANNELS, rows, size, columns, size).permute(1, 3, 2, 4, 0)
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places = torch.stack((x.flatten(), y.flatten()), dim=1)
        exponents = torch.arange(0, config.head_dim // 2, 2) / (config.head_dim // 2)
        angles = (places[..., None] / config.rope_theta**exponents).to(values.device)
        places = places.to(values.device)
        # Then encode them.
        hidden = yield from in_pieces(
            tower.patch_embedder.embed, cut.reshape(rows * columns, -1), places
        )
        for layer in tower.encoder["layers"].children():
            assert isinstance(layer, _Gemma4VisionLayer)
            hidden = yield from layer.encode(hidden, angles)
        # Last, take the means of squares, and project them.
        side = config.pool_size
        squares = hidden.view(rows // side, side, columns // side, side, -1).transpose(1, 2)
        squares = squares.reshape(-1, side * side, config.hidden_size)
        return (yield from in_pieces(self._connect, squares, num_rows=WIDE_PIECE_ROWS))

    def _connect(self, squares: torch.Tensor) -> torch.Tensor:
        """squares [R, S * S, H] -> [R, O]."""
        tower, dtype = self.vision_tower, squares.dtype
        means = squares.float().mean(1).to(dtype).float() * self.config.hidden_size**0.5
        if tower.std_bias is not None and tower.std_scale is not None:
            means = (means - tower.std_bias.float()) * tower.std_scale.float()
        normed = _normed(means.to(dtype), self.config.norm_eps)
        projected: torch.Tensor = self.embed_vision["embedding_projection"](normed)
        return projected
