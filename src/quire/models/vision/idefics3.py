"""The tower of Idefics 3 and SmolVLM: SigLIP, and a connector that merges neighbouring patches.

Source: arXiv:2408.12637, section 3. The connector stacks a square of `scale_factor` by
`scale_factor` patches ("pixel shuffle") and projects it to one embedding. An image comes as square
tiles, and each tile is one content.

Shapes: P patches of a tile, T embeddings of a tile, F scale factor, H hidden size of the tower, O
that of the language model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import nn

from quire.errors import InvalidRequestError
from quire.layers.linear import Linear, LinearKind
from quire.layers.storage import Storage
from quire.models.config_fields import ConfigFields
from quire.models.vision.patches import IMAGE_GRID, NUM_CHANNELS, stack_squares
from quire.models.vision.siglip import SiglipConfig, SiglipEncoder
from quire.models.vision.slices import in_pieces
from quire.models.vision.vision_tower import (
    Grid,
    Slices,
    VisionConfig,
    VisionTower,
    vision_config_of,
)

# transformers' values for fields that a vision_config leaves out.
_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
_IGNORED = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")
"""Fields of the image processor, and of the code that trained the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3VisionConfig(VisionConfig):
    """The config of the encoder and the connector."""

    encoder: SiglipConfig
    #: Patches along each side of the square that becomes one embedding.
    scale_factor: int

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        outer, inner = ConfigFields(raw), vision_config_of(raw)
        fields = outer.inner(inner)
        for name in _IGNORED:
            fields.value(name)
        config = cls(
            output_size=output_size,
            encoder=SiglipConfig.read(fields, _DEFAULTS),
            scale_factor=outer.integer("scale_factor", 2),
        )
        return replace(config, left_out=fields.finish())


class Idefics3Tower(VisionTower):
    """The encoder and the connector."""

    def __init__(self, config: Idefics3VisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self.config = config
        self.max_content_tokens = (config.encoder.num_patches_per_side // config.scale_factor) ** 2
        self.vision_model = SiglipEncoder(config.encoder, **storage)
        # The connector projects squares of patches to the language model's size.
        sizes = config.encoder.hidden_size * config.scale_factor**2, (config.output_size,)
        projection = Linear(*sizes, LinearKind.REPLICATED, bias=False, **storage)
        self.connector = nn.ModuleDict({"modality_projection": nn.ModuleDict({"proj": projection})})

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        rows, columns = self.config.encoder.count_patches(shape, grid)
        factor = self.config.scale_factor
        if rows != columns or rows % factor:
            raise InvalidRequestError(
                f"a tile has {rows} x {columns} patches, but must be a square of a multiple of"
                f" {factor} patches",
                "prompt",
            )
        return (rows // factor) ** 2

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        factor = self.config.scale_factor
        side = self._num_sides // factor * factor * self.config.encoder.patch_size
        return (NUM_CHANNELS, side, side), IMAGE_GRID

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        side, most = values.shape[1] // self.config.encoder.patch_size, self._num_sides
        row_ids = position_buckets(side, most).to(values.device)
        position_ids = (row_ids[:, None] * most + row_ids).flatten()
        hidden = yield from self.vision_model.encode(values, position_ids)
        stacked = stack_squares(hidden, side, self.config.scale_factor)
        projection = self.connector.get_submodule("modality_projection.proj")
        return (yield from in_pieces(projection, stacked))

    @property
    def _num_sides(self) -> int:
        return self.config.encoder.num_patches_per_side


def position_buckets(num_patches: int, num_positions: int) -> torch.Tensor:
    """The learned position of each patch along one side of an image [num_patches] int64.

    Fewer patches than positions are spread evenly. Rounds in fp32 exactly as transformers does,
    since a different rounding would choose another position.
    """
    step = 1 / num_positions
    boundaries = torch.arange(step, 1.0, step)
    coordinates = torch.arange(num_patches, dtype=torch.float32) * (1.0 / torch.tensor(num_patches))
    return torch.bucketize(coordinates.clamp(max=1.0 - 1e-6), boundaries, right=True)
