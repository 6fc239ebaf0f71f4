"""The tower of Gemma 3: SigLIP, and a projector that averages neighbouring patches.

Source: arXiv:2503.19786, section 2.1. All images are squares of one size. The projector takes the
mean of each square of patches, and projects it by a norm and a linear.

Shapes: P patches of an image, T embeddings of an image, R rows of a piece, H hidden size of the
tower, O that of the language model. F patches are a side of the square that becomes one embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Self, Unpack

import torch
from torch import nn

from quire.errors import CheckpointError, InvalidRequestError
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import RMSNorm
from quire.layers.storage import Storage
from quire.models.config_fields import ConfigFields
from quire.models.vision.patches import IMAGE_GRID, NUM_CHANNELS, stack_squares
from quire.models.vision.siglip import OTHER_NAMES, SiglipConfig, SiglipEncoder
from quire.models.vision.slices import WIDE_PIECE_ROWS, in_pieces
from quire.models.vision.vision_tower import (
    Grid,
    Slices,
    VisionConfig,
    VisionTower,
    vision_config_of,
)

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
_NUM_TOKENS = 256

WORDS = OTHER_NAMES | {
    "mm_input_projection_weight": "mm_input_projection.weight",
    "vision_model": "",
}
"""Words of names in the checkpoint, and the words that replace them."""

UNUSED = ("vision_tower.head.",)
"""SigLIP's head, which pools an image to one vector."""

TRANSPOSED = ("multi_modal_projector.mm_input_projection.weight",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3VisionConfig(VisionConfig):
    """The config of the encoder and the projector."""

    encoder: SiglipConfig
    #: Patches along each side of the square that becomes one embedding.
    pool_size: int

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        outer, inner = ConfigFields(raw), vision_config_of(raw)
        fields = outer.inner(inner)
        fields.value("vision_use_head")  # the projector reads the patches, not the pooled vector
        encoder = SiglipConfig.read(fields, _DEFAULTS)
        num_tokens, side = (
            outer.integer("mm_tokens_per_image", _NUM_TOKENS),
            encoder.num_patches_per_side,
        )
        if isqrt(num_tokens) ** 2 != num_tokens or side % isqrt(num_tokens):
            raise CheckpointError(
                f"config.json: mm_tokens_per_image is {num_tokens}, but must be the square of a"
                f" divisor of {side}, the number of patches of an image's side"
            )
        config = cls(output_size=output_size, encoder=encoder, pool_size=side // isqrt(num_tokens))
        return replace(config, left_out=fields.finish())


class Gemma3Projector(nn.Module):
    """The projector, under the names of the checkpoint."""

    def __init__(self, config: Gemma3VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        size = config.encoder.hidden_size
        self.mm_soft_emb_norm = RMSNorm(size, config.encoder.layer_norm_eps, offset=1.0, **storage)
        self.mm_input_projection = Linear(
            size, (config.output_size,), LinearKind.REPLICATED, bias=False, **storage
        )

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        """The patches of squares, side by side [R, F * F * H] -> [R, O]."""
        size = self.mm_input_projection.input_size
        means = squares.view(len(squares), -1, size).float().mean(1).to(squares.dtype)
        projected: torch.Tensor = self.mm_input_projection(self.mm_soft_emb_norm(means))
        return projected


class Gemma3Tower(VisionTower):
    """The encoder and the projector."""

    def __init__(self, config: Gemma3VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self.config = config
        self.max_content_tokens = (config.encoder.num_patches_per_side // config.pool_size) ** 2
        self.vision_tower = SiglipEncoder(config.encoder, **storage)
        self.multi_modal_projector = Gemma3Projector(config, **storage)

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        side = self.config.encoder.image_size
        if shape != (NUM_CHANNELS, side, side) or grid != IMAGE_GRID:
            raise InvalidRequestError(
                f"an image's array has the shape {list(shape)} and the grid {list(grid)}, but must"
                f" be {[NUM_CHANNELS, side, side]}, without a grid",
                "prompt",
            )
        return self.max_content_tokens

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        side = self.config.encoder.image_size
        return (NUM_CHANNELS, side, side), IMAGE_GRID

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        side = self.config.encoder.num_patches_per_side
        position_ids = torch.arange(side * side, device=values.device)
        hidden = yield from self.vision_tower.encode(values, position_ids)
        squares = stack_squares(hidden, side, self.config.pool_size)
        return (yield from in_pieces(self.multi_modal_projector, squares, num_rows=WIDE_PIECE_ROWS))
