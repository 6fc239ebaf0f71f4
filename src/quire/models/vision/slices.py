"""Attention and layers of towers, computed in pieces of a fixed size.

The pieces are the slices of `VisionTower.encode`. A piece's size depends on the layer alone, and
the results of a row don't depend on the other rows of its piece.

Shapes: P patches, N heads, D head size, I input size, O output size.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from quire.attention.native_whole import NativeWholeAttention
from quire.kernels.cpu.library import NativeKernels
from quire.layers.operator_module import OperatorModule
from quire.models.vision.vision_tower import Slices

PIECE_ROWS = 128
"""Rows of a piece of a layer that computes each row alone. With 1,152 inputs and 4,304 outputs a
piece takes about 1.3 GFLOP."""

WIDE_PIECE_ROWS = 32
"""Rows of a piece of connectors, whose linears have about 4,096 inputs and as many outputs."""

PIECE_SCORES = 1 << 20
"""Products of a query and a key, of one head, in a piece of attention."""

PIECE_QUERIES = 64
"""Queries of a piece are a multiple of this number."""

NATIVE_PIECE_PRODUCTS = 1 << 28
"""Multiplications of queries by keys in a piece of native attention, over all heads. A piece takes
about 1.1 GFLOP."""

NATIVE_PIECE_QUERIES = 32
"""Queries of a piece of native attention are a multiple of this number."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Slices[torch.Tensor]]
"""Attention of all queries to all keys: q, k, v [P, N, D] and the factor of q·k -> [P, N, D]."""


def in_pieces(
    layer: Callable[..., torch.Tensor], *inputs: torch.Tensor, num_rows: int = PIECE_ROWS
) -> Slices[torch.Tensor]:
    """Apply a layer that computes each row alone: inputs [P, any] -> [P, O].

    `num_rows` is the number of rows of a piece, less than the default for layers of more work.
    The layer may overwrite the inputs that the caller no longer needs.
    """
    found: list[torch.Tensor] = []
    for first in range(0, len(inputs[0]), num_rows):
        found.append(layer(*(each[first : first + num_rows] for each in inputs)))
        yield
    return torch.cat(found) if len(found) > 1 else found[0]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Slices[torch.Tensor]:
    """Attention of all queries to all keys, in both directions.

    q, k and v are [P, N, D], after any rotation -> [P, N, D] in q's dtype. Computed in fp32.
    """
    heads_q, heads_k, heads_v = (each.float().transpose(0, 1) for each in (q, k, v))
    out = torch.empty(heads_q.shape, dtype=torch.float32, device=q.device)
    num_queries = max(PIECE_QUERIES, PIECE_SCORES // len(k) // PIECE_QUERIES * PIECE_QUERIES)
    for head in range(q.shape[1]):
        keys, values = heads_k[head].contiguous(), heads_v[head].contiguous()
        for first in range(0, len(q), num_queries):
            part = slice(first, first + num_queries)
            scores = functional.linear(heads_q[head, part], keys).mul_(scale)
            out[head, part] = torch.softmax(scores, dim=-1) @ values
            yield
    return out.transpose(0, 1).to(q.dtype)


def native_attend(kernels: NativeKernels) -> Attend:
    """The same as `attend`, computed by native kernels."""

    def attend_natively(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Slices[torch.Tensor]:
        keys = NativeWholeAttention(kernels, k, v, scale)
        yield
        step = NATIVE_PIECE_QUERIES
        step *= max(1, NATIVE_PIECE_PRODUCTS // k.numel() // NATIVE_PIECE_QUERIES)
        found: list[torch.Tensor] = []
        for first in range(0, len(q), step):
            found.append(keys(q[first : first + step]))
            yield
        return torch.cat(found)

    return attend_natively


class AttendingModule(OperatorModule):
    """A layer of a tower that computes attention by `attend`, which is torch's until `use_kernels`
    replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Attend = attend


def use_kernels(tower: nn.Module, kernels: NativeKernels | None) -> None:
    """Let native kernels compute the attention of all the tower's layers; None changes nothing."""
    for module in tower.modules():
        if isinstance(module, AttendingModule) and kernels is not None:
            module.attend = native_attend(kernels)
