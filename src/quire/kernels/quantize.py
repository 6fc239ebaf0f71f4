"""Rounds weights and activations to int8 and int4, in torch.

The reference of the native kernels' packing, and its replacement where they are missing. The
formats' layouts are theirs (`linear_int8.h`, `linear_int4.h` in `cpu/csrc/linear`); the numbers are
the same to the bit, so every operation here is in fp32 and in a fixed order. Where a number is
divided by a constant or the reverse, both are tensors: torch would take the reciprocal of one and
multiply, which rounds twice (the constant's on a GPU, the other's anywhere). Called by `formats`.

Some inputs of real models are a hundred times the rest, in every token. Three things keep them from
taking the rest's bits: activations have a scale for each group of inputs, not one for a token; int8
multiplies activations and weights by a Hadamard matrix first, which spreads an outlier over its
block ("QuaRot", arXiv:2404.00456, section 4); int4, whose groups such a rotation would widen,
rounds the few widest inputs of the vocabulary projection to eight bits instead ("LLM.int8()",
arXiv:2208.07339, section 3, keeps such inputs apart).

Shapes: N rows of a weight, or M of an activation; K inputs; g groups of G inputs; W wide inputs.
"""

from dataclasses import dataclass

import torch

INT8_LEVELS = 127
INT8_GROUP = 256
"""Inputs of a token that share a scale in int8."""

INT4_GROUPS_PER_SCALE = 4
"""Groups of a weight whose inputs share a scale of a token's, in int4."""

NUM_WIDE = 12
"""Inputs that int4 keeps in eight bits, of a vocabulary projection."""

LEAST_INPUTS_WITH_WIDE = 256
"""Of fewer inputs, none are wide."""

# The greatest block that int8 rotates. With one scale a token, KL divergences of SmolLM2 were
# 0.0072 with blocks of 16, and 0.0050 with 64 and with 512.
_LARGEST_ROTATION = 64
# Below, 1 / scale would overflow; next to a model's numbers this is nothing.
_SMALLEST = 1e-30

INT4_LEVELS = 15.0
_FACTOR_LEVELS = 255.0
_SHRINK = (1.0, 0.93, 0.86, 0.79)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] ~ q * scale: (q [N, K] int8 in -127 to 127, scale [N] fp32 = max |x| / 127).

    To the nearest, ties to even. A row of (nearly) zeros is q = 0; one with a NaN or an infinity
    has q = 0 and the scale NaN, so that what is computed from it is NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(len(x))
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    levels = torch.full_like(largest, INT8_LEVELS)
    factor = torch.where(largest >= _SMALLEST, levels / largest, 0.0)
    q = (x * factor[:, None]).nan_to_num_(0.0, 0.0, 0.0).round_()
    return q.to(torch.int8), largest / levels


