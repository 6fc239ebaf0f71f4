"""KV groups: layers whose memory behaves alike share one block table."""

from dataclasses import dataclass
from enum import Enum


class KVKind(Enum):
    """How the memory of a group's layers grows and may be forgotten."""

    FULL = "full"  # every token is kept
    WINDOW = "window"  # only the last `window` tokens are ever read
    LATENT = "latent"  # every token is kept, as one compressed vector (MLA)
    STATE = "state"  # a fixed-size state per sequence (linear attention, Mamba, convolutions)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table.

    layers: indices of the model's attention layers, ascending.
    bytes_per_block: of one page, padding included; equal for all groups of a model.
    window: for KVKind.WINDOW, how many keys a query sees, itself included; else None.
    num_state_blocks: for KVKind.STATE, the pages that one state takes; else 0.
    unused_bytes: of one page (of all pages of a state): what no layer of the group uses.
    """

    layers: tuple[int, ...]
    kind: KVKind
    bytes_per_block: int
    window: int | None = None
    num_state_blocks: int = 0
    unused_bytes: int = 0
