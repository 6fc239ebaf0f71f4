"""Simulates quantized KV formats in torch, to measure their loss of quality without a KV cache.

A format rounds each vector (a token's K or V in one head) separately, so a vector read from its
pages depends only on the vector written. `RoundedAttention` attends a whole sequence with rounded K
and V. `KeyProbe` uses exact K and V, and measures how rounded keys would change each layer's
attention. Called by `quire bench perplexity` for formats that this machine's kernels don't store,
and by `assembly.format_checks`.

Shapes: T tokens of one sequence from its start, Hq query heads, Hkv KV heads, D head size.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from quire.attention.interface import AttentionSpec
from quire.attention.quantized_kv import quantize_vectors, rotate_vectors, widen_codes
from quire.attention.whole_sequence import ExactAttention, log_weights
from quire.errors import ConfigurationError

_SCALE_BYTES = 2
_FP8_LARGEST, _INT4_LEVELS = 448.0, 15.0
_INT4_GROUP = 32
# The smallest scale, so that a vector of zeros is not divided by zero.
_SMALLEST = 1e-30


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] fp32 -> the vectors as read from int8 pages; see `quantized_kv`."""
    return widen_codes(*quantize_vectors(x))


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] fp32 -> rounded to float8_e4m3fn, a bfloat16 scale max |x| / 448 per vector."""
    scale = _scale(x.abs().amax(-1, keepdim=True), _FP8_LARGEST)
    levels = (x / scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST)
    return levels.to(torch.float8_e4m3fn).float() * scale


def round_int4(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] fp32 -> rounded to 16 levels; D is a power of two and at least 32.

    First, a Hadamard matrix spreads outliers over the vector (arXiv:2404.00456); last, its inverse
    is applied. The levels of a group of 32 elements range from its minimum to its maximum, and are
    stored as a bfloat16 scale and offset.

    14 formats of 4 bits were compared: symmetric, with offsets, NF4, FP4; groups of 16, 32 and D;
    rotated or not. Only groups of 16 lose less, but they take 0.75 bytes per element.
    """
    rotation = _hadamard(x.shape[-1], x.device)
    rotated = x @ rotation
    groups = rotated.reshape(*x.shape[:-1], -1, _INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, offset = _scale(high - low, _INT4_LEVELS), low.bfloat16().float()
    levels = ((groups - offset) / scale).round_().clamp_(0.0, _INT4_LEVELS)
    return levels.mul_(scale).add_(offset).flatten(-2) @ rotation.T


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """An orthogonal matrix [size, size] by Sylvester's construction."""
    if size < _INT4_GROUP or size & (size - 1):
        raise ConfigurationError(
            f"int4 is simulated for head sizes that are a power of two from {_INT4_GROUP} on, but"
            f" this model's is {size}"
        )
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((matrix.repeat(1, 2), torch.cat((matrix, -matrix), dim=1)))
    return matrix / math.sqrt(size)


def _scale(largest: torch.Tensor, levels: float) -> torch.Tensor:
    return (largest / levels).clamp_min(_SMALLEST).bfloat16().float()


Rounding = Callable[[torch.Tensor], torch.Tensor]
"""fp32 vectors [..., D] -> the vectors as they are read from a format's pages."""


@dataclass(frozen=True, slots=True)
class KVRounding:
    """A quantized format of K and V."""

    apply: Rounding
    #: The number of bits of an element.
    bits: int
    #: The number of 2-byte factors, such as scales, for each group of elements.
    num_factors: int = 1
    #: The number of elements in a group; None if a vector is one group.
    group: int | None = None
    #: Whether keys are rotated before they are rounded, as in `quantized_kv.py`.
    rotates_keys: bool = False

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys [..., D] fp32 as they are read from the format's pages."""
        if not self.rotates_keys:
            return self.apply(x)
        return rotate_vectors(self.apply(rotate_vectors(x)))

    def vector_bytes(self, head_dim: int) -> int:
        """The number of bytes that a token's K or V takes in one head."""
        num_groups = 1 if self.group is None else head_dim // self.group
        return head_dim * self.bits // 8 + num_groups * self.num_factors * _SCALE_BYTES


KV_ROUNDINGS: Mapping[str, KVRounding] = {
    "int8": KVRounding(round_int8, 8, rotates_keys=True),
    "fp8": KVRounding(round_fp8, 8),
    "int4": KVRounding(round_int4, 4, num_factors=2, group=_INT4_GROUP),
}
"""Formats by their value of the option `kv_cache_dtype`."""


class RoundedAttention(ExactAttention):
    """Attention over K and V as they would be read from a quantized format's pages."""

    def __init__(self, specs: tuple[AttentionSpec, ...], form: KVRounding) -> None:
        super().__init__(specs)
        self._form = form

    def _read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._form.of_keys(k), self._form.apply(v)


class KeyProbe(ExactAttention):
    """Attention over exact K and V, which also measures the effect of rounded keys."""

    def __init__(self, specs: tuple[AttentionSpec, ...], rounding: Rounding) -> None:
        super().__init__(specs)
        self._rounding = rounding
        #: By layer, the mean Kullback-Leibler divergence, in nats, of a query's attention over
        #: rounded keys from its attention over exact keys.
        self.divergence: dict[int, float] = {}

    def _weights(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        spec, total = self._specs[layer], 0.0
        rounded_pieces = log_weights(spec, q, self._rounding(k), sinks)
        for exact, rounded in zip(log_weights(spec, q, k, sinks), rounded_pieces, strict=True):
            total += divergence(exact, rounded).sum().item()
            yield exact
        self.divergence[layer] = total / (len(q) * spec.num_heads)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(exact || other) in nats over the last dimension of log-probabilities. An element that is
    -inf in `exact` adds nothing."""
    terms = exact.exp() * (exact - other)
    return terms.masked_fill_(exact == float("-inf"), 0.0).sum(-1)
