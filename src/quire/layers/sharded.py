"""Tensor parallelism: splits a model's layers over ranks, without changes to the model.

    column linears   hold some outputs of each fused part (q, k, v; gate, up)
    row linears      hold some inputs; their outputs are summed over ranks
    experts          consist of column and row linears; the sum over experts is summed over ranks
    embedding        looks up a slice of the vocabulary, zeros for other ids; summed over ranks
    head             computes logits of the same vocabulary slice; gathered from all ranks

All ranks have the same hidden states and the same logits. A rank's model is built as a smaller
model, for example with fewer heads (`models.sharding`). Each linear's method is wrapped to add
communication; the wrapped method sees a linear of the shard's size. (Shoeybi et al., Megatron-LM,
arXiv:1909.08053, section 3.)

Shapes: T tokens, R rows that need logits, H hidden size, V vocabulary size of the whole model.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from quire.distributed.group import ProcessGroup
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods, PartsMethod
from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.formats.weight_format import LinearMethod, LinearModule, Shape
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.operators import RowTable
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.experts import SparseMLP
from quire.layers.linear import Linear, LinearKind, WeightSlot


def vocab_share(vocab_size: int, rank: int, size: int) -> range:
    """The vocabulary ids that a rank holds. All ranks hold equally many, except that the last may
    hold fewer."""
    width = -(-vocab_size // size)
    return range(min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))


@dataclass(frozen=True, slots=True)
class Sharding:
    """Connects the layers of one rank with those of the other ranks."""

    group: ProcessGroup
    #: The vocabulary size of the whole model.
    vocab_size: int

    def wrap(self, linear: Linear, method: LinearMethod) -> LinearMethod:
        """Wrap the method of this rank's shard of a linear, so that it communicates with other
        ranks."""
        if isinstance(linear, LMHead):
            return GatheredMethod(method, self.group, self.vocab_size)
        if linear.kind is not LinearKind.ROW:
            return method
        wrapped = PartialMethod if linear.is_summed_later else SummedMethod
        return wrapped(method, self.group)

    def join(self, model: nn.Module) -> None:
        """Connect the model's embedding and its mixtures of experts with the other ranks."""
        tokens = vocab_share(self.vocab_size, self.group.rank, self.group.size)
        for module in model.modules():
            if isinstance(module, VocabEmbedding):
                module.shard = EmbeddingShard(self.group, tokens)
            elif isinstance(module, SparseMLP):
                module.join = self.group.sum

    def cut(self, slot: WeightSlot, whole: tuple[int, ...]) -> WeightSlot:
        """A slot that takes a whole tensor of shape `whole`, and loads this rank's shard of it into
        `slot`."""
        axes = [axis for axis, size in enumerate(slot.shape) if size != whole[axis]]
        if not axes:  # every rank has the whole tensor
            return slot
        (axis,) = axes
        start = self._share_start(slot.shape[axis], whole[axis])
        cut = (_RowCut if axis == 0 else _ColumnCut)(slot, start, start + slot.shape[axis])
        return WeightSlot(
            whole, cut, cut.load_quantized if slot.load_quantized else None, slot.part
        )

    def _share_start(self, share: int, whole: int) -> int:
        rank, size = self.group.rank, self.group.size
        width = -(-whole // size)
        if share <= width:
            return rank * width
        # There are fewer KV heads than ranks, so several ranks have the same heads.
        return rank * (whole // share) // size * share


PartBlockFormats = Sequence[BlockFormat | None]
"""The block formats of a linear's parts; None for a part that is not block-quantized."""


@dataclass(frozen=True, slots=True)
class LinearMethods:
    """The methods that store and multiply the weights of a model's linears."""

    #: The method of the model's weight format.
    method: LinearMethod
    #: None if the model is on one rank.
    sharding: Sharding | None = None
    #: The method of linears that stay dense; None if `method` is exact and used for them too.
    dense: LinearMethod | None = None
    #: The method of vocabulary projections; None means `method`.
    head: LinearMethod | None = None
    #: Methods for block-quantized weights of the checkpoint; None if these are dequantized.
    block_quantized: BlockQuantizedMethods | None = None
    #: Whether a layer's experts must be multiplied in one call, since steps can't wait for the
    #: device.
    groups_experts: bool = False
    #: The layers that the CPU computes for a model on another device; None if it computes none.
    host: "HostPart | None" = None

    def with_host(self, num_layers: int) -> "LinearMethods":
        """A copy in which the host computes `num_layers` layers, or their experts, instead."""
        assert self.host is not None
        return replace(self, host=replace(self.host, num_layers=num_layers) if num_layers else None)

    def of(self, linear: Linear, block_formats: PartBlockFormats = ()) -> LinearMethod:
        """The method for this linear.

        `block_formats` has the block format of each part (q, k, v) in the checkpoint; empty if no
        part is block-quantized.
        """
        method = self.stored_by(linear, block_formats)
        return method if self.sharding is None else self.sharding.wrap(linear, method)

    def stored_by(self, linear: Linear, block_formats: PartBlockFormats = ()) -> LinearMethod:
        """The linear's method without the wrapper for several ranks."""
        if linear.is_on_host and self.host is not None:
            return self.host.methods.stored_by(linear, block_formats)
        if linear.stays_dense:
            dense = self.method if self.dense is None else self.dense
            assert dense.is_exact, "a format that rounds needs a dense method beside it"
            return dense
        own = self.head if self.head is not None and isinstance(linear, LMHead) else self.method
        methods = [self.of_block_format(block_format) or own for block_format in block_formats]
        if not methods:
            return own
        # If parts have different methods, each part is stored and multiplied separately.
        first, *others = methods
        if all(each is first for each in others):
            return first
        return PartsMethod(methods, linear.part_sizes)

    def of_block_format(self, block_format: BlockFormat | None) -> LinearMethod | None:
        """The method that stores weights in this block format; None if they are dequantized."""
        methods = self.block_quantized
        return None if block_format is None or methods is None else methods.of(block_format)

    def keeps(self, block_format: BlockFormat, linear: Linear) -> bool:
        """Whether weights of this block format stay block-quantized in `linear` of the whole
        model."""
        if linear.is_on_host and self.host is not None:
            return self.host.methods.keeps(block_format, linear)
        if linear.stays_dense or self.of_block_format(block_format) is None:
            return False
        if self.sharding is None or linear.shard_axis != 1:
            return True
        # If a rank's share of the inputs ends within a group of the block format, weights are
        # dequantized.
        share = linear.input_size // self.sharding.group.size
        return bool(block_format.alignment) and share % block_format.alignment == 0


@dataclass(frozen=True, slots=True)
class HostPart:
    """The part of a model that the CPU stores and computes, while another device computes the
    rest."""

    #: The methods of the CPU.
    methods: LinearMethods
    #: The kernels that these methods use; None if torch computes.
    kernels: NativeKernels | None
    #: Number of layers, counted from the last layer. If the CPU computes only experts, this counts
    #: layers with experts, and a number above theirs means all of them.
    num_layers: int
    #: Whether only the layers' experts are computed by the CPU.
    has_experts_only: bool


@dataclass(frozen=True, slots=True)
class _RowCut:
    """Loads those rows of a whole tensor that are in [start, stop). See `WeightSlot`."""

    slot: WeightSlot
    start: int
    stop: int

    def __call__(self, first_row: int, rows: torch.Tensor) -> None:
        first, last = max(first_row, self.start), min(first_row + len(rows), self.stop)
        if first < last:
            self.slot.load(first - self.start, rows[first - first_row : last - first_row])

    def load_quantized(self, first_row: int, rows: BlockQuantizedRows) -> None:
        """Load block-quantized rows in [start, stop)."""
        first, last = max(first_row, self.start), min(first_row + len(rows), self.stop)
        if first < last:
            assert self.slot.load_quantized is not None
            self.slot.load_quantized(
                first - self.start, rows.rows(first - first_row, last - first_row)
            )


@dataclass(frozen=True, slots=True)
class _ColumnCut:
    """Loads columns [start, stop) of rows of a whole tensor. See `WeightSlot`."""

    slot: WeightSlot
    start: int
    stop: int

    def __call__(self, first_row: int, rows: torch.Tensor) -> None:
        self.slot.load(first_row, rows[:, self.start : self.stop])

    def load_quantized(self, first_row: int, rows: BlockQuantizedRows) -> None:
        """Load the columns of block-quantized rows; they must be aligned as the block format
        requires."""
        assert self.slot.load_quantized is not None
        self.slot.load_quantized(first_row, rows.columns(self.start, self.stop))


class _WrappedMethod(LinearMethod):
    """Stores and loads weights by the method `inner`. Subclasses add communication after the
    product."""

    def __init__(self, inner: LinearMethod, group: ProcessGroup) -> None:
        self._inner = inner
        self._group = group

    @property
    def is_exact(self) -> bool:
        return self._inner.is_exact

    @property
    def storage(self) -> LinearMethod:
        return self._inner.storage

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inner.create(linear, bias, dtype, device)

    def tensors(self, linear: LinearModule) -> dict[tuple[str, int], Shape]:
        return self._inner.tensors(linear)

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        self._inner.load_part(linear, parameter, index, first_row, rows)

    def takes_quantized(self, index: int) -> bool:
        return self._inner.takes_quantized(index)

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        self._inner.load_quantized(linear, index, first_row, rows)

    def finish(self, linear: LinearModule) -> None:
        self._inner.finish(linear)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return self._inner.num_bytes(num_outputs, num_inputs, dtype)

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowTable | None:
        return self._inner.tie(linear, table)

    @abstractmethod
    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


class PartialMethod(_WrappedMethod):
    """The method of a row linear whose outputs the containing module sums over ranks later."""

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        if parameter == "bias" and self._group.rank > 0:
            rows = torch.zeros_like(rows)  # the sum over ranks must contain the bias once
        super().load_part(linear, parameter, index, first_row, rows)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._inner.apply(linear, x, out_dtype)


class SummedMethod(PartialMethod):
    """The method of a row linear, which sums the outputs over ranks in their own dtype."""

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._group.sum(self._inner.apply(linear, x, out_dtype))


class GatheredMethod(_WrappedMethod):
    """The method of the head, which gathers the logits [R, V] of all ranks."""

    def __init__(self, inner: LinearMethod, group: ProcessGroup, vocab_size: int) -> None:
        super().__init__(inner, group)
        self._vocab_size = vocab_size

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        logits = self._inner.apply(linear, x, out_dtype)
        # The logits of the last ranks are padded if they are fewer, since all ranks must gather
        # equal shapes.
        width = len(vocab_share(self._vocab_size, 0, self._group.size))
        if logits.shape[1] < width:
            logits = functional.pad(logits, (0, width - logits.shape[1]))
        parts = self._group.gather(logits).unbind()
        return torch.cat(parts, dim=1)[:, : self._vocab_size].contiguous()


@dataclass(frozen=True, slots=True)
class EmbeddingShard:
    """Looks up the embeddings of the vocabulary ids that a rank holds, and sums over ranks."""

    group: ProcessGroup
    tokens: range

    def __call__(
        self, token_ids: torch.Tensor, look_up: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """token_ids [T] of the whole vocabulary -> [T, H].

        `look_up` returns this rank's embedding vectors by their indices.
        """
        others = (token_ids < self.tokens.start) | (token_ids >= self.tokens.stop)
        found = look_up((token_ids - self.tokens.start).masked_fill_(others, 0))
        return self.group.sum(found.masked_fill_(others.unsqueeze(1), 0))
