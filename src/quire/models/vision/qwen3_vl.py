"""The tower of Qwen3-VL and of Qwen3.5, for images of any size and aspect.

Source: arXiv:2511.21631, section 2. Its differences from SigLIP:

- learned positions belong to a square grid, and are interpolated between its points; besides,
  q and k are rotated by the row and the column of their patch;
- each square of patches is merged to one embedding. The patches of a square follow one another;
- the outputs of some layers, merged alike, are features that the language model adds to the
  embeddings after its first layers (DeepStack, arXiv:2406.04334). Qwen3.5 has none.

The rotary positions of the language model have three axes; see `layers.rotary.AxisRotations`.

Shapes: P patches, T embeddings (one for each square of patches), E elements of a patch, D head
size, H hidden size of the tower, O that of the language model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Self, Unpack

import torch
from torch import nn

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError, shown
from quire.kernels.activations import HF_ACTIVATIONS, ActivationFunction
from quire.kernels.rotary import rotary
from quire.layers.embedding import VocabEmbedding
from quire.layers.encoder import FeedForward
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import LayerNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage
from quire.models.config_fields import ROPE_FORMS, ConfigFields
from quire.models.rope_config import read_rope_parameters
from quire.models.vision.patches import NUM_CHANNELS, PatchProjection
from quire.models.vision.slices import WIDE_PIECE_ROWS, EncoderLayer, in_pieces
from quire.models.vision.vision_tower import Grid, Slices, VisionConfig, VisionTower

OTHER_NAMES = {"linear_fc1": "up_proj", "linear_fc2": "down_proj"}
"""Words of names in the checkpoint, and the words that replace them."""

MAX_TOKENS = 16384
"""Maximum number of embeddings of an image, as in Qwen's processor, since configs have no bound."""

_EPS = 1e-6
"""The eps of all norms, which is not in configs."""

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_SECTIONS, _SECTIONS_OF_QWEN3_5 = [24, 20, 20], [11, 11, 10]
_FEATURE_LAYERS = [8, 16, 24]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLVisionConfig(VisionConfig):
    """The config of the tower, and the rotary axes of the language model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: ActivationFunction
    #: Pixels of a side of a patch.
    patch_size: int
    #: Images or video frames in a patch.
    num_frames: int
    #: Patches of a side of the square that becomes one embedding.
    merge_size: int
    #: Points of a side of the grid of learned positions.
    positions_side: int
    rope_theta: float
    #: The layers whose outputs are features, in ascending order.
    feature_layers: tuple[int, ...]
    #: See `layers.rotary.AxisRotations`.
    sections: tuple[int, int, int]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        # First, find the two configs inside, and the fields in which Qwen3.5 differs.
        vision, text = raw.get("vision_config"), raw.get("text_config")
        if not isinstance(vision, dict) or not isinstance(text, dict):
            raise CheckpointError(
                "config.json must have a vision_config and a text_config, which are objects"
            )
        is_qwen3_5 = str(raw.get("architectures")).startswith("['Qwen3_5")
        fields = ConfigFields(raw).inner({**_DEFAULTS, **vision})
        fields.plain("in_channels", NUM_CHANNELS)
        if is_qwen3_5:
            fields.plain("deepstack_visual_indexes", [])
        # Then, read the sizes that must fit together.
        num_layers = fields.integer("depth")
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_heads")
        num_positions = fields.integer("num_position_embeddings")
        if hidden_size % (4 * num_heads) or isqrt(num_positions) ** 2 != num_positions:
            raise CheckpointError(
                f"config.json: hidden_size of the vision_config is {hidden_size}, but must be a"
                f" multiple of 4 * num_heads, {4 * num_heads}; and num_position_embeddings,"
                f" {num_positions}, must be a square"
            )
        if fields.integer("out_hidden_size") != output_size:
            raise CheckpointError(
                f"config.json: out_hidden_size is {fields.integer('out_hidden_size')}, but must be"
                f" the hidden_size of the text_config, {output_size}"
            )
        # Last, read the others.
        activation = fields.choice("hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu"))
        found = None if is_qwen3_5 else fields.value("deepstack_visual_indexes")
        layers = ([] if is_qwen3_5 else _FEATURE_LAYERS) if found is None else found
        theta = read_rope_parameters(fields).get("rope_theta", fields.number("rope_theta", 10000.0))
        config = cls(
            output_size=output_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            activation=HF_ACTIVATIONS[activation],
            patch_size=fields.integer("patch_size"),
            num_frames=fields.integer("temporal_patch_size"),
            merge_size=fields.integer("spatial_merge_size"),
            positions_side=isqrt(num_positions),
            rope_theta=theta,
            feature_layers=_checked_layers(layers, num_layers),
            sections=_read_sections(text, _SECTIONS_OF_QWEN3_5 if is_qwen3_5 else _SECTIONS),
        )
        return replace(config, left_out=fields.finish())


def _checked_layers(layers: Any, num_layers: int) -> tuple[int, ...]:
    is_list = isinstance(layers, list) and all(type(each) is int for each in layers)
    if not is_list or not set(layers) <= set(range(num_layers)) or layers != sorted(set(layers)):
        raise CheckpointError(
            f"config.json: deepstack_visual_indexes is {shown(layers)}, but must be an ascending"
            f" list of layers from 0 to {num_layers - 1}"
        )
    return tuple(layers)


def _read_sections(text: Mapping[str, Any], default: list[int]) -> tuple[int, int, int]:
    """The sections of the language model's rotary axes, from its text_config."""
    rope: Mapping[str, Any] = next(
        (text[form] for form in ROPE_FORMS if isinstance(text.get(form), dict)), {}
    )
    sections = rope.get("mrope_section", default)
    if rope.get("mrope_interleaved", True) is not True:
        raise UnsupportedModelError(
            "config.json: mrope_interleaved is false, which transformers ignores"
        )
    if (
        not isinstance(sections, list)
        or len(sections) != len(default)
        or any(type(each) is not int or each < 0 for each in sections)
    ):
        raise CheckpointError(
            f"config.json: mrope_section is {shown(sections)}, but must be a list of 3 numbers of"
            " pairs of elements"
        )
    frames, rows, columns = sections
    return frames, rows, columns


