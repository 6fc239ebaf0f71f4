"""Attention over one whole sequence, without pages, in fp32.

It serves measurements that run before the KV cache is allocated, or that need no cache.

Shapes: T tokens of one sequence from its start, m queries that are computed at once, Hq query
heads, Hkv KV heads, G = Hq / Hkv, D head size, Dv value size.
"""

from collections.abc import Iterator

import torch

from quire.attention.interface import AttentionSpec, rotated
from quire.attention.reference import visible_keys
from quire.kernels.attention_inputs import AttentionInputs

PIECE_QUERIES = 256
"""The number of queries attended at once. Scores take memory for each pair of query and key."""


def log_weights(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Yield log-probabilities [Hkv, G, m, T] fp32 over the keys, for m queries at a time.

    Sinks add one column. q is [T, Hq, D], k is [T, Hkv, D].
    """
    visible = visible_keys(spec, len(q), len(k)).to(q.device)
    heads = q.float().reshape(len(q), spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
    keys = k.float().permute(1, 2, 0).unsqueeze(1)
    for first in range(0, len(q), PIECE_QUERIES):
        part = slice(first, first + PIECE_QUERIES)
        scores = torch.matmul(heads[:, :, part], keys).mul_(spec.scale)
        if spec.soft_cap is not None:
            scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        scores.masked_fill_(~visible[part], float("-inf"))
        if sinks is not None:
            column = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        yield torch.log_softmax(scores, dim=-1)


def mixed_values(log_weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The outputs [m, Hq, Dv] of m queries. v is [T, Hkv, Dv] fp32."""
    values = v.transpose(0, 1).unsqueeze(1)
    out = torch.matmul(log_weights[..., : len(v)].exp(), values)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


class ExactAttention:
    """An `AttentionCall` over one sequence, whose K and V are not stored in pages."""

    def __init__(self, specs: tuple[AttentionSpec, ...]) -> None:
        self._specs = specs
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        q, k = rotated(inputs)
        if k is not None:
            value_dim = self._specs[layer].value_dim
            values = inputs.v if value_dim is None else k[..., :value_dim]
            assert values is not None, "a layer that is not latent is called with values"
            self._written[layer] = k, values
        keys, values = self._read(*(part.float() for part in self._written[layer]))
        weights = self._weights(layer, q, keys, inputs.sinks)
        return torch.cat([mixed_values(piece, values) for piece in weights]).to(q.dtype)

    def _read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and V [T, Hkv, *] fp32 that attention uses."""
        return k, v

    def _weights(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        """The `log_weights` of the layer."""
        return log_weights(self._specs[layer], q, k, sinks)
