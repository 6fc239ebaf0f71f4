"""Frames between two machines that hold the same key.

    agent  -> front    AgentHello    a random number
    front  -> agent    FrontHello    another one, and a proof of the key over both
    agent  -> front    Welcome       its own proof; or Refused
    then both ways     [length | number of the frame | channel | body | 16 bytes of keyed BLAKE2b]

Each direction of each connection has a key of its own, made from the shared key and both random
numbers, so a frame of another connection, or of the other direction, is refused. Frames are
numbered: a frame that comes twice is dropped, and where one is missing the connection is broken.
What is sent can be read by whoever sees the wire: that takes a private network, or a tunnel.

Pure but for `read_key`: bytes in, bytes out. Used by `remote_link` and `agent`.
"""

import hashlib
import hmac
import secrets
import stat
import struct
from enum import IntEnum
from pathlib import Path

import msgspec

from quire.errors import AuthenticationError, ConfigurationError
from quire.ipc import MAX_MESSAGE_BYTES, MessageError
from quire.observability.log import get_logger

VERSION = 2
"""Of the handshake and the frames."""

LEAST_KEY_BYTES = 16
KEY_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 16

_HEAD = struct.Struct(">IQB")  # bytes after the length; the frame's number; its channel
_LENGTH_BYTES = 4
_LEAST_BODY = _HEAD.size - _LENGTH_BYTES + MAC_BYTES

logger = get_logger(__name__)


class FrameKind(IntEnum):
    """What a frame's body is."""

    AGENT = 0  # a message between front and agent
    ENGINE = 1  # one between front and engine, which the agent hands on unread


class AgentHello(msgspec.Struct, tag="agent_hello", array_like=True, frozen=True):
    """The first message of a connection."""

    version: int
    nonce: bytes


class FrontHello(msgspec.Struct, tag="front_hello", array_like=True, frozen=True):
    """front_id: of the front's process and its replica, the same in all connections for that."""

    version: int
    nonce: bytes
    front_id: str
    proof: bytes


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    """Frames may follow. agent_id: of the agent's process. engine_id: of the engine's process that
    it has; "": none yet."""

    proof: bytes
    agent_id: str
    engine_id: str


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The connection is closed after this. Why, for people."""

    message: str


def read_key(path: Path) -> bytes:
    """The key that a cluster shares, from a file. Raises ConfigurationError."""
    try:
        key = path.read_bytes().strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigurationError(f"the cluster's key can't be read: {error}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigurationError(
            f"the cluster's key in {path} has {len(key)} bytes, but must have at least"
            f" {LEAST_KEY_BYTES}; make one with: openssl rand -hex 32 > {path}"
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning(
            "%s has mode %03o, so others can read the cluster's key, and who has it starts engines:"
            " give it mode 600",
            *(path, mode),
        )
    return key


def new_key() -> bytes:
    """A key that `read_key` finds as it was written: text without spaces."""
    return secrets.token_hex(KEY_BYTES).encode()


def new_nonce() -> bytes:
    """A random number that no other connection has."""
    return secrets.token_bytes(NONCE_BYTES)


class Keys:
    """What both ends of one connection make of the shared key and the two random numbers."""

    def __init__(self, key: bytes, agent_nonce: bytes, front_nonce: bytes) -> None:
        self._key = key
        self._nonces = agent_nonce + front_nonce

    def made(self, purpose: str) -> bytes:
        """32 bytes for one purpose."""
        return hmac.digest(self._key, purpose.encode() + b"\0" + self._nonces, "sha256")

    def check(self, purpose: str, proof: bytes) -> None:
        """Raises AuthenticationError unless `proof` is what `made` makes."""
        if not hmac.compare_digest(self.made(purpose), proof):
            raise AuthenticationError("the other end does not have the cluster's key")


class Sealer:
    """Makes frames. Each has the next number."""

    def __init__(self, key: bytes) -> None:
        self._mac = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def seal(self, channel: FrameKind, body: bytes) -> bytes:
        """body: a message without its length. Raises MessageError for one that is too long."""
        if len(body) > MAX_MESSAGE_BYTES - _LEAST_BODY:
            raise MessageError(f"a message of {len(body)} bytes is above {MAX_MESSAGE_BYTES}")
        head = _HEAD.pack(_LEAST_BODY + len(body), self._number, channel)
        self._number += 1
        mac = self._mac.copy()
        mac.update(head[_LENGTH_BYTES:])
        mac.update(body)
        return b"".join((head, body, mac.digest()))


class Opener:
    """Reads frames that a `Sealer` with the same key made."""

    def __init__(self, key: bytes) -> None:
        self._mac = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def open(self, frame: bytes) -> tuple[FrameKind, bytes] | None:
        """frame: without its length. Returns the channel and the body; None: it came before.

        Raises MessageError for one that is changed, too short, or not the next.
        """
        if len(frame) < _LEAST_BODY:
            raise MessageError(f"a frame of {len(frame)} bytes is none")
        with memoryview(frame) as view:
            mac = self._mac.copy()
            mac.update(view[:-MAC_BYTES])
            if not hmac.compare_digest(mac.digest(), view[-MAC_BYTES:]):
                raise MessageError("a frame was changed on its way, or is not of this connection")
        number = int.from_bytes(frame[:8], "big")
        if number < self._number:
            return None
        if number > self._number:
            raise MessageError(f"frame {number} came, but {self._number} did not")
        self._number += 1
        try:
            channel = FrameKind(frame[8])
        except ValueError as error:
            raise MessageError(f"a frame of channel {frame[8]} is none") from error
        return channel, frame[9:-MAC_BYTES]
