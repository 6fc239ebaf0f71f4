"""The layers of towers, computed in pieces of a fixed size.

The pieces are the slices of `VisionTower.encode`. A piece's size depends on the layer alone, and
the results of a row don't depend on the other rows of its piece.

Shapes: P patches, R rows of a piece, H hidden size, N heads, D head size, O output size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from quire.attention.native_whole import NativeWholeAttention
from quire.kernels.cpu.abi import AttentionLayer
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.program import RowsProgram, SpareRows
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.layers.operator_module import OperatorModule, recorded_by
from quire.models.vision.vision_tower import Slices

PIECE_ROWS = 128
"""Rows of a piece of a layer that computes each row alone. With 1,152 inputs and 4,304 outputs a
piece takes about 1.3 GFLOP."""

WIDE_PIECE_ROWS = 32
"""Rows of a piece of connectors, whose linears have about 4,096 inputs and as many outputs."""

PIECE_SCORES = 1 << 20
"""Products of a query and a key in a piece of attention, for one head."""

PIECE_QUERIES = 64
"""Queries of a piece are a multiple of this number."""

NATIVE_PIECE_PRODUCTS = 1 << 28
"""Multiplications of queries by keys in a piece of native attention, over all heads. A piece takes
about 1.1 GFLOP."""

NATIVE_PIECE_QUERIES = 32
"""Queries of a piece of native attention are a multiple of this number."""

GPU_PIECES = 16
"""Pieces that a slice computes at once on a GPU, where one would take less time than its launch."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Slices[torch.Tensor]]
"""Attention of all queries to all keys: q, k, v [P, N, D] and the factor of q·k -> [P, N, D]."""


RowLayer = Callable[..., torch.Tensor]
"""A layer that computes each row alone."""

Turn = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The rotation of q and k, [P, N, D] each."""


def in_pieces(
    layer: RowLayer | RowsProgram, *inputs: torch.Tensor, num_rows: int = PIECE_ROWS
) -> Slices[torch.Tensor]:
    """Apply a layer that computes each row alone: inputs [P, any] -> [P, O].

    `num_rows` is the number of rows of a piece, less than the default for layers of more work.
    The layer may overwrite the inputs that the caller no longer needs.
    """
    num_patches = len(inputs[0])
    num_rows *= _num_at_once(inputs[0])
    parts = [slice(first, first + num_rows) for first in range(0, num_patches, num_rows)]
    if isinstance(layer, RowsProgram):
        out = layer.empty(num_patches)
        for part in parts:
            layer.run(*(each[part] for each in inputs), out=out[part])
            yield
        return out
    found: list[torch.Tensor] = []
    for part in parts:
        found.append(layer(*(each[part] for each in inputs)))
        yield
    return torch.cat(found) if len(found) > 1 else found[0]


def _num_at_once(x: torch.Tensor) -> int:
    """Number of pieces that a slice computes on the device of x."""
    return GPU_PIECES if x.is_cuda else 1


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Slices[torch.Tensor]:
    """Attention of all queries to all keys, in both directions.

    q, k and v are [P, N, D], after any rotation -> [P, N, D] in q's dtype. Computed in fp32.
    """
    heads_q, heads_k, heads_v = (each.float().transpose(0, 1) for each in (q, k, v))
    out = torch.empty(heads_q.shape, dtype=torch.float32, device=q.device)
    num_scores = PIECE_SCORES * _num_at_once(q)
    num_queries = max(PIECE_QUERIES, num_scores // len(k) // PIECE_QUERIES * PIECE_QUERIES)
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
    """A part of a tower with attention. torch computes it until `use_kernels` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Attend = attend

    def use_kernels(self, kernels: NativeKernels, spare: SpareRows) -> None:
        """Let native kernels compute it. `spare` is shared by the whole tower."""
        self.attend = native_attend(kernels)


class EncoderLayer(AttendingModule, ABC):
    """Attention and an MLP of a tower, each with a norm before it and added to its input."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        #: The native program of `project`; None if torch computes it. Likewise for `finish`.
        self.projecting: RowsProgram | None = None
        self.finishing: RowsProgram | None = None

    @abstractmethod
    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> q, k and v before their rotation, side by side [R, 3H]."""

    @abstractmethod
    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer after its attention: hidden, attended [R, H] -> [R, H]."""

    def encode(self, hidden: torch.Tensor, turn: Turn | None = None) -> Slices[torch.Tensor]:
        """hidden [P, H] -> [P, H]. Without `turn`, q and k are not rotated."""
        qkv = yield from in_pieces(self.projecting or self.project, hidden)
        q, k, v = (each.view(len(each), self.num_heads, -1) for each in qkv.chunk(3, dim=1))
        if turn is not None:
            q, k = turn(q, k)
        attended = yield from self.attend(q, k, v, (self.hidden_size // self.num_heads) ** -0.5)
        finishing = self.finishing or self.finish
        return (yield from in_pieces(finishing, hidden, attended.flatten(1)))

    def use_kernels(self, kernels: NativeKernels, spare: SpareRows) -> None:
        super().use_kernels(kernels, spare)
        self.projecting = self._record(kernels, self.project, 1, spare)
        self.finishing = self._record(kernels, self.finish, 2, spare)

    def _record(
        self, kernels: NativeKernels, layer: RowLayer, num_inputs: int, spare: SpareRows
    ) -> RowsProgram | None:
        """The native program of a method; None if an operation has no native kernel."""
        dtype = next(self.parameters()).dtype
        recorder = Recorder(kernels, dtype, PIECE_ROWS, (AttentionLayer * 0)())
        try:
            with recorded_by(recorder, self):
                rows = [recorder.rows(self.hidden_size) for _ in range(num_inputs)]
                return recorder.finish_rows(rows, layer(*rows), spare)
        except UnrecordableError:
            return None


def use_kernels(tower: nn.Module, kernels: NativeKernels | None) -> None:
    """Let native kernels compute a loaded tower; None changes nothing."""
    spare: SpareRows = {}
    for module in tower.modules():
        if isinstance(module, AttendingModule) and kernels is not None:
            module.use_kernels(kernels, spare)
