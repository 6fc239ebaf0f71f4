"""Simulates quantized KV formats in torch, to measure their loss of quality without a KV cache.

`RoundedAttention` attends a whole sequence with rounded K and V. `KeyProbe` uses exact K and V, and
measures how rounded keys would change each layer's attention. Called by `quire bench perplexity`
for formats that this machine's kernels don't store, and by `assembly.format_checks`.

Shapes: T tokens of one sequence from its start, Hq query heads, Hkv KV heads, D head size.
"""

from collections.abc import Iterator

import torch

from quire.attention.interface import AttentionSpec
from quire.attention.kv_format import KVFormat
from quire.attention.whole_sequence import ExactAttention, log_weights


class RoundedAttention(ExactAttention):
    """Attention over K and V as they would be read from a quantized format's pages."""

    def __init__(self, specs: tuple[AttentionSpec, ...], form: KVFormat) -> None:
        super().__init__(specs)
        self._form = form

    def _read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._form.rounded_keys(k), self._form.values.rounded(v)


class KeyProbe(ExactAttention):
    """Attention over exact K and V, which also measures the effect of rounded keys."""

    def __init__(self, specs: tuple[AttentionSpec, ...], form: KVFormat) -> None:
        super().__init__(specs)
        self._form = form
        #: For each layer, the mean Kullback-Leibler divergence, in nats, of a query's attention
        #: over rounded keys from its attention over exact keys.
        self.divergence: dict[int, float] = {}

    def _weights(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        spec, total = self._specs[layer], 0.0
        rounded_pieces = log_weights(spec, q, self._form.rounded_keys(k), sinks)
        for exact, rounded in zip(log_weights(spec, q, k, sinks), rounded_pieces, strict=True):
            total += divergence(exact, rounded).sum().item()
            yield exact
        self.divergence[layer] = total / (len(q) * spec.num_heads)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(exact || other) in nats over the last dimension of log-probabilities. An element that is
    -inf in `exact` adds nothing."""
    terms = exact.exp() * (exact - other)
    return terms.masked_fill_(exact == float("-inf"), 0.0).sum(-1)
