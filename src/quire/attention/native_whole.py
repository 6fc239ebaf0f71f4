"""Attention in both directions over one whole array of keys, by the native CPU kernels.

It serves encoders of images, whose keys are all known before the first query, and are not kept. The
keys and values are copied into pages of their own, which the kernels of the paged KV cache read. A
query's result has the same bits whichever queries are computed in the same call.

Shapes: P keys, R queries, N heads, D head size.
"""

import ctypes

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels

BLOCK_TOKENS = 256
"""Keys of a page: a tile of the kernels."""


class NativeWholeAttention:
    """The keys and values of one array, for any number of calls."""

    def __init__(
        self, kernels: NativeKernels, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        """k and v are [P, N, D], fp32 or bf16, with an even D. `scale` multiplies q·k."""
        num_keys, num_heads, head_dim = k.shape
        num_blocks = -(-num_keys // BLOCK_TOKENS)
        page_bytes = 2 * BLOCK_TOKENS * num_heads * head_dim * k.element_size()
        self._kernels = kernels
        self._pages = torch.empty(num_blocks, page_bytes, dtype=torch.uint8)
        self._layer = abi.AttentionLayer(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            block_size=BLOCK_TOKENS,
            dtype=abi.DTYPES[k.dtype],
            causal=False,
            scale=scale,
            pages=self._pages.data_ptr(),
            page_stride=page_bytes,
            kv_format=abi.KVLayout.PLAIN,
        )
        # One sequence, whose blocks follow one another.
        self._table = torch.arange(num_blocks, dtype=torch.int32)
        self._slots = torch.arange(num_keys, dtype=torch.int64)
        self._ends = torch.tensor([0, num_keys], dtype=torch.int32)
        self._row = torch.zeros(1, dtype=torch.int64)
        self._group = (abi.KVGroupStep * 1)()
        self._group[0].block_tables = self._table.data_ptr()
        self._group[0].table_stride = num_blocks
        self._group[0].slot_mapping = self._slots.data_ptr()
        if not _has_rows(k) or not _has_rows(v) or k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        step, stride = self._step(num_keys), k.stride(0)
        kernels.library.write_kv(
            kernels.context, self._layer, step, k.data_ptr(), v.data_ptr(), stride
        )

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [R, N, D] of the keys' dtype -> the mixed values [R, N, D]."""
        if not _has_rows(q):
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        kernels = self._kernels
        kernels.library.attention(
            kernels.context,
            self._layer,
            self._step(len(q)),
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            None,
        )
        return out

    def _step(self, num_tokens: int) -> abi.Step:
        """A step of one sequence that has all keys, with this number of queries."""
        self._query_start = torch.tensor([0, num_tokens], dtype=torch.int32)
        return abi.Step(
            num_tokens=num_tokens,
            num_sequences=1,
            num_groups=1,
            query_start=self._query_start.data_ptr(),
            context_lens=self._ends[1:].data_ptr(),
            rows=self._row.data_ptr(),
            groups=ctypes.addressof(self._group),
        )


def _has_rows(x: torch.Tensor) -> bool:
    """Whether the heads and elements of each row of x [R, N, D] are contiguous."""
    return x.stride()[1:] == (x.shape[2], 1)