class _QwenBlock(EncoderLayer):
    """Attention and MLP, each with a norm before it and added to its input."""

    def __init__(self, config: Qwen3VLVisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config.hidden_size, config.num_heads)
        self.norm1, self.norm2 = (LayerNorm(config.hidden_size, _EPS, **storage) for _ in range(2))
        size = config.hidden_size
        # In checkpoints, q, k and v are one tensor.
        self.attn = nn.ModuleDict(
            {
                name: Linear(size, (outputs,), LinearKind.REPLICATED, bias=True, **storage)
                for name, outputs in (("qkv", 3 * size), ("proj", size))
            }
        )
        self.mlp = FeedForward(
            config.hidden_size, config.intermediate_size, activation=config.activation, **storage
        )

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.attn["qkv"](self.norm1(hidden))
        return projected

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self.operators.add(self.attn["proj"](attended), hidden)
        inner: torch.Tensor = self.mlp(self.norm2(hidden))
        return self.operators.add(inner, hidden)


class _QwenMerger(OperatorModule):
    """Merges the patches of each square to one embedding."""

    def __init__(
        self, config: Qwen3VLVisionConfig, *, norms_squares: bool, **storage: Unpack[Storage]
    ) -> None:
        """With `norms_squares`, the norm is over a whole square instead of over each patch."""
        super().__init__()
        self._width = config.hidden_size * config.merge_size**2
        self._norms_squares = norms_squares
        self.norm = LayerNorm(self._width if norms_squares else config.hidden_size, _EPS, **storage)
        self.up_proj, self.down_proj = (
            Linear(self._width, (outputs,), LinearKind.REPLICATED, bias=True, **storage)
            for outputs in (self._width, config.output_size)
        )

    def encode(self, hidden: torch.Tensor) -> Slices[torch.Tensor]:
        """hidden [P, H] -> [T, O]."""
        return (
            yield from in_pieces(
                self._merge, hidden.view(-1, self._width), num_rows=WIDE_PIECE_ROWS
            )
        )

    def _merge(self, squares: torch.Tensor) -> torch.Tensor:
        parts = squares if self._norms_squares else squares.view(-1, self.norm.weight.shape[0])
        normed = self.norm(parts).view(-1, self._width)
        inner = self.operators.activate(self.up_proj(normed), ActivationFunction.GELU)
        merged: torch.Tensor = self.down_proj(inner)
        return merged


