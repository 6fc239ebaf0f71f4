"""Messages about stores and loads of KV blocks between rank 0 and another rank's process.

A move is a store or a load of one block. Messages about moves and messages about steps use separate
sockets, so that neither kind waits for the other. First come `RankPages`, `OpenTier`, and
`TierOpened` or `TierRefused`. Then rank 0 sends orders, and the rank reports ended orders, until
`CloseTier` and `TierClosed`. `ipc` frames the messages.
"""

import socket
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.ipc import decoder, receive


class RankPages(msgspec.Struct, tag="pages", array_like=True, frozen=True):
    """The rank's first message to rank 0, which describes the rank's pages (KV blocks)."""

    #: The fingerprint of the rank's pages, written by `Fingerprint.to_json`.
    description: bytes


class OpenTier(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """Open the rank's tier."""

    #: The descriptions of all ranks' pages, by rank.
    descriptions: list[bytes]


class TierOpened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """The rank's tier is open and accepts orders."""


class TierRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The rank's tier can't be opened; `message` is the reason."""

    message: str


class StartMoves(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """Order to call `Tiers.start` once the rank has made `num_calls` runner calls."""

    #: The number of runner calls that rank 0 had made when it sent this order.
    num_calls: int
    stores: list[StoreOrder]
    loads: list[LoadOrder]


class CancelMoves(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """Call `Tiers.cancel`."""

    order_ids: list[int]


class ClearTier(msgspec.Struct, tag="clear", array_like=True, frozen=True):
    """Call `Tiers.clear`."""


class CloseTier(msgspec.Struct, tag="close", array_like=True, frozen=True):
    """Call `DiskTier.close`."""

    timeout_s: float


class MovesEnded(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """Ids of orders that have ended, by result."""

    done: list[int]
    failed: list[int]
    #: Ids of orders that failed because the rank does not have the content.
    lost: list[int]


class TierState(msgspec.Struct, tag="state", array_like=True, frozen=True):
    """The state of the rank's tier, sent after each change."""

    takes_stores: bool = True
    #: Latency of loads in seconds, and seconds per loaded byte; see `LoadSpeed`.
    latency_s: float = 0.0
    s_per_byte: float = 0.0
    #: See `Tiers.counts`.
    counts: dict[str, dict[str, int | float | bool]] = {}


class TierClosed(msgspec.Struct, tag="closed", array_like=True, frozen=True):
    """The rank's tier is closed and accesses no block any more, unless a read or write hangs."""


FromRank0: TypeAlias = OpenTier | StartMoves | CancelMoves | ClearTier | CloseTier
ToRank0: TypeAlias = RankPages | TierOpened | TierRefused | MovesEnded | TierState | TierClosed

_decode_order: Callable[[bytes], FromRank0] = decoder(FromRank0, "rank 0")
_decode_news: Callable[[bytes], ToRank0] = decoder(ToRank0, "a rank's tier")


def receive_order(sock: socket.socket) -> FromRank0:
    """Wait for the next message from rank 0. Raises PeerGoneError, MessageError."""
    return _decode_order(receive(sock))


def receive_news(sock: socket.socket) -> ToRank0:
    """Wait for the next message from a rank's tier. Raises PeerGoneError, MessageError."""
    return _decode_news(receive(sock))
