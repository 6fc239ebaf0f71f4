"""POST /api/chat and /api/generate, GET /api/tags and /api/version, as Ollama has them.

A stream is a line of JSON for each piece. A tool call comes whole, in one line.
"""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire.core.request import FinishReason
from quire.engine_client.results import Delta
from quire.errors import QuireError
from quire.server.generation.answer import LATER, generate
from quire.server.generation.chat_answer import ChatAnswer
from quire.server.generation.collected_message import CallPart, CollectedMessage
from quire.server.generation.http_generation import HTTPGeneration, Prompts
from quire.server.http.errors import ErrorForm, error_body
from quire.server.http.streaming import NDJSON, json_response
from quire.server.routes.anthropic.block_writer import input_of
from quire.server.routes.endpoint import Endpoints, note_ignored
from quire.server.routes.ollama.ollama_body import (
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from quire.server.routes.openapi import answers, error_responses
from quire.server.service import Service, service_of
from quire.text.parsers.message_events import CallEnd, MessageEvent, ReasoningPiece, TextPiece
from quire.version import __version__

_ERRORS = error_responses(
    {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
)


def ollama_error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The form of Ollama's API, which has a message only."""
    return {"error": message}


router = Endpoints(error_form=ollama_error)

OllamaBodyT = TypeVar("OllamaBodyT", bound=OllamaBody)


class OllamaFunction(msgspec.Struct):
    """A function with its arguments."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct):
    """A tool call."""

    function: OllamaFunction


class OllamaMessage(msgspec.Struct):
    """The assistant's message, or a piece of it."""

    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET
    role: str = "assistant"


class OllamaChat(msgspec.Struct, kw_only=True):
    """A line of a chat's answer, or all of it. What stands behind `done` is in the last line."""

    model: str
    created_at: str
    message: OllamaMessage
    done: bool = False
    done_reason: str | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET


class OllamaText(msgspec.Struct, kw_only=True):
    """A line of a completion's answer, or all of it; as OllamaChat."""

    model: str
    created_at: str
    response: str
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET


class OllamaModel(msgspec.Struct):
    """A model that is served."""

    name: str
    model: str
    modified_at: str


class OllamaModels(msgspec.Struct):
    """All models."""

    models: list[OllamaModel]


class OllamaVersion(msgspec.Struct):
    """The version of the server."""

    version: str


@router.post(
    "/api/chat", responses=answers(OllamaChat, streams=True, stream_type=NDJSON, errors=_ERRORS)
)
async def ollama_chat(body: OllamaChatRequest, http: HTTPRequest) -> Response:
    """Answer the messages, in Ollama's form."""
    note_ignored(http, body.ignored_options)
    return await generate(http, body, _ChatLines)


@router.post(
    "/api/generate", responses=answers(OllamaText, streams=True, stream_type=NDJSON, errors=_ERRORS)
)
async def ollama_generate(body: OllamaGenerateRequest, http: HTTPRequest) -> Response:
    """Answer one prompt, in Ollama's form."""
    note_ignored(http, body.ignored_options)
    return await generate(http, body, _TextLines)


@router.get("/api/tags", responses=answers(OllamaModels, errors=_ERRORS))
async def ollama_tags(http: HTTPRequest) -> Response:
    """The one model of this server."""
    service = service_of(http)
    name = service.model_name
    return json_response(OllamaModels([OllamaModel(name, name, _at(service.created_s))]))


@router.get("/api/version", responses=answers(OllamaVersion, errors=_ERRORS))
async def ollama_version() -> Response:
    """The version of the server."""
    return json_response(OllamaVersion(__version__))


class _OllamaLines(ChatAnswer[OllamaBodyT]):
    """Lines of JSON.

    Invariant: _message has what a stream has brought so far.
    """

    id_prefix = "ollama"
    stream_end = b""
    keep_alive = b" "  # JSON may begin with spaces
    media_type = NDJSON

    def __init__(
        self,
        service: Service,
        body: OllamaBodyT,
        prompts: Prompts,
        generation: HTTPGeneration,
        form: ErrorForm = ollama_error,
    ) -> None:
        super().__init__(service, body, prompts, generation, form)
        self._message = CollectedMessage()

    @abstractmethod
    def _line(self, message: OllamaMessage, **end: Any) -> msgspec.Struct:
        """A line, the last one with its end."""

    def _message_events(
        self, choice: int, events: Sequence[MessageEvent], delta: Delta
    ) -> Iterator[bytes]:
        for event in events:
            self._message.push(event)
            if isinstance(event, TextPiece):
                yield _encoded(self._line(OllamaMessage(event.text)))
            elif isinstance(event, ReasoningPiece):
                yield _encoded(self._line(OllamaMessage(thinking=event.text)))
            elif isinstance(event, CallEnd):
                call = self._message.calls[event.index]
                yield _encoded(self._line(OllamaMessage(tool_calls=[_call(call)])))
        if delta.finish_reason is not None:
            yield _encoded(self._line(OllamaMessage(), **self._end(delta)))

    def _error_event(self, error: QuireError) -> bytes:
        return msgspec.json.encode(error_body(error, self._error_form)) + b"\n"

    def _whole(self, choices: list[Any]) -> Any:
        return LATER  # the only choice is all of it

    def _whole_message(
        self, choice: int, message: CollectedMessage, delta: Delta
    ) -> Iterator[bytes]:
        calls = [_call(call) for call in message.calls if call.is_complete]
        whole = OllamaMessage(message.text, message.reasoning or UNSET, calls or UNSET)
        yield msgspec.json.encode(self._line(whole, **self._end(delta)))

    def _end(self, delta: Delta) -> dict[str, Any]:
        usage = self._usage()
        return {
            "done": True,
            "done_reason": "length" if delta.finish_reason == FinishReason.LENGTH.value else "stop",
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }


class _ChatLines(_OllamaLines[OllamaChatRequest]):
    """Of a chat."""

    def _line(self, message: OllamaMessage, **end: Any) -> OllamaChat:
        return OllamaChat(
            model=self._service.model_name, created_at=_at(time.time()), message=message, **end
        )


class _TextLines(_OllamaLines[OllamaGenerateRequest]):
    """Of a completion."""

    def _line(self, message: OllamaMessage, **end: Any) -> OllamaText:
        return OllamaText(
            model=self._service.model_name,
            created_at=_at(time.time()),
            response=message.content,
            thinking=message.thinking,
            **end,
        )


def _encoded(line: msgspec.Struct) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _call(call: CallPart) -> OllamaCall:
    return OllamaCall(OllamaFunction(call.name, input_of(call)))


def _at(time_s: float) -> str:
    """Seconds since the epoch, as RFC 3339 has them."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds")
