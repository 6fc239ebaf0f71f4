"""Token embedding and output head: ids to vectors, vectors to logits.

Called by the models.

Shapes: T tokens, R rows that need logits, H hidden size, V vocabulary size.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
from torch import nn

from quire.formats.weight_format import LinearMethod, LinearModule, empty_parameter
from quire.kernels.operators import RowTable
from quire.layers.linear import Linear, LinearKind, WeightSlot
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage

LookUp = Callable[[torch.Tensor], torch.Tensor]
"""token_ids [T], each below V -> [T, H]."""


class VocabEmbedding(OperatorModule):
    """One vector of the model's width for each token id.

    Exactly one of `weight` and `source` is set.
    """

    #: The vectors [V, H]; None if they are stored in `source`.
    weight: torch.Tensor | None

    def __init__(self, vocab_size: int, hidden_size: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.weight = empty_parameter((vocab_size, hidden_size), **storage)
        #: Returns the vectors if a tied head or `keep_quantized` stores them; None if they are in
        #: `weight`.
        self.source: RowTable | None = None
        #: The method that stores the vectors block-quantized, as in the checkpoint; None if they
        #: are not.
        self.method: LinearMethod | None = None
        # In a tuple, since torch would register a plain attribute as a submodule.
        self._quantized: tuple[LinearModule, ...] = ()
        #: Looks up ids of the whole vocabulary over all ranks. It calls a function that looks up
        #: this rank's vectors. None if there is one rank.
        self.shard: Callable[[torch.Tensor, LookUp], torch.Tensor] | None = None

    @property
    def active_share(self) -> float:
        """The fraction of the table that one token reads; see `models.footprint`."""
        return 1 / self.vocab_size

    def take_rows_from(self, source: RowTable) -> None:
        """Free the table `weight`, and read vectors from `source` from now on."""
        self.weight, self.source = None, source

    def keep_quantized(
        self, method: LinearMethod, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Let `method` store the table as the weight of a linear that is used only for look-ups."""
        assert isinstance(self.weight, nn.Parameter)
        table = LinearModule(self.hidden_size, (self.vocab_size,), has_bias=False)
        method.create(table, False, dtype, device)
        source = method.tie(table, self.weight)
        assert source is not None, "a method that keeps codes gives rows back"
        self.method, self._quantized = method, (table,)
        self.take_rows_from(source)

    def quantized_slot(self) -> WeightSlot | None:
        """The slot that fills the table of `keep_quantized`; None if it was not called."""
        if not self._quantized:
            return None
        assert self.method is not None
        (table,) = self._quantized
        load = partial(self.method.load_part, table, "weight", 0)
        load_quantized = partial(self.method.load_quantized, table, 0)
        return WeightSlot((self.vocab_size, self.hidden_size), load, load_quantized)

    def finish(self) -> None:
        """Must be called after the table is filled."""
        for table in self._quantized:
            assert self.method is not None
            self.method.finish(table)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64, each below V -> [T, H]."""
        if self.shard is not None:
            return self.shard(token_ids, self._look_up)
        return self._look_up(token_ids)

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self.weight if self.source is None else self.source
        assert table is not None
        return self.operators.embed(table, token_ids)


class PositionEmbedding(OperatorModule):
    """One vector of the model's width for each position."""

    def __init__(self, max_positions: int, hidden_size: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.weight = empty_parameter((max_positions, hidden_size), **storage)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] int64 -> [T, H]."""
        return self.operators.embed(self.weight, positions)


class LMHead(Linear):
    """Logits over the vocabulary.

    A tied head shares the embedding's weight, which is stored once: as the embedding's table, or by
    this linear's method if the method is exact.
    """

    def __init__(self, embedding: VocabEmbedding, *, tied: bool) -> None:
        table = embedding.weight
        assert table is not None
        super().__init__(
            embedding.hidden_size,
            (embedding.vocab_size,),
            LinearKind.COLUMN,
            bias=False,
            dtype=table.dtype,
            device=table.device,
        )
        # In a tuple, since torch would register a plain attribute as a submodule.
        self._tied_to = (embedding,) if tied else ()
        self._tie()

    def use(self, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        super().use(method, dtype, device)
        self._tie()

    def _tie(self) -> None:
        for embedding in self._tied_to:
            assert isinstance(embedding.weight, nn.Parameter), "a tied head changes its method once"
            source = self.method.tie(self, embedding.weight)
            if source is not None:
                embedding.take_rows_from(source)

    def slots(self) -> dict[tuple[str, int], WeightSlot]:
        """The slots; empty if the weight is the embedding's table, which has its own slot."""
        weight = self._parameters.get("weight")
        if weight is not None and any(weight is each.weight for each in self._tied_to):
            return {}
        return super().slots()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> [R, V] fp32. The product may be computed in the model's dtype."""
        logits = self.method.apply(self, hidden, torch.float32)
        return logits if self.adapter is None else self.adapter(hidden, logits)
