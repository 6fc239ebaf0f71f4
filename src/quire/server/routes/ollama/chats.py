"""POST /api/chat and /api/generate of Ollama's API.

A stream has a line of JSON for each piece. A tool call is never split: it is sent in one line.
"""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.core.request import FinishReason, PhaseTimes
from quire.engine_client.grammar_forms import WholeMessage
from quire.engine_client.results import Delta
from quire.errors import QuireError
from quire.server.generation.answer import LATER, AnsweredCall, generate
from quire.server.generation.chat_answer import ChatAnswer
from quire.server.generation.chat_prompt import ChatPrompt
from quire.server.generation.collected_message import CallPart, CollectedMessage
from quire.server.generation.http_generation import HTTPGeneration, Prompts, blamed_on
from quire.server.http.errors import error_body
from quire.server.http.long_work import call_for_text
from quire.server.http.streaming import NDJSON
from quire.server.idle_unload import keep_alive_s
from quire.server.limits import check_text
from quire.server.routes.anthropic.block_writer import input_of
from quire.server.routes.ollama.ollama_body import (
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from quire.server.routes.ollama.ollama_endpoints import OllamaEndpoints
from quire.server.routes.ollama.served_models import ERROR_RESPONSES, rfc3339
from quire.server.routes.openapi import answers
from quire.server.served_models import find_model
from quire.server.service import Service
from quire.text.fill_in_middle import FillInMiddle
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.parsers.message_events import CallEnd, MessageEvent, ReasoningPiece
from quire.text.parsers.tool_use import NO_TOOLS

router = OllamaEndpoints(generating_paths=("/api/chat", "/api/generate"))

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


class OllamaLine(msgspec.Struct, kw_only=True):
    """A line of a stream, or an unstreamed answer. The fields after `done` are in the last line.

    Durations are in nanoseconds. The engine measures prompt_eval_duration, from the prompt's first
    step to the first token, and eval_duration, from there to the end. load_duration is the time
    until a sleeping engine has woken up.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaLine, kw_only=True):
    """A line of a chat's stream, or the unstreamed answer."""

    message: OllamaMessage


class OllamaText(OllamaLine, kw_only=True):
    """A line of a completion's stream, or the unstreamed answer."""

    response: str
    thinking: str | UnsetType = UNSET


def _lines(kind: type[OllamaLine]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, as described in the OpenAPI document."""
    return answers(kind, streams=True, stream_type=NDJSON, errors=ERROR_RESPONSES)


@router.post("/api/chat", responses=_lines(OllamaChat))
async def ollama_chat(body: OllamaChatRequest, http: HTTPRequest) -> Response:
    """Answer the messages, in Ollama's form."""
    if not body.has_prompt:
        return await _without_prompt(http, body, OllamaChat, message=OllamaMessage())
    _keep_alive(http, body)
    return await generate(http, body, _ChatLines)


@router.post("/api/generate", responses=_lines(OllamaText))
async def ollama_generate(body: OllamaGenerateRequest, http: HTTPRequest) -> Response:
    """Answer one prompt, in Ollama's form."""
    if not body.has_prompt:
        return await _without_prompt(http, body, OllamaText, response="")
    _keep_alive(http, body)
    return await generate(http, body, _TextLines)


def _keep_alive(http: HTTPRequest, body: OllamaBody) -> None:
    """Obey the operator's `keep_alive` if the server unloads an idle model. A tenant's has no
    effect, since the model is there for all. Raises InvalidRequestError, and UnknownModelError."""
    service, given = find_model(http, body.model).service, body.keep_alive
    if service is None:  # the model was never loaded
        return
    service.check_model(body.model)
    if service.idle_unload is not None:
        seconds = None if given is None else keep_alive_s(given)
        if http.state.is_operator:
            service.idle_unload.keep(seconds)


async def _without_prompt(
    http: HTTPRequest, body: OllamaBody, kind: type[OllamaLine], **content: Any
) -> Response:
    """The answer to a call that asks to load or unload the model. Raises EngineDeadError."""
    _keep_alive(http, body)
    model = find_model(http, body.model)
    idle_unload = None if model.service is None else model.service.idle_unload
    if idle_unload is not None and body.done_reason_without_prompt == "load":
        await idle_unload.load()
    line = kind(
        model=body.model if body.model in model.all_names else model.name,
        created_at=rfc3339(time.time()),
        done=True,
        done_reason=body.done_reason_without_prompt,
        **content,
    )
    return Response(_encoded(line), media_type=NDJSON if body.stream else "application/json")


class _OllamaLines(ChatAnswer[OllamaBodyT]):
    """An answer as lines of JSON. Invariant: _message has the streamed events so far."""

    id_prefix = "ollama"
    stream_end = b""
    keep_alive = b" "  # JSON may begin with spaces
    media_type = NDJSON

    def __init__(self, call: AnsweredCall[OllamaBodyT]) -> None:
        super().__init__(call)
        self._message = CollectedMessage()

    @abstractmethod
    def _line(self, message: OllamaMessage, **end: Any) -> msgspec.Struct:
        """A line with a message or a piece of it; `end` has the further fields of the last line."""

    def _message_events(
        self, choice: int, events: Sequence[MessageEvent], delta: Delta
    ) -> Iterator[bytes]:
        for event in events:
            self._message.push(event)
            if isinstance(event, str):
                yield _encoded(self._line(OllamaMessage(event)))
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
        return LATER  # the JSON of the only choice is the whole answer

    def _whole_message(
        self, choice: int, message: CollectedMessage, delta: Delta
    ) -> Iterator[bytes]:
        calls = [_call(call) for call in message.calls if call.is_complete]
        whole = OllamaMessage(message.text, message.reasoning or UNSET, calls or UNSET)
        yield msgspec.json.encode(self._line(whole, **self._end(delta)))

    def _end(self, delta: Delta) -> dict[str, Any]:
        usage, came_s, now_s = self._usage(), self._generation.arrival_s, time.monotonic()
        phases = _phases_of(self._generation)
        awake_since_s = self._service.engine.sleeping.awake_since_s
        return {
            "done": True,
            "done_reason": "length" if delta.finish_reason == FinishReason.LENGTH.value else "stop",
            "total_duration": int((now_s - came_s) * 1e9),
            "load_duration": int(max(0.0, awake_since_s - came_s) * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(phases.prefill_s * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(phases.decode_s * 1e9),
        }


class _ChatLines(_OllamaLines[OllamaChatRequest]):
    """The lines of a chat."""

    def _line(self, message: OllamaMessage, **end: Any) -> OllamaChat:
        name = self._service.answered_name(self._body.model)
        return OllamaChat(model=name, created_at=rfc3339(time.time()), message=message, **end)


class _TextLines(_OllamaLines[OllamaGenerateRequest]):
    """The lines of a completion."""

    @classmethod
    async def prompts(cls, service: Service, body: OllamaGenerateRequest) -> Prompts:
        if not body.is_raw:
            return await super().prompts(service, body)
        size = len(body.prompt) + len(body.suffix or "")
        return await call_for_text(size, _raw_prompt, service, body)

    def _line(self, message: OllamaMessage, **end: Any) -> OllamaText:
        return OllamaText(
            model=self._service.answered_name(self._body.model),
            created_at=rfc3339(time.time()),
            response=message.content,
            thinking=message.thinking,
            **end,
        )


def _phases_of(generation: HTTPGeneration) -> PhaseTimes:
    """The engine's times of the only sequence. A sequence that a stop string ended has no end in
    the engine, so its decoding is timed by the arrival of its tokens."""
    phases = generation.phases or PhaseTimes(0.0, 0.0, 0.0)
    first_s, last_s = generation.first_output_s, generation.last_output_s
    if phases.decode_s or first_s is None or last_s is None:
        return phases
    return phases._replace(decode_s=last_s - first_s)


def _raw_prompt(service: Service, body: OllamaGenerateRequest) -> ChatPrompt:
    """The prompt without a chat template. Its answer is all text."""
    longest = service.engine.limits.max_model_len
    for name, text in (("prompt", body.prompt), ("suffix", body.suffix or "")):
        check_text(text, service.tokenizer, longest, name, is_truncated=False)
    form = WholeMessage(NO_TOOLS, body.raw_format, None, "")
    fill = FillInMiddle(service.tokenizer)
    with blamed_on("prompt"):
        if body.suffix:
            token_ids = fill.encode(body.prompt, body.suffix)
        else:
            token_ids = service.tokenizer.encode(body.prompt)
    return ChatPrompt(
        inputs=[token_ids],
        form=None if form.is_free else form,
        end_token_ids=fill.end_token_ids if body.suffix else (),
        dialect=find_dialect(None),
        has_answer_format=body.raw_format is not None,
    )


def _encoded(line: msgspec.Struct) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _call(call: CallPart) -> OllamaCall:
    return OllamaCall(OllamaFunction(call.name, input_of(call)))
