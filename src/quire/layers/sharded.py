"""Splits a model's layers over ranks, without change to the model.

    column linears   hold some outputs of each of their parts; nothing travels
    row linears      hold some inputs, so their outputs are parts of a sum over all ranks
    experts          are of column and row linears; the sum over ranks is of all of them together
    embedding        holds the vectors of some tokens, zeros for the others, summed as well
    head             holds the logits of the same tokens; those of all ranks are put side by side

So all ranks have the same hidden states, and the same logits to sample from. A model is built as a
small one, with a rank's number of heads and so on (`models.sharding`), and knows nothing of this.
How weights are stored and multiplied is the business of the method inside, which sees a linear of
the share's size. (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.)

Shapes: N ranks, T tokens, R rows that need logits, H hidden size, V vocabulary size, I input size,
O output size, of the share where nothing else is said.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from quire.distributed.group import RankGroup
from quire.formats.coded import CodedMethods, PartsMethod
from quire.formats.codes import CodedRows, Coding
from quire.formats.weight_format import LinearMethod, LinearModule, RowSource, Shape
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.experts import SparseMLP
from quire.layers.linear import Linear, LinearKind, WeightSlot


def vocab_share(vocab_size: int, rank: int, size: int) -> range:
    """The tokens that a rank holds: equal shares, but for the last, which may be smaller."""
    width = -(-vocab_size // size)
    return range(min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one rank's layers work together with those of the others. vocab_size: V of the whole."""

    group: RankGroup
    vocab_size: int

    def wrap(self, linear: Linear, method: LinearMethod) -> LinearMethod:
        """The method for a linear of the share, around the one that stores and multiplies."""
        if isinstance(linear, LMHead):
            return GatheredMethod(method, self.group, self.vocab_size)
        if linear.kind is not LinearKind.ROW:
            return method
        wrapped = PartialMethod if linear.is_summed_later else SummedMethod
        return wrapped(method, self.group)

    def join(self, model: nn.Module) -> None:
        """Let the model's embedding take all tokens, and its experts be summed over ranks."""
        tokens = vocab_share(self.vocab_size, self.group.rank, self.group.size)
        for module in model.modules():
            if isinstance(module, VocabEmbedding):
                module.shard = EmbeddingShard(self.group, tokens)
            elif isinstance(module, SparseMLP):
                module.join = self.group.sum

    def cut(self, slot: WeightSlot, whole: tuple[int, ...]) -> WeightSlot:
        """The place of a tensor of shape `whole` of which `slot` takes this rank's share."""
        axes = [axis for axis, size in enumerate(slot.shape) if size != whole[axis]]
        if not axes:
            return slot
        (axis,) = axes
        start = self._share_start(slot.shape[axis], whole[axis])
        cut = (_RowCut if axis == 0 else _ColumnCut)(slot, start, start + slot.shape[axis])
        return WeightSlot(whole, cut, cut.load_codes if slot.load_codes else None, slot.part)

    def _share_start(self, share: int, whole: int) -> int:
        rank, size = self.group.rank, self.group.size
        width = -(-whole // size)
        if share <= width:
            return rank * width
        # There are fewer KV heads than ranks: as many ranks as share one have the same.
        return rank * (whole // share) // size * share


PartCodings = Sequence[Coding | None]
"""Of a linear's parts."""


@dataclass(frozen=True, slots=True)
class LinearMethods:
    """What stores and multiplies the weights of a model's linears.

    method: of the model's weight format. sharding: where each of several ranks has a share of the
    model; None: there is one. dense: of linears that stay dense; None: `method`, which is exact.
    head: of vocabulary projections; None: `method`.
    coded: of weights that the checkpoint has as codes; None: they become numbers of `method`.
    groups_experts: all experts of a layer must be multiplied at once, as a step waits for nothing.
    """

    method: LinearMethod
    sharding: Sharding | None = None
    dense: LinearMethod | None = None
    head: LinearMethod | None = None
    coded: CodedMethods | None = None
    groups_experts: bool = False

    def of(self, linear: Linear, codings: PartCodings = ()) -> LinearMethod:
        """The method for this linear. codings: of its parts in the checkpoint; empty: none is
        coded."""
        method = self.stored_by(linear, codings)
        return method if self.sharding is None else self.sharding.wrap(linear, method)

    def stored_by(self, linear: Linear, codings: PartCodings = ()) -> LinearMethod:
        """The method that stores and multiplies this linear's weights, of a share's size or not."""
        if linear.stays_dense:
            dense = self.method if self.dense is None else self.dense
            assert dense.is_exact, "a format that rounds needs a dense method beside it"
            return dense
        own = self.head if self.head is not None and isinstance(linear, LMHead) else self.method
        methods = [self.of_coding(coding) or own for coding in codings]
        if not methods:
            return own
        first, *others = methods
        if all(each is first for each in others):
            return first
        return PartsMethod(methods, linear.part_sizes)

    def of_coding(self, coding: Coding | None) -> LinearMethod | None:
        """What keeps weights of this coding as they are; None: nothing does."""
        return None if coding is None or self.coded is None else self.coded.of(coding)

    def keeps(self, coding: Coding, linear: Linear) -> bool:
        """Whether weights of this coding stay codes in `linear`, of the whole model."""
        if linear.stays_dense or self.of_coding(coding) is None:
            return False
        if self.sharding is None or linear.shard_axis != 1:
            return True
        # A share of the inputs may end within a group: then numbers of the model's dtype are cut.
        share = linear.input_size // self.sharding.group.size
        return bool(coding.alignment) and share % coding.alignment == 0


@dataclass(frozen=True, slots=True)
class _RowCut:
    """Takes rows of a whole tensor and loads those that are in [start, stop). See `WeightSlot`."""

    slot: WeightSlot
    start: int
    stop: int

    def __call__(self, first_row: int, rows: torch.Tensor) -> None:
        first, last = max(first_row, self.start), min(first_row + len(rows), self.stop)
        if first < last:
            self.slot.load(first - self.start, rows[first - first_row : last - first_row])

    def load_codes(self, first_row: int, rows: CodedRows) -> None:
        """The same of codes."""
        first, last = max(first_row, self.start), min(first_row + len(rows), self.stop)
        if first < last:
            assert self.slot.load_codes is not None
            self.slot.load_codes(first - self.start, rows.rows(first - first_row, last - first_row))


@dataclass(frozen=True, slots=True)
class _ColumnCut:
    """Takes rows of a whole tensor and loads [start, stop) of each. See `WeightSlot`."""

    slot: WeightSlot
    start: int
    stop: int

    def __call__(self, first_row: int, rows: torch.Tensor) -> None:
        self.slot.load(first_row, rows[:, self.start : self.stop])

    def load_codes(self, first_row: int, rows: CodedRows) -> None:
        """The same of codes, whose coding allows it."""
        assert self.slot.load_codes is not None
        self.slot.load_codes(first_row, rows.columns(self.start, self.stop))


class _WrappedMethod(LinearMethod):
    """Stores and loads as `inner` does; what becomes of its product is said below."""

    def __init__(self, inner: LinearMethod, group: RankGroup) -> None:
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

    def takes_codes_of(self, index: int) -> bool:
        return self._inner.takes_codes_of(index)

    def load_codes(self, linear: LinearModule, index: int, first_row: int, rows: CodedRows) -> None:
        self._inner.load_codes(linear, index, first_row, rows)

    def finish(self, linear: LinearModule) -> None:
        self._inner.finish(linear)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return self._inner.num_bytes(num_outputs, num_inputs, dtype)

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowSource | None:
        return self._inner.tie(linear, table)

    @abstractmethod
    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


class PartialMethod(_WrappedMethod):
    """Of a row linear whose outputs are summed over ranks later."""

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        if parameter == "bias" and self._group.rank > 0:
            rows = torch.zeros_like(rows)  # the sum is to have it once
        super().load_part(linear, parameter, index, first_row, rows)

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._inner.apply(linear, x, out_dtype)


class SummedMethod(PartialMethod):
    """Of a row linear: the outputs are summed over ranks, in the dtype that they come in."""

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._group.sum(self._inner.apply(linear, x, out_dtype))


class GatheredMethod(_WrappedMethod):
    """Of the head: the logits of all ranks, [R, V of the whole]."""

    def __init__(self, inner: LinearMethod, group: RankGroup, vocab_size: int) -> None:
        super().__init__(inner, group)
        self._vocab_size = vocab_size

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        logits = self._inner.apply(linear, x, out_dtype)
        width = len(vocab_share(self._vocab_size, 0, self._group.size))
        if logits.shape[1] < width:
            logits = functional.pad(logits, (0, width - logits.shape[1]))
        parts = self._group.gather(logits).unbind()
        return torch.cat(parts, dim=1)[:, : self._vocab_size].contiguous()


@dataclass(frozen=True, slots=True)
class EmbeddingShard:
    """Looks up the tokens of one rank. tokens: which these are."""

    group: RankGroup
    tokens: range

    def __call__(
        self, token_ids: torch.Tensor, look_up: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """token_ids [T] of the whole vocabulary -> [T, H]. look_up: in this rank's vectors."""
        others = (token_ids < self.tokens.start) | (token_ids >= self.tokens.stop)
        found = look_up((token_ids - self.tokens.start).masked_fill_(others, 0))
        return self.group.sum(found.masked_fill_(others.unsqueeze(1), 0))
