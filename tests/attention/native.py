"""Random paged pools for the native backend: `paged.py`, with its page layout told a second time.

A page of block size B, U = min(B, 16), of one KV head: K in B/U units, then V in as many.

    bf16    K unit [D/2][U][2]    V unit [U/2][D][2]
    fp32    K unit [D][U]         V unit [U][D]

A latent layer's page is [B][D] in either dtype.
"""

from dataclasses import dataclass

import torch
from tests.attention.paged import PagedStep


def token_views(page, block_size, num_heads, head_dim):
    """K and V of a layer's page (uint8, or of its dtype) as views that are indexed
    [unit, token // P, token % P, head], P tokens or dimensions to a pair: [B/U, U/P, P, Hkv, ...].
    """
    unit, pair = min(block_size, 16), 2 if page.dtype == torch.bfloat16 else 1
    halves = page.view(num_heads, 2, block_size // unit, -1)
    keys = halves[:, 0].unflatten(-1, (head_dim // pair, unit // pair, pair, pair))
    values = halves[:, 1].unflatten(-1, (unit // pair, head_dim, pair))
    return keys.permute(1, 3, 4, 0, 2, 5), values.permute(1, 2, 4, 0, 3)


def store_tokens(page, block_size, k, v):
    """Write k, v [count, Hkv, D] as the first tokens of a page."""
    count, num_heads, head_dim = k.shape
    keys, values = token_views(page, block_size, num_heads, head_dim)
    unit, pair = min(block_size, 16), values.shape[2]
    tokens = torch.arange(count)
    places = tokens // unit, tokens % unit // pair, tokens % pair
    keys[places] = k.unflatten(-1, (head_dim // pair, pair))
    values[places] = v


@dataclass
class NativeStep(PagedStep):
    """A `PagedStep` whose queries have the KV dtype, as the native kernels want them."""

    def __post_init__(self):
        self.q_dtype = self.dtype
        super().__post_init__()

    def fill(self, contexts):
        for layer, spec, k, v in zip(self.layers, self.specs, self.k, self.v, strict=True):
            for i, context in enumerate(contexts):
                for number in range(-(-context // self.block_size)):
                    first = number * self.block_size
                    tokens = slice(first, min(first + self.block_size, context))
                    page = layer.pages[self.tables[layer.group][i][number]].view(self.dtype)
                    if spec.value_dim is None:
                        values = spec.with_zeros(v[i][tokens])
                        store_tokens(page, self.block_size, k[i][tokens], values)
                    else:
                        stored = k[i][tokens].flatten()
                        page[: len(stored)] = stored
