"""The contents that several ranks read, which rank 0 encodes and sends.

Only rank 0 has the encoder and the requests' inputs. It sends the embeddings of a content when a
plan loads them into a slot, since all ranks carry out each plan. So all ranks read equal bits.
Called by `model_runner`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.core.step import ItemLoad
from quire.distributed.group import ProcessGroup
from quire.models.interface import InputEmbeds
from quire.runtime.batch import ContentPiece
from quire.runtime.contents.content_slots import ContentSlots
from quire.runtime.contents.content_store import ContentStore


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    """The form of a tower's embeddings, by which ranks without the tower receive them."""

    #: Number of values of an embedding.
    width: int
    dtype: torch.dtype
    #: The rank's device.
    device: torch.device


class RankedContents:
    """The contents of one of several ranks."""

    def __init__(
        self,
        group: ProcessGroup,
        store: ContentStore | None,
        num_slots: int,
        shape: EmbeddingShape,
    ) -> None:
        """`store` is rank 0's; None in other ranks."""
        assert (store is not None) == (group.rank == 0), "rank 0 encodes"
        self._group = group
        self._store = store
        self._slots = ContentSlots(num_slots)
        self._shape = shape

    def load(self, loads: Sequence[ItemLoad]) -> None:
        """See `content_slots.StepContents`. The ranks must call it with equal loads."""
        # First, tell the number of embeddings of each content.
        taken = [] if self._store is None else self._store.take(loads)
        found = [each.contiguous() for each in taken]
        shape = self._shape
        counts = [len(each) for each in found] or [0] * len(loads)
        lengths = torch.tensor(counts, device=shape.device)
        self._group.broadcast(lengths)
        # Then send the embeddings.
        for num_tokens in lengths.tolist()[len(found) :]:
            size = num_tokens, shape.width
            found.append(torch.empty(size, dtype=shape.dtype, device=shape.device))
        for embeddings in found:
            self._group.broadcast(embeddings)
        self._slots.fill(loads, found)

    def input_embeds(self, pieces: Sequence[ContentPiece]) -> InputEmbeds:
        """See `ContentSlots.input_embeds`."""
        return self._slots.input_embeds(pieces)

    def reset(self) -> None:
        """See `content_slots.StepContents`."""
        self._slots.clear()
        if self._store is not None:
            self._store.reset()
