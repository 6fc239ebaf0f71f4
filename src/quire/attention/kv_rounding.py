"""What compact KV formats keep of K and V, and attention over it, in torch.

A format is a rounding of each token's vector in each head, by itself: what the pages of that format
give back is a pure function of what was written. So its price in quality is measured without pages:
`RoundedAttention` attends a whole sequence with K and V rounded, `KeyProbe` with them exact while
it measures what rounded keys would do to each layer's attention. Called by `quire bench perplexity`
for formats that this machine's kernels don't store, and by `assembly.format_checks`.

Shapes: T tokens of one sequence from its start, Hq query heads, Hkv KV heads, D head size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quire.attention.compact_kv import quantize_vectors, rotate_vectors, widen_codes
from quire.attention.interface import AttentionSpec
from quire.attention.whole_sequence import WholeSequence, log_weights, mixed_values
from quire.errors import ConfigurationError

_SCALE_BYTES = 2
_FP8_LARGEST, _INT4_LEVELS = 448.0, 15.0
_INT4_GROUP = 32
# A vector of zeros has a scale, too.
_SMALLEST = 1e-30


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] fp32 -> what int8 pages give back for it; see `compact_kv`."""
    return widen_codes(*quantize_vectors(x))


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] fp32 -> the nearest float8_e4m3fn, one bfloat16 scale = max |x| / 448 a vector."""
    scale = _scale(x.abs().amax(-1, keepdim=True), _FP8_LARGEST)
    levels = (x / scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST)
    return levels.to(torch.float8_e4m3fn).float() * scale


def round_int4(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] fp32 -> rotated by a Hadamard matrix, which spreads outliers (arXiv:2404.00456),
    to the nearest of 16 levels from the least to the largest of each 32 elements, a bfloat16 scale
    and a bfloat16 offset each, and rotated back. D: a power of two and at least 32.

    Of 14 formats of 4 bits (symmetric, with offsets, NF4, FP4; groups of 16, 32 and D; rotated or
    not) the one with the least loss but for groups of 16, which take 0.75 bytes an element."""
    rotation = _hadamard(x.shape[-1], x.device)
    rotated = x @ rotation
    groups = rotated.reshape(*x.shape[:-1], -1, _INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, offset = _scale(high - low, _INT4_LEVELS), low.bfloat16().float()
    levels = ((groups - offset) / scale).round_().clamp_(0.0, _INT4_LEVELS)
    return levels.mul_(scale).add_(offset).flatten(-2) @ rotation.T


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """[size, size], orthogonal: Sylvester's construction."""
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
"""What a format gives back for fp32 vectors [..., D]."""


@dataclass(frozen=True, slots=True)
class KVRounding:
    """A compact format. bits: of an element. group: elements that share num_factors numbers of 2
    bytes; None: all of a vector. rotates_keys: before they are rounded (`compact_kv.py`)."""

    apply: Rounding
    bits: int
    num_factors: int = 1
    group: int | None = None
    rotates_keys: bool = False

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """What the format gives back for keys [..., D] fp32."""
        if not self.rotates_keys:
            return self.apply(x)
        return rotate_vectors(self.apply(rotate_vectors(x)))

    def vector_bytes(self, head_dim: int) -> int:
        """Of one head's K or V of a token."""
        num_groups = 1 if self.group is None else head_dim // self.group
        return head_dim * self.bits // 8 + num_groups * self.num_factors * _SCALE_BYTES


KV_ROUNDINGS: Mapping[str, KVRounding] = {
    "int8": KVRounding(round_int8, 8, rotates_keys=True),
    "fp8": KVRounding(round_fp8, 8),
    "int4": KVRounding(round_int4, 4, num_factors=2, group=_INT4_GROUP),
}
"""By the name of the option `kv_cache_dtype`."""


class RoundedAttention(WholeSequence):
    """Attends what a compact format gives back for K and V."""

    def __init__(self, specs: tuple[AttentionSpec, ...], form: KVRounding) -> None:
        super().__init__(specs)
        self._form = form

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        k, v = self._form.of_keys(k), self._form.apply(v)
        pieces = log_weights(self._specs[layer], q, k, sinks)
        return torch.cat([mixed_values(piece, v) for piece in pieces])


class KeyProbe(WholeSequence):
    """Attends K and V as they are. divergence: by layer, the mean Kullback-Leibler divergence, in
    nats, of a query's attention over rounded keys from that over exact ones."""

    def __init__(self, specs: tuple[AttentionSpec, ...], rounding: Rounding) -> None:
        super().__init__(specs)
        self._rounding = rounding
        self.divergence: dict[int, float] = {}

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        spec = self._specs[layer]
        outputs: list[torch.Tensor] = []
        total = 0.0
        rounded_pieces = log_weights(spec, q, self._rounding(k), sinks)
        for exact, rounded in zip(log_weights(spec, q, k, sinks), rounded_pieces, strict=True):
            total += divergence(exact, rounded).sum().item()
            outputs.append(mixed_values(exact, v))
        self.divergence[layer] = total / (len(q) * spec.num_heads)
        return torch.cat(outputs)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(exact || other) in nats over the last dimension of log-probabilities, where -inf in both
    adds nothing."""
    terms = exact.exp() * (exact - other)
    return terms.masked_fill_(exact == float("-inf"), 0.0).sum(-1)
