"""The tower of LFM2-VL: SigLIP 2 for images of any aspect, and a connector.

Source: SigLIP 2 (arXiv:2502.14786, section 2.4.2, "NaFlex") and LFM2 (arXiv:2511.23404, section 5).
The encoder's differences from SigLIP:

- it reads a list of patches, row by row, in a grid of any aspect;
- the learned positions belong to a square grid, which is resized to that of the patches.

The connector stacks a square of patches ("pixel unshuffle"), and projects it by two linears.

Shapes: P patches, E elements of a patch, H hidden size of the tower.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Self, Unpack

import torch
from torch.nn import functional

from quire.errors import CheckpointError, InvalidRequestError
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear, LinearKind
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage
from quire.models.config_fields import ConfigFields
from quire.models.vision.connectors import SquareConnector
from quire.models.vision.patches import NUM_CHANNELS, stack_squares
from quire.models.vision.siglip import OTHER_NAMES, SiglipConfig, SiglipStack
from quire.models.vision.slices import WIDE_PIECE_ROWS, in_pieces
from quire.models.vision.vision_tower import (
    Grid,
    Slices,
    VisionConfig,
    VisionTower,
    vision_config_of,
)

WORDS = {**OTHER_NAMES, "vision_model": ""}
"""Words of names in the checkpoint, and the words that replace them. Old files have one more."""
UNUSED = ("vision_tower.head.", "vision_tower.vision_model.head.")
"""Prefixes of the tensors of the head that pools, which is not read."""

MAX_TOKENS = 1024
"""Maximum number of embeddings of a content. The published processors make 256."""

# transformers' values for fields that a vision_config leaves out.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 256,
    "patch_size": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VlVisionConfig(VisionConfig):
    """The config of the encoder and the connector."""

    #: The encoder, whose image_size is that of the grid of learned positions.
    encoder: SiglipConfig
    #: Patches along each side of the square that becomes one embedding.
    factor: int
    #: Size between the two linears of the connector.
    inner_size: int
    #: Whether the connector begins with a norm.
    has_norm: bool
    #: Whether the connector's linears have biases.
    has_bias: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        connector, vision = ConfigFields(raw), vision_config_of(raw)
        connector.choice("projector_hidden_act", "gelu", ("gelu",))
        connector.plain("vision_feature_layer", -1)
        fields = connector.inner(vision)
        fields.value("vision_use_head")  # the head's result is not read
        num_positions, patch_size = (
            fields.integer(name, default)
            for name, default in (("num_patches", 256), ("patch_size", 16))
        )
        side = isqrt(num_positions)
        if side**2 != num_positions:
            raise CheckpointError(
                f"config.json: num_patches of the vision_config is {num_positions}, but must be a"
                " square"
            )
        config = cls(
            output_size=output_size,
            encoder=SiglipConfig.read(fields, {**_DEFAULTS, "image_size": side * patch_size}),
            factor=connector.integer("downsample_factor", 2),
            inner_size=connector.integer("projector_hidden_size", 2560),
            has_norm=connector.flag("projector_use_layernorm", True),
            has_bias=connector.flag("projector_bias", True),
        )
        return replace(config, left_out=fields.finish())


class _NaflexEmbeddings(OperatorModule):
    """The embeddings of patches, plus those of their positions."""

    def __init__(self, config: SiglipConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self._side = config.num_patches_per_side
        self.patch_embedding = Linear(
            NUM_CHANNELS * config.patch_size**2,
            (config.hidden_size,),
            LinearKind.REPLICATED,
            bias=True,
            **storage,
        )
        self.position_embedding = VocabEmbedding(self._side**2, config.hidden_size, **storage)

    def encode(self, patches: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        """patches [P, E] of any dtype -> [P, H]."""
        table = self.position_embedding.weight
        assert table is not None, "towers have no quantized tables"
        square = table.float().view(1, self._side, self._side, -1).permute(0, 3, 1, 2)
        # As in transformers, the resize is computed in fp32.
        resized = functional.interpolate(square, grid[1:], mode="bilinear", antialias=True)
        positions = resized[0].flatten(1).T.to(table.dtype).contiguous()
        yield

        def embed(piece: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return self.operators.add(self.patch_embedding(piece.to(places.dtype)), places)

        return (yield from in_pieces(embed, patches, positions))


class _NaflexEncoder(SiglipStack):
    """The whole encoder, without a head that pools."""

    def __init__(self, config: SiglipConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self.embeddings = _NaflexEmbeddings(config, **storage)

    def encode(self, patches: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        """patches [P, E] -> [P, H] after the last norm."""
        hidden = yield from self.embeddings.encode(patches, grid)
        return (yield from self.encode_layers(hidden))


class Lfm2VlTower(VisionTower):
    """The encoder and the connector."""

    def __init__(self, config: Lfm2VlVisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self._config = config
        self.max_content_tokens = MAX_TOKENS
        self.vision_tower = _NaflexEncoder(config.encoder, **storage)
        square = config.encoder.hidden_size * config.factor**2
        self.multi_modal_projector = SquareConnector(
            (square, config.inner_size, config.output_size),
            has_norm=config.has_norm,
            has_bias=config.has_bias,
            **storage,
        )

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        (frames, rows, columns), factor = grid, self._config.factor
        width = NUM_CHANNELS * self._config.encoder.patch_size**2
        count = rows // factor * (columns // factor)
        is_whole = all(side > 0 and side % factor == 0 for side in (rows, columns))
        is_image = frames == 1 and tuple(shape) == (rows * columns, width)
        if not is_image or not is_whole or count > MAX_TOKENS:
            raise InvalidRequestError(
                f"an image's array has the shape {list(shape)} and the grid {list(grid)}, but must"
                f" have a row of {width} numbers for each patch of a grid of 1 frame and multiples"
                f" of {factor} rows and columns, at most {MAX_TOKENS * factor**2} patches",
                "prompt",
            )
        return count

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        side = self.most_square_side(max_tokens) * self._config.factor
        width = NUM_CHANNELS * self._config.encoder.patch_size**2
        return (side * side, width), (1, side, side)

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        hidden = yield from self.vision_tower.encode(values, grid)
        squares = stack_squares(hidden, grid[2], self._config.factor)
        connector = self.multi_modal_projector
        return (yield from in_pieces(connector, squares, num_rows=WIDE_PIECE_ROWS))
