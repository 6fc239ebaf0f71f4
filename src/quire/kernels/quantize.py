"""Rounds weights and activations to int8 and int4, in torch.

This is the reference of the native kernels' packing, and replaces it if there are no native
kernels. `linear_int8.h` and `linear_int4.h` in `cpu/csrc/linear` define the layouts. The results
are bit-identical to the native ones, so every operation is in fp32 and in a fixed order. A constant
in a quotient is a tensor. With a Python number instead, torch would multiply by the divisor's
reciprocal, which rounds twice: on a GPU if the constant is the divisor, and on any device if it is
the dividend.

In every token of real models, some inputs are a hundred times as large as the rest. Three measures
keep the precision of the rest. First, activations have a scale for each group of inputs, not one
for a token. Second, int8 multiplies activations and weights by a Hadamard matrix, which spreads an
outlier over its block ("QuaRot", arXiv:2404.00456, section 4). Third, int4 rounds the few widest
inputs of the vocabulary projection to eight bits, because a rotation would widen its groups
("LLM.int8()", arXiv:2208.07339, section 3, separates such inputs).

Shapes: N rows of a weight, or M of an activation; K inputs; g groups of G inputs; W wide inputs.
"""

from dataclasses import dataclass

import torch

INT8_LEVELS = 127
INT8_GROUP = 256
"""The number of a token's inputs that share a scale in int8."""

INT4_GROUPS_PER_SCALE = 4
"""In int4, the number of groups of a weight whose inputs share one scale of an activation."""

NUM_WIDE = 12
"""The number of inputs of a vocabulary projection that int4 stores in eight bits."""

LEAST_INPUTS_WITH_WIDE = 256
"""A vocabulary projection with fewer inputs has no wide ones."""

# The largest block that int8 rotates. With one scale per token, KL divergences of SmolLM2 were
# 0.0072 with blocks of 16, and 0.0050 with 64 and with 512.
_LARGEST_ROTATION = 64
# Rows whose largest value is smaller count as zeros, because 1 / scale would overflow.
_SMALLEST = 1e-30

INT4_LEVELS = 15.0
_FACTOR_LEVELS = 255.0
_SHRINK = (1.0, 0.93, 0.86, 0.79)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] ~ q * scale: (q [N, K] int8 in -127 to 127, scale [N] fp32 = max |x| / 127).

    Rounds to nearest, ties to even. A row of values near zero has q = 0. A row with a NaN or an
    infinity has q = 0 and the scale NaN, so that results computed from it are NaN.
    """
    x = x.float()
    factors, scales = int8_factors(x)
    q = (x * factors[:, None]).nan_to_num_(0.0, 0.0, 0.0).round_()
    return q.to(torch.int8), scales


def int8_factors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] fp32 -> (the factors [N] that x is multiplied by before it is rounded to int8,
    scales [N]).

    A row near zero, or with a NaN or an infinity, has the factor 0.
    """
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(len(x))
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    levels = torch.full_like(largest, INT8_LEVELS)
    return torch.where(largest >= _SMALLEST, levels / largest, 0.0), largest / levels


def quantize_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] ~ q * scale: q [M, g, size] integers as fp32, and scale [M, g] fp32.

    Each group is quantized like a row in `quantize_int8`. K is padded with zeros to whole groups.
    """
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    q, scales = quantize_int8(padded.reshape(-1, size))
    shape = (len(x), padded.shape[1] // size)
    return q.float().view(*shape, size), scales.view(shape)


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32, rounded once, except if the sum in fp64 is a tie."""
    return (a.double() * b.double() + c.double()).float()


def rotation_size(num_inputs: int) -> int:
    """The size of the blocks of inputs that int8 rotates: the largest power of two, up to 64, that
    divides num_inputs. 1 means no rotation."""
    return min(_LARGEST_ROTATION, num_inputs & -num_inputs)


def rotate_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [..., K] of any floating dtype -> fp32: each block of `size` elements times a Hadamard
    matrix of ones and minus ones. `size` is a power of two that divides K.

    Applied twice, it gives `size` times x. Passes combine pairs of elements at distances of 1, 2,
    4, .. in this order, so that all kernels get the same bits.
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
    """rows [N, K] of a weight -> `quantize_int8` of the rotated rows, which multiply rotated x."""
    size = rotation_size(rows.shape[1])
    return quantize_int8(rotate_blocks(rows, size) * (1.0 / size))


def num_wide_inputs(num_inputs: int) -> int:
    """W, the number of wide inputs of a vocabulary projection in int4."""
    return NUM_WIDE if num_inputs >= LEAST_INPUTS_WITH_WIDE else 0


def widest_inputs(sample: torch.Tensor) -> torch.Tensor:
    """sample [any, K], some rows of a weight -> the W inputs whose weights have the largest sums of
    squares, in rising order, int32 [W]."""
    squares = torch.zeros(sample.shape[1], dtype=torch.float64)
    for first in range(0, len(sample), 64):  # few rows at a time, since fp64 takes more memory
        squares += sample[first : first + 64].double().square().sum(0)
    squares = squares.nan_to_num(0.0, 0.0, 0.0)
    order = squares.argsort(descending=True, stable=True)
    return order[: num_wide_inputs(sample.shape[1])].sort().values.int()


