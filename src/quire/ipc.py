"""Messages between quire's processes, in msgpack, each preceded by its length in four bytes.

Nothing is ever unpickled. Used between the API server and its engines (`engine_client`,
`assembly`), between ranks (`runtime`, `tiers`) and between machines (`cluster`), which define the
messages.
"""

import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from quire.errors import QuireError

MAX_MESSAGE_BYTES = 256 << 20
"""The maximum length of a message. The longest messages have the logprobs of a long prompt or,
between ranks, the tokens of the prompts that enter a step."""

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


class MessageError(QuireError):
    """Bytes that are not a message, or a message beyond MAX_MESSAGE_BYTES."""

    code = "message_error"


class PeerGoneError(Exception):
    """The other end of the socket is closed."""


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message, which begin with its length.

    Raises MessageError if msgpack can't encode it, or if it is too long.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{type(message).__name__} can't be sent: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"{type(message).__name__} takes {len(body)} bytes, above the bound of "
            f"{MAX_MESSAGE_BYTES}; ask for fewer logprobs or send a shorter prompt"
        )
    return _LENGTH.pack(len(body)) + body


def decoder(kinds: Any, sender: str) -> Callable[[bytes], Any]:
    """Make a function that decodes the body of a message (the bytes after its length).

    `kinds` is the union of the expected message classes. `sender` names the sending process in
    errors. The made function raises MessageError.
    """
    decode_body = msgspec.msgpack.Decoder(kinds).decode

    def decode(body: bytes) -> Any:
        try:
            return decode_body(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageError(f"not a message from {sender}: {error}") from error

    return decode


class FrameSplitter:
    """Cuts a stream of bytes into message bodies, however the bytes arrive.

    Holds the bytes of at most one unfinished frame.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes. Raises MessageError for a length beyond the bound."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(self._buffer, start)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise MessageError(
                    f"a message announces {num_bytes} bytes, above the bound of {MAX_MESSAGE_BYTES}"
                )
            end = start + _LENGTH.size + num_bytes
            if end > len(self._buffer):
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def send(sock: socket.socket, *messages: msgspec.Struct) -> None:
    """Send messages, waiting until a blocking socket has accepted all bytes.

    Raises PeerGoneError and MessageError.
    """
    frames = b"".join(map(encode, messages))
    try:
        sock.sendall(frames)
    except OSError as error:
        raise PeerGoneError(str(error)) from error


def receive(sock: socket.socket) -> bytes:
    """Wait for the body of the next message from a blocking socket. Raises PeerGoneError."""
    (num_bytes,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return _receive_exactly(sock, num_bytes)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        try:
            data = sock.recv(num_bytes - len(found))
        except OSError as error:
            raise PeerGoneError(str(error)) from error
        if not data:
            raise PeerGoneError("end of stream")
        found += data
    return bytes(found)
