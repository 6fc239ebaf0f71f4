"""KV groups: sets of layers with the same growth rule and a common block table."""

from dataclasses import dataclass
from enum import Enum


class KVKind(Enum):
    """Which tokens a group keeps in memory, and hence how its memory grows."""

    FULL = "full"  # every token is kept
    WINDOW = "window"  # only the last `window` tokens are ever read
    LATENT = "latent"  # every token is kept, as one compressed vector (MLA)
    STATE = "state"  # a fixed-size state per sequence (linear attention, Mamba, convolutions)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table."""

    #: Indices of the model's attention layers, ascending.
    layers: tuple[int, ...]
    kind: KVKind
    #: Bytes of one block, padding included; equal for all groups of a model.
    bytes_per_block: int
    #: Number of keys that a query sees, its own included, for KVKind.WINDOW; else None.
    window: int | None = None
    #: Number of blocks that one state takes, for KVKind.STATE; else 0.
    num_state_blocks: int = 0
    #: Bytes that no layer of the group uses, in one block or in all blocks of a state.
    unused_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes at the beginning of a block that tiers store.

        Blocks of recurrent states count as full, since only a state's last block has unused bytes.
        """
        if self.kind is KVKind.STATE:
            return self.bytes_per_block
        return self.bytes_per_block - self.unused_bytes
