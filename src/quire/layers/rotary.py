"""Rope types and their tables of cosines and sines.

Each rope type is a dataclass with its formula's parameters. Its `frequencies` follow transformers
(modeling_rope_utils.py), because checkpoints are tuned for these formulas. Formulas that depend
on the context's length use max_model_len, so that cached keys stay valid when a sequence grows.

`models.rope_config` reads the types from config.json. Called by the models.

Shapes: T tokens, R elements of a head that rotate: all of the head, or the first ones.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.rotary import Angles

_LENGTHS_PER_TURN = 2 * math.pi
_POSITIONS_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class RopeLimits:
    """Sizes that formulas need in addition to their own parameters."""

    #: R, in elements.
    rotary_dim: int
    #: The number of positions in the checkpoint's config.
    max_position_embeddings: int
    #: The length of the engine's longest sequence, in tokens.
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Rope(ABC):
    """A rope type with its parameters."""

    rope_theta: float

    @abstractmethod
    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        """Angles per position [R/2] fp32, and the factor for cosines and sines."""

    @property
    def type_name(self) -> str:
        """The type's name in config.json."""
        return next(name for name, kind in ROPE_TYPES.items() if kind is type(self))

    def max_positions(self, max_position_embeddings: int) -> int:
        """The longest context that the formula supports, computed from the checkpoint's length.

        The default returns that length, which in most configs includes the extension already.
        """
        return max_position_embeddings


@dataclass(frozen=True, slots=True)
class LayerRope:
    """The rotation of some layers: a rope type, and the number R of elements that rotate."""

    rope: Rope
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class DefaultRope(Rope):
    """The original rotary embedding, arXiv:2104.09864."""

    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        return 1.0 / _wavelengths(self.rope_theta, limits.rotary_dim), 1.0


@dataclass(frozen=True, slots=True)
class LinearRope(Rope):
    """Position interpolation, arXiv:2306.15595."""

    factor: float

    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        return 1.0 / _wavelengths(self.rope_theta, limits.rotary_dim) / self.factor, 1.0

    def max_positions(self, max_position_embeddings: int) -> int:
        return _scaled_length(max_position_embeddings, self.factor)


@dataclass(frozen=True, slots=True)
class DynamicRope(Rope):
    """NTK-aware interpolation for the context's length, here always max_model_len."""

    factor: float

    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        trained, dim = limits.max_position_embeddings, limits.rotary_dim
        length = max(limits.max_model_len, trained)
        stretch = (self.factor * length / trained) - (self.factor - 1)
        return 1.0 / _wavelengths(self.rope_theta * stretch ** (dim / (dim - 2)), dim), 1.0

    def max_positions(self, max_position_embeddings: int) -> int:
        return _scaled_length(max_position_embeddings, self.factor)