def widest_activations(x: torch.Tensor, count: int) -> torch.Tensor:
    """x [T, K], typical inputs of a linear -> its `count` widest inputs, in rising order, int32.

    They are those whose squares have, on average, the largest share of the sum of a row's squares.
    """
    squares = x.double().square()
    shares = (squares / squares.sum(-1, keepdim=True)).nan_to_num_(0.0).mean(0)
    return shares.argsort(descending=True, stable=True)[:count].sort().values.int()


def split_wide(x: torch.Tensor, wide_inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] -> (its wide inputs [N, W], x with the wide inputs set to zero)."""
    places = wide_inputs.long()
    return x[:, places], x.index_fill(1, places, 0.0)


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Rows of a weight: w[n, k] ~ S[n] s[n, g] q[n, k] - O[n] o[n, g], g = k // G."""

    #: q [N, g, G] uint8, 0 to 15. K is padded with zeros to whole groups.
    levels: torch.Tensor
    #: s and o, [N, g] uint8 each.
    scales: torch.Tensor
    offsets: torch.Tensor
    #: S and O, [N] bf16 each.
    scale_factors: torch.Tensor
    offset_factors: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The weights [N, g, G] fp32."""
        scales = self.scales.float() * self.scale_factors[:, None]
        offsets = self.offsets.float() * self.offset_factors[:, None]
        return self.levels.float() * scales[..., None] - offsets[..., None]


def quantize_int4(rows: torch.Tensor, group_size: int) -> Int4Rows:
    """Quantize rows [N, K] of a weight.

    Each group's scale and offset are the best of a few candidates, by squared error. A candidate
    starts with the group's range, shrunk by a factor. The weights are rounded to integers q, and
    scale and offset fitted to q by linear regression. Then scale and offset are rounded to
    multiples of 1/255 of the row's largest scale and offset, and q is rounded again. The row's
    factors are bf16, since more precision would be lost in that rounding. A row with a NaN or an
    infinity becomes NaN.
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
    """The sums of each group's weights and of their squares, [N, g] each."""

    w: torch.Tensor
    ww: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fit w ~ scale q - offset of each group, with its squared error; [N, g] each."""

    scale: torch.Tensor
    offset: torch.Tensor
    error: torch.Tensor

    def better(self, other: "_Fit") -> "_Fit":
        """For each group, this fit if its error is smaller and its scale positive; else `other`."""
        is_better = (self.scale > 0) & (self.error < other.error)
        return _Fit(
            torch.where(is_better, self.scale, other.scale),
            torch.where(is_better, self.offset, other.offset),
            torch.where(is_better, self.error, other.error),
        )


def _fit_groups(w: torch.Tensor) -> _Fit:
    """The best fit of each group of w [N, g, G]."""
    zero = w.new_zeros(w.shape[:-1])
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    sums = _Sums(_sum_in_order(w), _sum_in_order(w * w))
    best = _Fit(zero, zero, sums.ww)
    for shrink in _SHRINK:
        scale = _quotient((high - low) * shrink, INT4_LEVELS)
        best = _fit(w, scale, -low * shrink, sums).better(best)
    return _fit(w, best.scale, best.offset, sums).better(best)


def _fit(w: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, sums: _Sums) -> _Fit:
    """Round w to integers q with the given scale and offset. Returns the best scale and offset >= 0
    for q."""
    q = _round_to_levels(w, scale, offset)
    size = float(w.shape[-1])
    sum_q, sum_qq, sum_qw = _sum_by_lanes(q), _sum_by_lanes(q * q), _sum_by_lanes(q * w)
    determinant = size * sum_qq - sum_q * sum_q
    # If all q are equal, every scale fits.
    scale = torch.where(determinant > 0, (size * sum_qw - sum_q * sums.w) / determinant, scale)
    offset = (scale * sum_q - sums.w) / size
    # Offsets must not be negative. In that case the best line through zero is taken.
    through_zero = offset < 0
    scale = torch.where(through_zero, torch.where(sum_qq > 0, sum_qw / sum_qq, 0.0), scale)
    offset = torch.where(through_zero, 0.0, offset)
    return _Fit(scale, offset, sums.ww - scale * sum_qw + offset * sums.w)


def _round_to_levels(w: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The q of w [N, g, G] for scales and offsets [N, g], as floats."""
    factor = torch.where(scale > 0, 1.0 / scale, 0.0)
    return ((w + offset[..., None]) * factor[..., None]).clamp_(0, INT4_LEVELS).round_()


def _in_units(values: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """values [N, g] in units [N], rounded to 0 to 255, as floats."""
    scaled = (values / units[:, None]).clamp_(0, _FACTOR_LEVELS).round_()
    return torch.where(units[:, None] > 0, scaled, 0.0)


def _quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    return x / torch.full_like(x, divisor)


def _sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, from the first element to the last."""
    total = x.new_zeros(x.shape[:-1])
    for each in x.unbind(-1):
        total += each
    return total


def _sum_by_lanes(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension: eight sums of every eighth element, then pairwise halves."""
    lanes = _sum_in_order(x.view(*x.shape[:-1], -1, 8).transpose(-1, -2))
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    return lanes[..., 0]
