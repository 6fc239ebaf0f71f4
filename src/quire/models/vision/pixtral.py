"""Pixtral: the tower of Mistral 3 and of Pixtral, for images of any size and aspect.

Source: arXiv:2410.07073, section 2. Its differences from SigLIP:

- q and k are rotated by the row and the column of their patch, and no positions are learned;
- norms are RMSNorms, and MLPs are gated, without biases;
- the embeddings of a row of patches are followed by the token [IMG_BREAK], those of the last row by
  [IMG_END]. Here, both are part of the content, and have the text embeddings of these tokens.

In Mistral 3, each square of patches is merged to one before the connector.

Shapes: P patches, R rows and C columns of embeddings, D head size, H hidden size of the tower.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, Unpack

import torch
from torch import nn

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError, shown
from quire.kernels.activations import HF_ACTIVATIONS, ActivationFunction
from quire.kernels.rotary import rotary
from quire.layers.linear import Linear, LinearKind
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage
from quire.models.config_fields import ConfigFields
from quire.models.rope_config import read_rope_parameters
from quire.models.vision.patches import IMAGE_GRID, NUM_CHANNELS, PatchProjection, to_patches
from quire.models.vision.slices import WIDE_PIECE_ROWS, EncoderLayer, in_pieces
from quire.models.vision.vision_tower import Grid, Slices, VisionConfig, VisionTower

_EPS = 1e-5
"""The eps of the tower's norms, which is not in configs."""
_IMAGE, _BREAK, _END = 10, 12, 13
"""The ids of [IMG], [IMG_BREAK] and [IMG_END], which are equal in all of Mistral's tokenizers."""
_MERGING = "Mistral3ForConditionalGeneration"
"""The architecture whose connector merges patches. The other one is LLaVA's."""
# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig(VisionConfig):
    """The config of the tower, and of the connector of Mistral 3 or of LLaVA."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    #: The number of layers before the hidden states that the connector reads. The others are not
    #: computed.
    num_used_layers: int
    num_heads: int
    #: Pixels of a side of a patch.
    patch_size: int
    #: Patches of a side of the square that becomes one embedding.
    merge_size: int
    #: Maximum number of embeddings in a row or column of an image.
    max_side: int
    rope_theta: float
    activation: ActivationFunction
    #: Whether the connector begins with a norm and merges patches, as in Mistral 3.
    merges: bool
    #: The eps of the connector's norm.
    connector_eps: float
    connector_bias: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        vision, text = raw.get("vision_config") or {}, raw.get("text_config") or {}
        merges = raw.get("architectures") == [_MERGING]
        # First, read the connector's fields.
        connector = ConfigFields(raw)
        image = connector.integer("image_token_index", connector.integer("image_token_id", _IMAGE))
        if image != _IMAGE:
            raise UnsupportedModelError(
                f"config.json: image_token_index is {image}, but {_IMAGE} is the only id of [IMG]"
                " that is understood"
            )
        connector.choice("projector_hidden_act", "gelu", ("gelu",))
        if not merges and connector.value("vision_feature_select_strategy") != "full":
            raise UnsupportedModelError(
                "config.json: vision_feature_select_strategy must be 'full' for a Pixtral tower,"
                " which has no token of its own"
            )
        merge_size = connector.integer("spatial_merge_size", 2) if merges else 1
        # Then, read the tower's.
        fields = connector.inner({**_DEFAULTS, **vision})
        fields.plain("num_channels", NUM_CHANNELS)
        hidden_size, num_heads = (
            fields.integer("hidden_size"),
            fields.integer("num_attention_heads"),
        )
        head_dim = fields.integer("head_dim", hidden_size // num_heads)
        if head_dim * num_heads != hidden_size or head_dim % 4:
            raise CheckpointError(
                f"config.json: head_dim of the vision_config is {head_dim}, but must be a multiple"
                f" of 4, and {num_heads} heads must have {hidden_size} elements together"
            )
        num_layers = fields.integer("num_hidden_layers")
        patch_size = fields.integer("patch_size", 14 if merges else 16)
        image_size = fields.integer("image_size", 1540 if merges else 1024)
        rope = read_rope_parameters(fields)
        activation = fields.choice("hidden_act", "gelu", ("gelu", "silu"))
        return cls(
            output_size=output_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_used_layers=_layers_read(
                connector.value("vision_feature_layer"),
                default=-1 if merges else -2,
                num_layers=num_layers,
            ),
            num_heads=num_heads,
            patch_size=patch_size,
            merge_size=merge_size,
            max_side=image_size // (patch_size * merge_size),
            rope_theta=rope.get("rope_theta", fields.number("rope_theta", 10000.0)),
            activation=HF_ACTIVATIONS[activation],
            merges=merges,
            connector_eps=ConfigFields(text).number("rms_norm_eps", 1e-6),
            connector_bias=connector.flag("multimodal_projector_bias", not merges),
            left_out=fields.finish(),
        )


def _layers_read(index: Any, *, default: int, num_layers: int) -> int:
    """The number of layers before the hidden states that the connector reads.

    `index` is vision_feature_layer: 0 means the input of the first layer, -1 the last layer's
    output.
    """
    index = default if index is None else index
    if type(index) is not int or not -num_layers - 1 <= index <= num_layers:
        raise UnsupportedModelError(
            f"config.json: vision_feature_layer is {shown(index)}, but must be one number of a"
            f" layer, from {-num_layers - 1} to {num_layers}"
        )
    return index if index >= 0 else num_layers + 1 + index


class _PixtralLayer(EncoderLayer):
    """Attention and a gated MLP. Each reads the normed residual stream and adds to the stream."""

    def __init__(self, config: PixtralConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config.hidden_size, config.num_heads)
        self.attention_norm, self.ffn_norm = (
            RMSNorm(config.hidden_size, _EPS, **storage) for _ in range(2)
        )
        size = config.hidden_size
        projections = {"qkv_proj": (size,) * 3, "o_proj": (size,)}
        self.attention = nn.ModuleDict(
            {
                name: Linear(size, parts, LinearKind.REPLICATED, bias=False, **storage)
                for name, parts in projections.items()
            }
        )
        self.feed_forward = MLP(
            config.hidden_size,
            config.intermediate_size,
            bias=False,
            activation=config.activation,
            **storage,
        )

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.attention["qkv_proj"](self.attention_norm(hidden))
        return projected

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self.operators.add(self.attention["o_proj"](attended), hidden)
        inner: torch.Tensor = self.feed_forward(self.ffn_norm(hidden))
        return self.operators.add(inner, hidden)


class _PixtralEncoder(nn.Module):
    """The tower without its connector."""

    def __init__(self, config: PixtralConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        kernel = (NUM_CHANNELS, config.patch_size, config.patch_size)
        self.patch_conv = PatchProjection(
            "patch_conv", kernel, config.hidden_size, bias=False, **storage
        )
        self.ln_pre = RMSNorm(config.hidden_size, _EPS, **storage)
        layers = (_PixtralLayer(config, **storage) for _ in range(config.num_layers))
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(layers)})


class _Connector(OperatorModule):
    """Turns merged patches into embeddings of the language model."""

    def __init__(self, config: PixtralConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        size, out = config.hidden_size, config.output_size
        self.merge_size = config.merge_size
        self.norm: RMSNorm | None = None
        #: A linear over each square of patches.
        self.patch_merger: nn.ModuleDict | None = None
        if config.merges:
            self.norm = RMSNorm(size, config.connector_eps, **storage)
            merging = Linear(
                size * config.merge_size**2, (size,), LinearKind.REPLICATED, bias=False, **storage
            )
            self.patch_merger = nn.ModuleDict({"merging_layer": merging})
        self.linear_1, self.linear_2 = (
            Linear(inputs, (out,), LinearKind.REPLICATED, bias=config.connector_bias, **storage)
            for inputs in (size, out)
        )

    def encode(self, x: torch.Tensor) -> Slices[torch.Tensor]:
        """x [rows, columns, H] of patches -> [R * C, output size]."""
        merged = x.flatten(0, 1)
        if self.norm is not None and self.patch_merger is not None:
            (rows, columns, _), size = x.shape, self.merge_size
            normed = (yield from in_pieces(self.norm, merged)).view(
                rows // size, size, columns // size, size, -1
            )
            # The elements of a square are ordered as in torch's `unfold`: all patches of the first
            # element, then those of the second.
            squares = normed.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
            merged = yield from in_pieces(self.patch_merger["merging_layer"], squares)
        return (yield from in_pieces(self._project, merged, num_rows=WIDE_PIECE_ROWS))

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.operators.activate(self.linear_1(x), ActivationFunction.GELU)
        projected: torch.Tensor = self.linear_2(inner)
        return projected


class PixtralTower(VisionTower):
    """The tower with its connector."""

    def __init__(self, config: PixtralConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self._config = config
        #: Embeddings [2, H] of [IMG_BREAK] and [IMG_END]; None before `use_embedding`.
        self._marks: torch.Tensor | None = None
        self._dtype = storage["dtype"]
        self.max_content_tokens = config.max_side * (config.max_side + 1)
        self.vision_tower = _PixtralEncoder(config, **storage)
        self.multi_modal_projector = _Connector(config, **storage)

    def use_embedding(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._marks = embed(torch.tensor([_BREAK, _END])).detach().clone()

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        config = self._config
        unit = config.patch_size * config.merge_size
        most = config.max_side * unit
        is_image = len(shape) == 3 and shape[0] == NUM_CHANNELS
        if not is_image or any(size % unit or not unit <= size <= most for size in shape[1:]):
            raise InvalidRequestError(
                f"an image's array has the shape {list(shape)}, but must be [{NUM_CHANNELS},"
                f" height, width] in multiples of {unit} up to {most}",
                "prompt",
            )
        rows, columns = (size // config.patch_size for size in shape[1:])
        if grid not in (IMAGE_GRID, (1, rows, columns)):
            raise InvalidRequestError(
                f"an image's grid is {list(grid)}, but its array has {rows} rows and {columns}"
                " columns of patches",
                "prompt",
            )
        return shape[1] // unit * (shape[2] // unit + 1)

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        config = self._config
        side = min(self.most_square_side(max_tokens), config.max_side)
        side *= config.patch_size * config.merge_size
        return (NUM_CHANNELS, side, side), IMAGE_GRID

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        encoder, size = self.vision_tower, self._config.patch_size
        rows, columns = values.shape[1] // size, values.shape[2] // size
        patches = to_patches(values, size).to(self._dtype)
        x = yield from in_pieces(lambda piece: encoder.ln_pre(encoder.patch_conv(piece)), patches)
        cos, sin = self._angles(rows, columns, x.device)
        layers = list(encoder.transformer["layers"].children())
        for layer in layers[: self._config.num_used_layers]:
            assert isinstance(layer, _PixtralLayer)
            x = yield from layer.encode(x, lambda q, k: rotary(q, k, cos, sin))
        embeds = yield from self.multi_modal_projector.encode(x.view(rows, columns, -1))
        return self._with_breaks(embeds, rows // self._config.merge_size)

    def _with_breaks(self, embeds: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Append the embedding of [IMG_BREAK] to each row of patches, and [IMG_END] to the last."""
        assert self._marks is not None, "use_embedding comes before the first content"
        breaks = self._marks[[0] * (num_rows - 1) + [1]].to(embeds.dtype)
        rows = embeds.view(num_rows, -1, embeds.shape[1])
        return torch.cat((rows, breaks.unsqueeze(1)), dim=1).flatten(0, 1)

    def _angles(
        self, rows: int, columns: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [P, D] of rows and columns of patches.

        The even frequencies of a head turn by the row, the odd ones by the column.
        """
        head_dim = self._config.hidden_size // self._config.num_heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / torch.pow(self._config.rope_theta, exponents)
        by_row = torch.outer(torch.arange(rows, dtype=torch.float32), frequencies[0::2])
        by_column = torch.outer(torch.arange(columns, dtype=torch.float32), frequencies[1::2])
        angles = torch.cat(
            (by_row.repeat_interleave(columns, 0), by_column.repeat(rows, 1)), dim=1
        ).to(device)
        angles = torch.cat((angles, angles), dim=1)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)
