"""Messages about moves, between rank 0 and the process of another rank.

They go over a socket of their own, beside the one of the steps' calls, so that neither waits for
the other. First: `RankPages`, `OpenTier`, and `TierOpened` or `TierRefused`. Then orders one way
and ends the other way, until `CloseTier` and `TierClosed`. See `ipc`.
"""

import socket
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.ipc import decoder, receive


class RankPages(msgspec.Struct, tag="pages", array_like=True, frozen=True):
    """The rank is built. description: the fingerprint of its pages, as `Fingerprint.to_json`."""

    description: bytes


class OpenTier(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """descriptions: of all ranks' pages, by rank."""

    descriptions: list[bytes]


class TierOpened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """The rank takes orders."""


class TierRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Why the rank's tier can't be opened."""

    message: str


class StartMoves(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """`Tiers.start`, once the rank has made so many calls of the runner as rank 0 had by then."""

    num_calls: int
    stores: list[StoreOrder]
    loads: list[LoadOrder]


class CancelMoves(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """`Tiers.cancel`."""

    order_ids: list[int]


class ClearTier(msgspec.Struct, tag="clear", array_like=True, frozen=True):
    """`Tiers.clear`."""


class CloseTier(msgspec.Struct, tag="close", array_like=True, frozen=True):
    """`DiskTier.close`."""

    timeout_s: float


class MovesEnded(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """Ids of orders that have ended, by how. lost: failed, and the rank has no such content."""

    done: list[int]
    failed: list[int]
    lost: list[int]


class TierState(msgspec.Struct, tag="state", array_like=True, frozen=True):
    """How the rank's tier is, whenever that has changed. latency_s, s_per_byte: see `LoadSpeed`.
    counts: see `Tiers.counts`."""

    takes_stores: bool = True
    latency_s: float = 0.0
    s_per_byte: float = 0.0
    counts: dict[str, dict[str, int | float | bool]] = {}


class TierClosed(msgspec.Struct, tag="closed", array_like=True, frozen=True):
    """No block is touched any more, unless a read or write hangs."""


FromRank0: TypeAlias = OpenTier | StartMoves | CancelMoves | ClearTier | CloseTier
ToRank0: TypeAlias = RankPages | TierOpened | TierRefused | MovesEnded | TierState | TierClosed

_decode_order: Callable[[bytes], FromRank0] = decoder(FromRank0, "rank 0")
_decode_news: Callable[[bytes], ToRank0] = decoder(ToRank0, "a rank's tier")


def receive_order(sock: socket.socket) -> FromRank0:
    """The next message from rank 0; waits for it. Raises PeerGoneError, MessageError."""
    return _decode_order(receive(sock))


def receive_news(sock: socket.socket) -> ToRank0:
    """The next message from a rank's tier; waits for it. Raises PeerGoneError, MessageError."""
    return _decode_news(receive(sock))
