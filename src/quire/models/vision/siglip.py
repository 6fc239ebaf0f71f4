"""SigLIP's image encoder: a transformer with learned positions and pre-norms.

Source: arXiv:2303.15343. It is the tower of Idefics 3, SmolVLM and
Gemma 3, and the base of LFM2-VL's. Unlike BERT, norms come
before attention and MLP, and one more norm follows the last layer.

Shapes: P patches of an image, C elements of a patch, H hidden size of the tower.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, Unpack

import torch
from torch import nn

from quire.errors import CheckpointError, InvalidRequestError
from quire.kernels.activations import HF_ACTIVATIONS, ActivationFunction
from quire.layers.embedding import VocabEmbedding
from quire.layers.encoder import FeedForward
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import LayerNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage
from quire.models.config_fields import ConfigFields
from quire.models.vision.patches import IMAGE_GRID, NUM_CHANNELS, PatchProjection, to_patches
from quire.models.vision.slices import EncoderLayer, in_pieces
from quire.models.vision.vision_tower import Grid, Slices

OTHER_NAMES = {"fc1": "up_proj", "fc2": "down_proj"}
"""Words of names in the checkpoint, and the words that replace them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig:
    """The `vision_config` of an encoder of this form."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    #: Height and width of an image of the largest size, in pixels.
    image_size: int
    #: Height and width of a patch, in pixels.
    patch_size: int
    layer_norm_eps: float
    activation: ActivationFunction

    @classmethod
    def read(cls, fields: ConfigFields, defaults: Mapping[str, int]) -> Self:
        """Read the fields of a vision_config. `defaults` has values for fields that are missing."""
        fields.plain("num_channels", NUM_CHANNELS)
        hidden_size, num_heads = (
            fields.integer(name, defaults[name]) for name in ("hidden_size", "num_attention_heads")
        )
        image_size, patch_size = (
            fields.integer(name, defaults[name]) for name in ("image_size", "patch_size")
        )
        for name, size, whole in (
            ("num_attention_heads", num_heads, hidden_size),
            ("patch_size", patch_size, image_size),
        ):
            if size > whole or (name == "num_attention_heads" and whole % size):
                raise CheckpointError(
                    f"config.json: {name} of the vision_config is {size}, which does not fit the"
                    f" size {whole} that it splits"
                )
        activation = fields.choice(
            "hidden_act", "gelu_pytorch_tanh", ("gelu", "gelu_pytorch_tanh", "gelu_new")
        )
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", defaults["intermediate_size"]),
            num_layers=fields.integer("num_hidden_layers", defaults["num_hidden_layers"]),
            num_heads=num_heads,
            image_size=image_size,
            patch_size=patch_size,
            layer_norm_eps=fields.number("layer_norm_eps", 1e-6),
            activation=HF_ACTIVATIONS[activation],
        )

    @property
    def num_patches_per_side(self) -> int:
        """Number of rows of patches of the largest image, which has as many columns."""
        return self.image_size // self.patch_size

    def count_patches(self, shape: tuple[int, ...], grid: Grid) -> tuple[int, int]:
        """Rows and columns of the patches of an image of this shape.

        Raises InvalidRequestError for a shape that the encoder can't read.
        """
        size, most = self.patch_size, self.num_patches_per_side * self.patch_size
        is_image = len(shape) == 3 and shape[0] == NUM_CHANNELS and grid == IMAGE_GRID
        if not is_image or any(side % size or not size <= side <= most for side in shape[1:]):
            raise InvalidRequestError(
                f"an image's array has the shape {list(shape)} and the grid {list(grid)}, but must"
                f" be [{NUM_CHANNELS}, height, width] in multiples of {size} up to {most}, without"
                " a grid",
                "prompt",
            )
        return shape[1] // size, shape[2] // size


class SiglipEmbeddings(OperatorModule):
    """The embeddings of patches, plus those of their positions."""

    def __init__(self, config: SiglipConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        size, side = config.patch_size, config.num_patches_per_side
        self.patch_embedding = PatchProjection(
            "patch_embedding", (NUM_CHANNELS, size, size), config.hidden_size, bias=True, **storage
        )
        self.position_embedding = VocabEmbedding(side * side, config.hidden_size, **storage)

    def encode(self, patches: torch.Tensor, position_ids: torch.Tensor) -> Slices[torch.Tensor]:
        """patches [P, C] of any dtype, position_ids [P] int64 -> [P, H]."""

        def embed(piece: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            positions = self.position_embedding(places)
            return self.operators.add(self.patch_embedding(piece.to(positions.dtype)), positions)

        return (yield from in_pieces(embed, patches, position_ids))


class SiglipLayer(EncoderLayer):
    """Attention and MLP, each with a norm before it and added to its input."""

    def __init__(self, config: SiglipConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config.hidden_size, config.num_heads)
        self.layer_norm1, self.layer_norm2 = (
            LayerNorm(config.hidden_size, config.layer_norm_eps, **storage) for _ in range(2)
        )
        size = config.hidden_size
        projections = {"qkv_proj": (size,) * 3, "out_proj": (size,)}
        self.self_attn = nn.ModuleDict(
            {
                name: Linear(size, parts, LinearKind.REPLICATED, bias=True, **storage)
                for name, parts in projections.items()
            }
        )
        self.mlp = FeedForward(
            config.hidden_size, config.intermediate_size, activation=config.activation, **storage
        )

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.self_attn["qkv_proj"](self.layer_norm1(hidden))
        return projected

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self.operators.add(self.self_attn["out_proj"](attended), hidden)
        inner: torch.Tensor = self.mlp(self.layer_norm2(hidden))
        return self.operators.add(inner, hidden)


class SiglipStack(nn.Module):
    """The layers and the last norm."""

    def __init__(self, config: SiglipConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        layers = (SiglipLayer(config, **storage) for _ in range(config.num_layers))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, **storage)

    def encode_layers(self, hidden: torch.Tensor) -> Slices[torch.Tensor]:
        """hidden [P, H] -> [P, H] after the last norm."""
        for layer in self.encoder["layers"].children():
            assert isinstance(layer, SiglipLayer)
            hidden = yield from layer.encode(hidden)
        return (yield from in_pieces(self.post_layernorm, hidden))


class SiglipEncoder(SiglipStack):
    """The whole encoder, without a head that pools."""

    def __init__(self, config: SiglipConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self.patch_size = config.patch_size
        self.embeddings = SiglipEmbeddings(config, **storage)

    def encode(self, values: torch.Tensor, position_ids: torch.Tensor) -> Slices[torch.Tensor]:
        """values [3, height, width], position_ids [P] int64 -> [P, H] after the last norm."""
        patches = to_patches(values, self.patch_size)
        hidden = yield from self.embeddings.encode(patches, position_ids)
        return (yield from self.encode_layers(hidden))