def quantize_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] ~ q * scale: q [M, g, size] int8 numbers as fp32, K padded with zeros to whole
    groups, and a scale [M, g] fp32 for each group, as `quantize_int8` gives them to a row."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    q, scales = quantize_int8(padded.reshape(-1, size))
    shape = (len(x), padded.shape[1] // size)
    return q.float().view(*shape, size), scales.view(shape)


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32, rounded once but for ties of the sum in fp64."""
    return (a.double() * b.double() + c.double()).float()


def rotation_size(num_inputs: int) -> int:
    """Inputs that int8 rotates together: the greatest power of two that divides all of them, at
    most 64; 1: nothing is rotated."""
    return min(_LARGEST_ROTATION, num_inputs & -num_inputs)


def rotate_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [..., K] of any floating dtype -> fp32: each `size` elements, a power of two that divides
    K, times a Hadamard matrix of ones and minus ones.

    Twice is `size` times x. Sums are of two terms, their partners 1, 2, 4, .. elements away: in
    this order, so that all kernels get the same bits.
    """
    wide = x.float()
    distance = 1
    while distance < size:
        pairs = (x.shape[-1] // (2 * distance), 2, distance)
        first, second = wide.reshape(*x.shape[:-1], *pairs).unbind(-2)
        wide = torch.stack((first + second, first - second), -2).reshape(x.shape)
        distance *= 2
    return wide


def quantize_int8_weight(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [N, K] of a weight -> `quantize_int8` of their rotation, for `rotate_blocks` of x."""
    size = rotation_size(rows.shape[1])
    return quantize_int8(rotate_blocks(rows, size) * (1.0 / size))


def num_wide_inputs(num_inputs: int) -> int:
    """W of a vocabulary projection in int4."""
    return NUM_WIDE if num_inputs >= LEAST_INPUTS_WITH_WIDE else 0


def widest_inputs(sample: torch.Tensor) -> torch.Tensor:
    """sample [any, K]: rows of a weight -> the inputs whose weights are the largest, by the sum of
    their squares, in rising order, int32 [W]."""
    squares = torch.zeros(sample.shape[1], dtype=torch.float64)
    for first in range(0, len(sample), 64):  # some rows at a time, as they become wider
        squares += sample[first : first + 64].double().square().sum(0)
    squares = squares.nan_to_num(0.0, 0.0, 0.0)
    order = squares.argsort(descending=True, stable=True)
    return order[: num_wide_inputs(sample.shape[1])].sort().values.int()


def split_wide(x: torch.Tensor, wide_inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] -> its wide inputs [N, W], and x with zeros in their places."""
    places = wide_inputs.long()
    return x[:, places], x.index_fill(1, places, 0.0)


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Rows of a weight: w[n, k] ~ S[n] s[n, g] q[n, k] - O[n] o[n, g], g = k // G.

    levels: q [N, g, G] uint8, 0 to 15; K is padded with zeros to whole groups. scales, offsets: s
    and o [N, g] uint8. scale_factors, offset_factors: S and O [N] bf16.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    scale_factors: torch.Tensor
    offset_factors: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """[N, g, G] fp32."""
        scales = self.scales.float() * self.scale_factors[:, None]
        offsets = self.offsets.float() * self.offset_factors[:, None]
        return self.levels.float() * scales[..., None] - offsets[..., None]


def quantize_int4(rows: torch.Tensor, group_size: int) -> Int4Rows:
    """rows [N, K] of a weight.

    A group's scale and offset are those with the least squared error among a few starts: the range
    of the group, shrunk by some factors, each rounded to integers q once and then fitted to them by
    linear regression. Then both are rounded to eight bits of the row's largest, and q anew. The
    largest, 255 of the row's factor, is known to the eight bits of bf16: more would be lost in the
    rounding of the others. A row with a NaN or an infinity becomes NaN.
    """
    num_groups = -(-rows.shape[1] // group_size)
    padding = num_groups * group_size - rows.shape[1]
    padded = torch.nn.functional.pad(rows.float(), (0, padding))
    w = padded.view(len(rows), num_groups, group_size)
    fit = _fit_groups(w)
    is_sound = fit.error.isfinite().all(-1)
    scale_factors, offset_factors = (
        torch.where(is_sound, _quotient(values.amax(-1), _FACTOR_LEVELS), torch.nan).bfloat16()
        for values in (fit.scale, fit.offset)
    )
    scales = _in_units(fit.scale, scale_factors)
    offsets = _in_units(fit.offset, offset_factors)
    levels = _round_to_levels(w, scales * scale_factors[:, None], offsets * offset_factors[:, None])
    levels = torch.where(is_sound[:, None, None], levels, 0.0)
    return Int4Rows(
        levels.to(torch.uint8),
        scales.to(torch.uint8),
        offsets.to(torch.uint8),
        scale_factors,
        offset_factors,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a group's weights and of their squares, [N, g] each."""

    w: torch.Tensor
    ww: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Fit:
    """w ~ scale q - offset, with its squared error; [N, g] each."""

    scale: torch.Tensor
    offset: torch.Tensor
    error: torch.Tensor

    def better(self, other: "_Fit") -> "_Fit":
        """Of each group the better one; `other` where both are alike or the scale is not one."""
        is_better = (self.scale > 0) & (self.error < other.error)
        return _Fit(
            torch.where(is_better, self.scale, other.scale),
            torch.where(is_better, self.offset, other.offset),
            torch.where(is_better, self.error, other.error),
        )


def _fit_groups(w: torch.Tensor) -> _Fit:
    """The best for each group of w [N, g, G]."""
    zero = w.new_zeros(w.shape[:-1])
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    sums = _Sums(_sum_in_order(w), _sum_in_order(w * w))
    best = _Fit(zero, zero, sums.ww)
    for shrink in _SHRINK:
        scale = _quotient((high - low) * shrink, INT4_LEVELS)
        best = _fit(w, scale, -low * shrink, sums).better(best)
    return _fit(w, best.scale, best.offset, sums).better(best)


def _fit(w: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, sums: _Sums) -> _Fit:
    """The best scale and offset >= 0 for the q to which w is rounded at the given two."""
    q = _round_to_levels(w, scale, offset)
    size = float(w.shape[-1])
    sum_q, sum_qq, sum_qw = _sum_by_lanes(q), _sum_by_lanes(q * q), _sum_by_lanes(q * w)
    determinant = size * sum_qq - sum_q * sum_q
    # If all q are alike, any scale will do.
    scale = torch.where(determinant > 0, (size * sum_qw - sum_q * sums.w) / determinant, scale)
    offset = (scale * sum_q - sums.w) / size
    # No offset below zero: then the line goes through zero.
    through_zero = offset < 0
    scale = torch.where(through_zero, torch.where(sum_qq > 0, sum_qw / sum_qq, 0.0), scale)
    offset = torch.where(through_zero, 0.0, offset)
    return _Fit(scale, offset, sums.ww - scale * sum_qw + offset * sums.w)


def _round_to_levels(w: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """q of w [N, g, G] at scale and offset [N, g], as floats."""
    factor = torch.where(scale > 0, 1.0 / scale, 0.0)
    return ((w + offset[..., None]) * factor[..., None]).clamp_(0, INT4_LEVELS).round_()


def _in_units(values: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """values [N, g] in units [N], rounded to 0 to 255, as floats."""
    scaled = (values / units[:, None]).clamp_(0, _FACTOR_LEVELS).round_()
    return torch.where(units[:, None] > 0, scaled, 0.0)


def _quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    return x / torch.full_like(x, divisor)


def _sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, from the first to the last."""
    total = x.new_zeros(x.shape[:-1])
    for each in x.unbind(-1):
        total += each
    return total


def _sum_by_lanes(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension: eight sums of every eighth, then those by halves."""
    lanes = _sum_in_order(x.view(*x.shape[:-1], -1, 8).transpose(-1, -2))
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    return lanes[..., 0]
