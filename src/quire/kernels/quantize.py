"""Rounds weights and activations to int8 and int4, in torch.

The reference of the native kernels' packing, and its replacement where they are missing. The
formats' layouts are theirs (`linear_int8.h`, `linear_int4.h` in `cpu/csrc/linear`); the numbers are
the same to the bit, so every operation here is in fp32 and in a fixed order. Where a number is
divided by a constant or the reverse, both are tensors: torch would take the reciprocal of one and
multiply, which rounds twice (the constant's on a GPU, the other's anywhere). Called by `formats`.

Shapes: N rows of a weight, or M of an activation; K inputs; g groups of G inputs.
"""

from dataclasses import dataclass

import torch

INT8_LEVELS = 127
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


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Rows of a weight: w[n, k] ~ S[n] s[n, g] q[n, k] - O[n] o[n, g], g = k // G.

    levels: q [N, g, G] uint8, 0 to 15; K is padded with zeros to whole groups. scales, offsets: s
    and o [N, g] uint8. scale_factors, offset_factors: S and O [N] fp32.
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
    linear regression. Then both are rounded to eight bits of the row's largest, and q anew. A row
    with a NaN or an infinity becomes NaN.
    """
    num_groups = -(-rows.shape[1] // group_size)
    padding = num_groups * group_size - rows.shape[1]
    padded = torch.nn.functional.pad(rows.float(), (0, padding))
    w = padded.view(len(rows), num_groups, group_size)
    fit = _fit_groups(w)
    is_sound = fit.error.isfinite().all(-1)
    scale_factors = torch.where(is_sound, _quotient(fit.scale.amax(-1), _FACTOR_LEVELS), torch.nan)
    offset_factors = torch.where(
        is_sound, _quotient(fit.offset.amax(-1), _FACTOR_LEVELS), torch.nan
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
