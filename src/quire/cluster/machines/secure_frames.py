"""Authenticated frames between two machines that hold the same key.

    agent  -> front    AgentHello    a random number
    front  -> agent    FrontHello    another random number, and a proof of the key over both numbers
    agent  -> front    Welcome       its own proof; or Refused
    then both ways     [length | number of the frame | channel | body | 16 bytes of keyed BLAKE2b]

The front is the API server. Each direction of each connection has its own key, derived from the
shared key and both random numbers. So a frame of another connection or of the other direction is
refused. Frames are numbered: a repeated frame is dropped, and a missing one breaks the connection.
Bodies are not encrypted, so use a private network or a tunnel.

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
"""Version of the handshake and the frames."""

LEAST_KEY_BYTES = 16
KEY_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 16

_HEAD = struct.Struct(">IQB")  # bytes after the length, number of the frame, channel
_LENGTH_BYTES = 4
_LEAST_BODY = _HEAD.size - _LENGTH_BYTES + MAC_BYTES

logger = get_logger(__name__)


class FrameKind(IntEnum):
    """The kind of message in a frame."""

    #: A message between front and agent.
    AGENT = 0
    #: A message between front and engine, which the agent passes on undecoded.
    ENGINE = 1


class AgentHello(msgspec.Struct, tag="agent_hello", array_like=True, frozen=True):
    """The agent's first message of a connection."""

    version: int
    nonce: bytes


class FrontHello(msgspec.Struct, tag="front_hello", array_like=True, frozen=True):
    """The front's first message of a connection."""

    version: int
    nonce: bytes
    #: The id of the front's process and its replica, the same in all connections for that replica.
    front_id: str
    proof: bytes


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    """The agent accepts; frames may follow."""

    proof: bytes
    #: The id of the agent's process.
    agent_id: str
    #: The id of its engine's process; "" if there is none yet.
    engine_id: str


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The agent refuses and closes the connection."""

    #: The reason, for people.
    message: str


def read_key(path: Path) -> bytes:
    """Read the shared key of the cluster from a file. Raises ConfigurationError."""
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
            "%s has mode %03o, so others can read the cluster's key, which lets them start engines:"
            " give it mode 600",
            *(path, mode),
        )
    return key


def new_key() -> bytes:
    """A new key as text without spaces, so that `read_key` reads the same bytes back."""
    return secrets.token_hex(KEY_BYTES).encode()


def new_nonce() -> bytes:
    """A random number that is unique to a connection."""
    return secrets.token_bytes(NONCE_BYTES)


class Keys:
    """Keys that both ends derive from the shared key and the two random numbers."""

    def __init__(self, key: bytes, agent_nonce: bytes, front_nonce: bytes) -> None:
        self._key = key
        self._nonces = agent_nonce + front_nonce

    def made(self, purpose: str) -> bytes:
        """A key of 32 bytes for one purpose."""
        return hmac.digest(self._key, purpose.encode() + b"\0" + self._nonces, "sha256")

    def check(self, purpose: str, proof: bytes) -> None:
        """Raises AuthenticationError unless `proof` is the key for this purpose."""
        if not hmac.compare_digest(self.made(purpose), proof):
            raise AuthenticationError("the other end does not have the cluster's key")


class Sealer:
    """Makes frames with consecutive numbers."""

    def __init__(self, key: bytes) -> None:
        self._mac = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def seal(self, channel: FrameKind, body: bytes) -> bytes:
        """Make a frame of a message given without its length. Raises MessageError if it is too
        long."""
        if len(body) > MAX_MESSAGE_BYTES - _LEAST_BODY:
            raise MessageError(f"a message of {len(body)} bytes is above {MAX_MESSAGE_BYTES}")
        head = _HEAD.pack(_LEAST_BODY + len(body), self._number, channel)
        self._number += 1
        mac = self._mac.copy()
        mac.update(head[_LENGTH_BYTES:])
        mac.update(body)
        return b"".join((head, body, mac.digest()))


class Opener:
    """Reads the frames that a `Sealer` with the same key made."""

    def __init__(self, key: bytes) -> None:
        self._mac = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def open(self, frame: bytes) -> tuple[FrameKind, bytes] | None:
        """Channel and body of a frame given without its length; None if the frame is a repetition.

        Raises MessageError for a frame that was changed, is too short, or is not the next one.
        """
        if len(frame) < _LEAST_BODY:
            raise MessageError(f"a frame of {len(frame)} bytes is too short")
        with memoryview(frame) as view:
            mac = self._mac.copy()
            mac.update(view[:-MAC_BYTES])
            if not hmac.compare_digest(mac.digest(), view[-MAC_BYTES:]):
                raise MessageError("a frame was changed on its way, or is not of this connection")
        number = int.from_bytes(frame[:8], "big")
        if number < self._number:
            return None
        if number > self._number:
            raise MessageError(f"frame {number} came instead of frame {self._number}")
        self._number += 1
        try:
            channel = FrameKind(frame[8])
        except ValueError as error:
            raise MessageError(f"a frame has the unknown channel {frame[8]}") from error
        return channel, frame[9:-MAC_BYTES]
