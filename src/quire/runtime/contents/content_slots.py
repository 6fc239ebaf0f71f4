"""The embeddings of contents that steps read, in the slots of `core.scheduling.residency`."""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.core.step import ItemLoad
from quire.models.interface import InputEmbeds
from quire.runtime.batch import ContentPiece


class StepContents(Protocol):
    """The contents that the rows of one rank read."""

    def load(self, loads: Sequence[ItemLoad]) -> None:
        """Carry out a plan's content_loads, before its rows are built."""
        ...

    def input_embeds(self, pieces: Sequence[ContentPiece]) -> InputEmbeds:
        """See `ContentSlots.input_embeds`."""
        ...

    def reset(self) -> None:
        """Forget the slots and what is ready for them, since the scheduler loads contents again
        after a failed step."""
        ...


class ContentSlots:
    """Embeddings by slot.

    Invariant: `_loaded` has the contents of all slots that are not empty.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: list[tuple[str, torch.Tensor] | None] = [None] * num_slots
        self._loaded: dict[str, torch.Tensor] = {}

    def fill(self, loads: Sequence[ItemLoad], embeddings: Sequence[torch.Tensor]) -> None:
        """Put the embeddings of each load into its slot."""
        for (slot, digest), found in zip(loads, embeddings, strict=True):
            self._slots[slot] = digest, found
        # A content may be loaded into a new slot before its old one is used again.
        self._loaded = dict(held for held in self._slots if held is not None)

    def input_embeds(self, pieces: Sequence[ContentPiece]) -> InputEmbeds:
        """The embeddings that replace the tokens' embeddings in `pieces`, at least one. Their
        contents must have been loaded."""
        places, rows = [], []
        for digest, first, num_tokens, place in pieces:
            assert digest in self._loaded, f"content {digest} is read, but was not loaded"
            loaded = self._loaded[digest]
            places.append(torch.arange(place, place + num_tokens, device=loaded.device))
            rows.append(loaded[first : first + num_tokens])
        return InputEmbeds(torch.cat(places), torch.cat(rows))

    def clear(self) -> None:
        """Empty all slots."""
        self._slots = [None] * self.num_slots
        self._loaded.clear()
