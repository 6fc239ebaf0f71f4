"""Messages between the API server and the engine process.

The API server may send Prepare, and sends Start once, then AddRequest (after the
ContentValues of its contents), AbortRequest, FindAdapter,
SetPaused, ClearPrefixes, questions (Ping, GetStats, GetMemory, GetBlocks, Observe) and Shutdown. An
agent between server and engine sends AbortAll. The engine sends Progress while it loads, Ready
once, then Outputs (one message a step), RequestFailed and AdapterReply. The engine answers
questions in their order, and sends Fatal before it dies of an error. `ipc` encodes messages.

Called by `engine_process` and `link`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from quire.core.adapters import AdapterRef
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.errors import (
    ConfigurationError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QuireError,
)
from quire.ipc import decoder, encode

PIECE_BYTES = 1 << 20
"""Bytes of a content's values in one message, which is encoded in about 1 ms."""

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the fields of Progress: the activity, the amount of work done, and the total amount
(0 if unknown)."""


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The engine's options; always the first message."""

    options: dict[str, Any]


class Prepare(msgspec.Struct, tag="prepare", array_like=True, frozen=True):
    """Load the engine's libraries, since Start will follow. May come before Start. Not answered."""


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A request to serve. Answered by Outputs until each branch has finished, or by
    RequestFailed."""

    request: Request


class ContentValues(msgspec.Struct, tag="content", array_like=True, frozen=True):
    """A part of the values of a content. The parts come in order, before the request that has the
    content, whose own values are then empty."""

    digest: str
    values: bytes
    is_last: bool


class AbortRequest(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End a request, or one branch of it, before the next step. Unknown ids are no error, since the
    request may just have finished."""

    request_id: str
    branch_index: int | None = None


class AbortAll(msgspec.Struct, tag="abort_all", array_like=True, frozen=True):
    """End all requests before the next step, because their API server is gone. Another API server
    may connect."""


class FindAdapter(msgspec.Struct, tag="find_adapter", array_like=True, frozen=True):
    """Find an adapter in a folder; see `engine.adapter_work.StoredAdapters.find`. Answered by one
    AdapterReply when the adapter has been read; other messages and steps may come before."""

    #: Identifies the question in its reply.
    find_id: int
    name: str
    path: str
    #: Read the adapter even if its files have not changed.
    anew: bool = False


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Check that no step hangs. Answered by one Pong, in order, between two steps."""


class GetStats(msgspec.Struct, tag="get_stats", array_like=True, frozen=True):
    """Answered by one StatsReply, in order."""


class GetMemory(msgspec.Struct, tag="get_memory", array_like=True, frozen=True):
    """Answered by one MemoryReply, in order."""


class GetBlocks(msgspec.Struct, tag="get_blocks", array_like=True, frozen=True):
    """Describe at most max_num_blocks blocks from first_block on; neither is negative.

    Answered by one BlocksReply, in order.
    """

    first_block: int
    max_num_blocks: int


class Observe(msgspec.Struct, tag="observe", array_like=True, frozen=True):
    """Describe the engine as it is now; see `engine.observation.Observation.observe`.

    Answered by one ObserveReply, in order.
    """

    parts: tuple[str, ...]
    since: int = 0
    table_of: str | None = None


class SetPaused(msgspec.Struct, tag="set_paused", array_like=True, frozen=True):
    """Make no steps, even if there is work, until `paused` is false. Not answered."""

    paused: bool


class ClearPrefixes(msgspec.Struct, tag="clear_prefixes", array_like=True, frozen=True):
    """Clear all cached prefixes, including pinned and published ones. Not answered."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """End the process: after all open requests with `drain`, else at once. New requests are
    refused."""

    drain: bool


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """Progress of the engine until it is ready."""

    text: str
    #: Amount of loading work done, in the same unit as `total`.
    done: int = 0
    #: Total amount of work; 0 if unknown.
    total: int = 0


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine takes requests."""

    limits: ModelLimits
    #: Facts about the engine by name, to show to people.
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """All outputs of one step."""

    outputs: Sequence[SequenceOutput]


class RequestFailed(msgspec.Struct, tag="request_failed", array_like=True, frozen=True):
    """The engine refused a request, or ended it with an error. No more messages follow for it."""

    request_id: str
    code: str
    message: str
    http_status: int
    param: str | None = None
    retry_after_s: float | None = None


class AdapterReply(msgspec.Struct, tag="adapter", array_like=True, frozen=True):
    """The answer to FindAdapter. It has either the adapter or a failure."""

    find_id: int
    ref: AdapterRef | None = None
    failure: RequestFailed | None = None


class Pong(msgspec.Struct, tag="pong", array_like=True, frozen=True):
    """The engine is between two steps."""


class StatsReply(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    """The fields of EngineStats by name."""

    stats: dict[str, Any]


class MemoryReply(msgspec.Struct, tag="memory", array_like=True, frozen=True):
    """The result of `MemoryReport.as_dict`."""

    memory: dict[str, Any]


class BlocksReply(msgspec.Struct, tag="blocks", array_like=True, frozen=True):
    """The result of `block_page`."""

    page: dict[str, Any]


class ObserveReply(msgspec.Struct, tag="observed", array_like=True, frozen=True):
    """The result of `Observation.observe`."""

    found: dict[str, Any]


class Fatal(msgspec.Struct, tag="fatal", array_like=True, frozen=True):
    """The reason why the engine process is about to end."""

    code: str
    message: str
    #: See `EngineDeadError`.
    rank_status: int | None = None


Question: TypeAlias = Ping | GetStats | GetMemory | GetBlocks | Observe
Reply: TypeAlias = Pong | StatsReply | MemoryReply | BlocksReply | ObserveReply
Control: TypeAlias = SetPaused | ClearPrefixes
ToEngine: TypeAlias = (
    Prepare
    | Start
    | ContentValues
    | AddRequest
    | AbortRequest
    | AbortAll
    | FindAdapter
    | Control
    | Question
    | Shutdown
)
ToServer: TypeAlias = Progress | Ready | Outputs | RequestFailed | AdapterReply | Reply | Fatal

decode_to_engine: Callable[[bytes], ToEngine] = decoder(ToEngine, "the API server")
"""Decodes a message from the API server, without its length. Raises MessageError."""
decode_to_server: Callable[[bytes], ToServer] = decoder(ToServer, "the engine")
"""Decodes a message from the engine, without its length. Raises MessageError."""


def frames_of(request: Request) -> Iterator[bytes]:
    """The encoded messages that add a request with contents, each encoded when it is taken."""
    for content in request.contents:
        last = max(0, len(content.values) - 1) // PIECE_BYTES * PIECE_BYTES
        for at in range(0, last + 1, PIECE_BYTES):
            values = content.values[at : at + PIECE_BYTES]
            yield encode(ContentValues(content.digest, values, at == last))
    yield encode(AddRequest(without_values(request)))


def without_values(request: Request) -> Request:
    """The request with empty values in its contents."""
    contents = tuple(content._replace(values=b"") for content in request.contents)
    return replace(request, contents=contents)


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
    """The exception from which `request_failed` made the message."""
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
    """Error classes by code. Leaves out classes that inherit their code."""
    found: dict[str, type[QuireError]] = {}
    pending: list[type[QuireError]] = [QuireError]
    while pending:
        kind = pending.pop()
        if "code" in vars(kind):
            found[kind.code] = kind
        pending += kind.__subclasses__()
    return found