@dataclass(frozen=True, slots=True)
class Llama3Rope(Rope):
    """Llama 3.1: long wavelengths are stretched, short ones unchanged, others interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        length, low, high = (
            self.original_max_position_embeddings,
            self.low_freq_factor,
            self.high_freq_factor,
        )
        plain = 1.0 / _wavelengths(self.rope_theta, limits.rotary_dim)
        wavelength = _LENGTHS_PER_TURN / plain
        is_long, is_short = wavelength > length / low, wavelength < length / high
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * plain / self.factor + smooth * plain
        stretched = torch.where(is_long, plain / self.factor, plain)
        return torch.where(is_long | is_short, stretched, between), 1.0


@dataclass(frozen=True, slots=True)
class YarnRope(Rope):
    """YaRN, arXiv:2309.00071."""

    original_max_position_embeddings: int
    #: None means max_position_embeddings / original_max_position_embeddings.
    factor: float | None = None
    #: None if it is computed from the factor, and from mscale and mscale_all_dim if both are given
    #: (DeepSeek).
    attention_factor: float | None = None
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    #: Multiplies a computed attention factor, as in YaRN's own code and in vLLM. transformers 5.23
    #: ignores it. In DeepSeek-R1-0528-Qwen3-8B, whose config has it, the product is 1.
    attn_factor: float = 1.0

    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        dim = limits.rotary_dim
        factor = self.factor or (
            limits.max_position_embeddings / self.original_max_position_embeddings
        )
        low = self._correction_dim(self.beta_fast, dim)
        high = self._correction_dim(self.beta_slow, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # avoids a division by zero
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        # As in transformers, `1 - (1 - ramp)`, which rounds differently from `ramp`.
        extrapolated = 1 - ramp
        wavelengths = _wavelengths(self.rope_theta, dim)
        blend = 1.0 / (factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated
        return blend, self._attention_factor(factor)

    def max_positions(self, max_position_embeddings: int) -> int:
        # max_position_embeddings is the original length in Qwen's configs, and the stretched one in
        # DeepSeek's.
        stretched = _scaled_length(self.original_max_position_embeddings, self.factor or 1.0)
        return max(max_position_embeddings, stretched)

    @property
    def score_scale(self) -> float:
        """DeepSeek's additional factor for q·k. Cosines and sines have another factor."""
        if not self.mscale_all_dim:
            return 1.0
        return _yarn_mscale(self.factor or 1.0, self.mscale_all_dim) ** 2

    def _correction_dim(self, num_rotations: float, dim: int) -> float:
        """The dimension that makes `num_rotations` turns over the original context."""
        turns = self.original_max_position_embeddings / (num_rotations * _LENGTHS_PER_TURN)
        return (dim * math.log(turns)) / (2 * math.log(self.rope_theta))

    def _attention_factor(self, factor: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            all_dims = _yarn_mscale(factor, self.mscale_all_dim)
            return self.attn_factor * _yarn_mscale(factor, self.mscale) / all_dims
        return self.attn_factor * _yarn_mscale(factor, 1)


@dataclass(frozen=True, slots=True)
class LongRope(Rope):
    """LongRoPE, arXiv:2402.13753, with the long factors if max_model_len exceeds the original
    length."""

    original_max_position_embeddings: int
    #: R/2 factors for contexts up to the original length.
    short_factor: tuple[float, ...]
    #: R/2 factors for longer contexts.
    long_factor: tuple[float, ...]
    #: None means max_position_embeddings / original_max_position_embeddings.
    factor: float | None = None
    attention_factor: float | None = None

    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        original = self.original_max_position_embeddings
        is_long = limits.max_model_len > original
        factors = torch.tensor(self.long_factor if is_long else self.short_factor)
        scaled = 1.0 / (factors * _wavelengths(self.rope_theta, limits.rotary_dim))
        if self.attention_factor is not None:
            return scaled, self.attention_factor
        factor = self.factor or limits.max_position_embeddings / original
        if factor <= 1.0:
            return scaled, 1.0
        return scaled, math.sqrt(1 + math.log(factor) / math.log(original))


@dataclass(frozen=True, slots=True)
class ProportionalRope(Rope):
    """Gemma 4: all elements of a head rotate, but angles after the first part are zero."""

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def frequencies(self, limits: RopeLimits) -> tuple[torch.Tensor, float]:
        num_turned = int(self.partial_rotary_factor * limits.rotary_dim // 2)
        turned = 1.0 / _wavelengths(self.rope_theta, limits.rotary_dim)[:num_turned]
        found = torch.zeros(limits.rotary_dim // 2)
        found[:num_turned] = turned / self.factor
        return found, 1.0


ROPE_TYPES: dict[str, type[Rope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "proportional": ProportionalRope,
}


def _wavelengths(theta: float, dim: int) -> torch.Tensor:
    """Positions per radian, [dim/2] fp32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return torch.pow(theta, exponents)


def _scaled_length(length: int, factor: float) -> int:
    return max(length, int(length * factor))


def _yarn_mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


class RotaryEmbedding(nn.Module):
    """Cosines and sines of all positions below max_model_len, fp32, computed once."""

    #: [max_model_len or more, R]: R/2 cosines, then R/2 sines. `AxisRotations` fills in the rows
    #: from max_model_len on.
    table: torch.Tensor

    def __init__(
        self, rope: Rope, limits: RopeLimits, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.dtype = dtype
        frequencies, factor = rope.frequencies(limits)
        table = torch.empty(limits.max_model_len, limits.rotary_dim)
        half = limits.rotary_dim // 2
        # Computed in pieces, since temporaries for all positions would take three times the memory.
        for first in range(0, limits.max_model_len, _POSITIONS_AT_ONCE):
            rows = table[first : first + _POSITIONS_AT_ONCE]
            positions = torch.arange(first, first + len(rows), dtype=torch.float32)
            angles = torch.outer(positions, frequencies)
            rows[:, :half] = angles.cos() * factor
            rows[:, half:] = angles.sin() * factor
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> Angles:
        """The angles of tokens at positions [T] int64, which are indices of the table."""
        return Angles(self.table, positions, self.dtype)


class AxisRotations:
    """The rotations of tokens that have a position on each of three axes: frame, row and column.

    Each pair of elements of a head is turned by the position on one axis. If the three positions of
    a token are equal, as in text, the token has the row of that position in the tables of cosines
    and sines. For any other token of a step, a row is composed from the rows of its three positions
    and written after the tables' own rows. So each token has one row index, and the kernels that
    read the tables need no change.

    Source: interleaved MRoPE of Qwen3-VL (arXiv:2511.21631). The axes are in transformers' order.
    """

    def __init__(
        self,
        embeddings: Sequence[RotaryEmbedding],
        sections: tuple[int, int, int],
        max_num_tokens: int,
    ) -> None:
        """Append `max_num_tokens` rows, one for each token of a step, to the embeddings' tables.

        `sections` are the numbers of pairs turned by frames, rows and columns. Rows turn the pairs
        1, 4, 7, ... below three times their section, and columns the pairs 2, 5, 8, ... below three
        times theirs. Frames turn the remaining pairs of a head, as in transformers.
        """
        #: The index of the row for a step's first token. A row for each other token follows.
        self.first_row = len(embeddings[0].table)
        self._embeddings = embeddings
        self._axes: list[torch.Tensor] = []
        for embedding in embeddings:
            num_pairs = embedding.table.shape[1] // 2
            axes = torch.zeros(num_pairs, dtype=torch.int64)
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = axis
            self._axes.append(axes)
            spare = embedding.table.new_empty(max_num_tokens, 2 * num_pairs)
            embedding.table = torch.cat((embedding.table, spare))

    def compose(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the rows of a step's `tokens` [N] int64 at `positions` [3, N] int64."""
        for embedding, axes in zip(self._embeddings, self._axes, strict=True):
            table = embedding.table
            pairs, tokens = torch.arange(len(axes), device=table.device), tokens.to(table.device)
            places = positions[axes].T.to(table.device)
            cosines, sines = table[places, pairs], table[places, pairs + len(axes)]
            table[self.first_row + tokens] = torch.cat((cosines, sines), dim=1)
