"""What the front and the engine process say to each other, and how it is put on the wire.

Messages are msgpack (nothing is ever unpickled), each behind a length of four bytes. The front
sends Start once, then AddRequest, AbortRequest, questions (Ping, GetStats, GetMemory, GetBlocks)
and Shutdown; the engine tells of its Progress while it loads, says Ready once, then Outputs (one
message a step), RequestFailed, one reply to each question in the order of the questions and, before
it dies of something, Fatal.

Knows no sockets, no processes and no asyncio. Called by `engine_main` and `link`.
"""

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.errors import (
    ConfigurationError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QuireError,
)

MAX_MESSAGE_BYTES = 256 << 20
"""No message is longer. The longest honest ones carry the logprobs of a long prompt."""

_LENGTH = struct.Struct(">I")


class MessageError(QuireError):
    """Bytes that are not a message, or a message beyond MAX_MESSAGE_BYTES."""

    code = "message_error"


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The engine's options; always the first message."""

    options: dict[str, Any]


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A request to serve. Answered by Outputs until each branch has finished, or RequestFailed."""

    request: Request


class AbortRequest(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End a request, or one branch of it, before the next step. Unknown ids are not an error: the
    request may have finished while this message was under way."""

    request_id: str
    branch_index: int | None = None


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Is a step under way for too long? Answered by one Pong, in order, from between two steps."""


class GetStats(msgspec.Struct, tag="get_stats", array_like=True, frozen=True):
    """Answered by one StatsReply, in order."""


class GetMemory(msgspec.Struct, tag="get_memory", array_like=True, frozen=True):
    """Answered by one MemoryReply, in order."""


class GetBlocks(msgspec.Struct, tag="get_blocks", array_like=True, frozen=True):
    """What at most max_num_blocks blocks from first_block on do; neither is negative.

    Answered by one BlocksReply, in order.
    """

    first_block: int
    max_num_blocks: int


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """End the process: after all open requests (drain), or at once. New requests are refused."""

    drain: bool


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """How far the engine is with what it does before it is ready. total: 0 where it isn't known;
    done and total are in any one unit."""

    text: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine takes requests; what it was built for, and of what (by name, for people)."""

    limits: ModelLimits
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """Everything that one step brought."""

    outputs: Sequence[SequenceOutput]


class RequestFailed(msgspec.Struct, tag="request_failed", array_like=True, frozen=True):
    """A request that was refused or has ended in an error; nothing more will come for it."""

    request_id: str
    code: str
    message: str
    http_status: int
    param: str | None = None
    retry_after_s: float | None = None


class Pong(msgspec.Struct, tag="pong", array_like=True, frozen=True):
    """The engine is between two steps."""


class StatsReply(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    """The fields of EngineStats by name."""

    stats: dict[str, Any]


class MemoryReply(msgspec.Struct, tag="memory", array_like=True, frozen=True):
    """`MemoryReport.as_dict`."""

    memory: dict[str, Any]


class BlocksReply(msgspec.Struct, tag="blocks", array_like=True, frozen=True):
    """What `block_page` made of the block map."""

    page: dict[str, Any]


class Fatal(msgspec.Struct, tag="fatal", array_like=True, frozen=True):
    """Why the engine process is about to end. rank_status: see `EngineDeadError`."""

    code: str
    message: str
    rank_status: int | None = None


Question: TypeAlias = Ping | GetStats | GetMemory | GetBlocks
Reply: TypeAlias = Pong | StatsReply | MemoryReply | BlocksReply
ToEngine: TypeAlias = Start | AddRequest | AbortRequest | Question | Shutdown
ToFront: TypeAlias = Progress | Ready | Outputs | RequestFailed | Reply | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front_decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToEngine | ToFront) -> bytes:
    """A message with its length in front. Raises MessageError for what msgpack can't carry."""
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


def decode_to_engine(body: bytes) -> ToEngine:
    """The message in `body` (without its length). Raises MessageError."""
    try:
        return _to_engine_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message from the front: {error}") from error


def decode_to_front(body: bytes) -> ToFront:
    """The message in `body` (without its length). Raises MessageError."""
    try:
        return _to_front_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message from the engine: {error}") from error


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


def request_failed(request_id: str, error: QuireError) -> RequestFailed:
    """The message that carries `error` to the client of `request_id`."""
    return RequestFailed(
        request_id=request_id,
        code=error.code,
        message=str(error),
        http_status=error.http_status,
        param=error.param if isinstance(error, InvalidRequestError) else None,
        retry_after_s=error.retry_after_s if isinstance(error, OverloadedError) else None,
    )


def error_from(failure: RequestFailed) -> QuireError:
    """The exception that `request_failed` turned into a message."""
    kind = _error_classes().get(failure.code)
    if kind is not None and issubclass(kind, InvalidRequestError):
        return kind(failure.message, failure.param)
    if failure.code == OverloadedError.code:
        return OverloadedError(failure.message, failure.retry_after_s or 1.0)
    return (kind or QuireError)(failure.message)


def start_error_from(fatal: Fatal) -> QuireError:
    """The exception for an engine that could not be built, or that ended by itself."""
    kind = _error_classes().get(fatal.code)
    if kind is not None and issubclass(kind, ConfigurationError):
        return kind(fatal.message)
    return EngineDeadError(fatal.message)


def _error_classes() -> dict[str, type[QuireError]]:
    found: dict[str, type[QuireError]] = {}
    pending: list[type[QuireError]] = [QuireError]
    while pending:
        kind = pending.pop()
        found[kind.code] = kind
        pending += kind.__subclasses__()
    return found