class _QwenEncoder(OperatorModule):
    """The whole tower, under the checkpoint's name."""

    def __init__(self, config: Qwen3VLVisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        kernel = (NUM_CHANNELS, config.num_frames, config.patch_size, config.patch_size)
        projection = PatchProjection("proj", kernel, config.hidden_size, bias=True, **storage)
        self.patch_embed = nn.ModuleDict({"proj": projection})
        self.pos_embed = VocabEmbedding(config.positions_side**2, config.hidden_size, **storage)
        self.blocks = nn.ModuleList(_QwenBlock(config, **storage) for _ in range(config.num_layers))
        self.merger = _QwenMerger(config, norms_squares=False, **storage)
        self.deepstack_merger_list = nn.ModuleList(
            _QwenMerger(config, norms_squares=True, **storage) for _ in config.feature_layers
        )

    def embed(
        self, patches: torch.Tensor, points: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """patches [P, E] with their projections and positions -> [P, H].

        A position is a sum of learned ones at `points` [P, 4] with `weights` [P, 4] fp32.
        """
        learned = self.pos_embed(points.flatten()).view(*points.shape, -1)
        positions = (learned * weights[:, :, None]).sum(1).to(learned.dtype)
        return self.operators.add(self.patch_embed["proj"](patches.to(learned.dtype)), positions)


class Qwen3VLTower(VisionTower):
    """The tower with its mergers: one for its result, and one for each kept feature."""

    def __init__(self, config: Qwen3VLVisionConfig, **storage: Unpack[Storage]) -> None:
        super().__init__(config, **storage)
        self._config = config
        self.num_parts = 1 + len(config.feature_layers)
        self.rotary_sections = config.sections
        self.max_content_tokens = MAX_TOKENS
        self.visual = _QwenEncoder(config, **storage)

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        config, (frames, rows, columns) = self._config, grid
        size = config.merge_size
        width = NUM_CHANNELS * config.num_frames * config.patch_size**2
        count = rows // size * (columns // size)
        is_whole = all(side > 0 and side % size == 0 for side in (rows, columns))
        is_image = frames == 1 and tuple(shape) == (rows * columns, width)
        if not is_image or not is_whole or count > MAX_TOKENS:
            raise InvalidRequestError(
                f"an image's array has the shape {list(shape)} and the grid {list(grid)}, but must"
                f" have a row of {width} numbers for each patch of a grid of 1 frame and multiples"
                f" of {size} rows and columns, at most {MAX_TOKENS * size**2} patches",
                "prompt",
            )
        return count

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        side = self.most_square_side(max_tokens) * self._config.merge_size
        width = NUM_CHANNELS * self._config.num_frames * self._config.patch_size**2
        return (side * side, width), (1, side, side)

    def span_grid(self, grid: Grid) -> Grid | None:
        (frames, rows, columns), size = grid, self._config.merge_size
        return frames, rows // size, columns // size

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        # First, embed the patches, each with its position.
        config, visual, device = self._config, self.visual, values.device
        rows, columns = _places(grid, config.merge_size)
        points, weights = _learned_points(rows, columns, grid, config.positions_side)
        hidden = yield from in_pieces(visual.embed, values, points.to(device), weights.to(device))
        # Then, run the blocks, and keep the features after some of them.
        cos, sin = (each.to(device) for each in self._angles(rows, columns))
        features: list[torch.Tensor] = []

        def turn(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # As in transformers, the rotation is computed in fp32.
            turned = rotary(q.float(), k.float(), cos, sin)
            return turned[0].to(q.dtype), turned[1].to(k.dtype)

        for index, block in enumerate(visual.blocks):
            assert isinstance(block, _QwenBlock)
            hidden = yield from block.encode(hidden, turn)
            if index in config.feature_layers:
                merger = visual.deepstack_merger_list[config.feature_layers.index(index)]
                assert isinstance(merger, _QwenMerger)
                features.append((yield from merger.encode(hidden)))
        # Last, merge the squares.
        merged = yield from visual.merger.encode(hidden)
        return torch.cat((merged, *features), dim=1)

    def _angles(
        self, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [P, D] fp32: half of a head's pairs turn by the row, half by the
        column."""
        half = self._config.hidden_size // self._config.num_heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        frequencies = 1.0 / torch.pow(self._config.rope_theta, exponents)
        pairs = [torch.outer(each.float(), frequencies) for each in (rows, columns)]
        angles = torch.cat(pairs * 2, dim=1)
        return angles.cos(), angles.sin()


def _places(grid: Grid, merge_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the column of each patch, [P] int64 each, square by square."""
    _, rows, columns = grid
    squares = torch.arange(rows * columns).view(
        rows // merge_size, merge_size, columns // merge_size, merge_size
    )
    order = squares.transpose(1, 2).flatten()
    return order // columns, order % columns


def _learned_points(
    rows: torch.Tensor, columns: torch.Tensor, grid: Grid, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The four learned positions around each patch, [P, 4] int64, and their weights [P, 4] fp32.

    The corners of the image are those of the grid of `side` by `side` positions. Rounds in fp32 as
    transformers does.
    """
    ends, shares = [], []
    for places, count in ((rows, grid[1]), (columns, grid[2])):
        exact = places.float() * (side - 1) / max(count - 1, 1)
        below = exact.floor()
        behind = exact - below
        ends.append(torch.stack((below, below + 1), dim=1).long().clamp(max=side - 1))
        shares.append(torch.stack((1 - behind, 1 - (behind - 1).abs()), dim=1))
    points = ends[0][:, :, None] * side + ends[1][:, None]
    weights = shares[0][:, :, None] * shares[1][:, None]
    return points.flatten(1), weights.flatten(1)
