"""POST /v1/messages and /v1/messages/count_tokens of Anthropic's API.

A stream has Anthropic's events: the message's start; each block's start, pieces and stop; the stop
reason; the message's stop. The joined events are equal to the unstreamed answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.core.request import FinishReason
from quire.engine_client.results import Delta
from quire.errors import QuireError
from quire.server.generation.answer import AnsweredCall, generate
from quire.server.generation.chat_answer import TOOL_CALLS, ChatAnswer
from quire.server.generation.chat_prompt import chat_call_of, chat_prompt
from quire.server.generation.collected_message import CollectedMessage
from quire.server.generation.http_generation import fields_named
from quire.server.http.errors import error_body
from quire.server.http.streaming import json_response, named_event
from quire.server.routes.anthropic.anthropic_errors import ERROR_RESPONSES, anthropic_error
from quire.server.routes.anthropic.block_writer import BlockWriter, whole_blocks
from quire.server.routes.anthropic.message import (
    Message,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    PingEvent,
    ThinkingTokens,
    TokenCount,
)
from quire.server.routes.anthropic.messages_body import (
    FIELD_NAMES,
    CountTokensRequest,
    MessagesRequest,
)
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers
from quire.server.service import report_ignored_fields, service_of
from quire.text.parsers.message_events import MessageEvent

router = Endpoints(error_form=anthropic_error, generating_paths=("/v1/messages",))


@router.post("/v1/messages", responses=answers(Message, streams=True, errors=ERROR_RESPONSES))
async def create_message(body: MessagesRequest, http: HTTPRequest) -> Response:
    """Answer the messages, in Anthropic's form."""
    report_ignored_fields(http, body.ignored_tools)
    return await generate(http, body, _MessageAnswer)


@router.post("/v1/messages/count_tokens", responses=answers(TokenCount, errors=ERROR_RESPONSES))
async def count_tokens(body: CountTokensRequest, http: HTTPRequest) -> Response:
    """The number of tokens of a prompt, equal to the input usage of a call with these fields."""
    service = service_of(http)
    service.check_model(body.model)
    report_ignored_fields(http, body.ignored_tools)
    with fields_named(FIELD_NAMES):
        prompt = await chat_prompt(service, await chat_call_of(service, body))
    service.report_or_refuse_fields(http, prompt.left_out)
    return json_response(TokenCount(len(prompt.token_ids)))


router.refuse("/v1/messages/{rest:path}")  # batches of messages are not supported


class _MessageAnswer(ChatAnswer[MessagesRequest]):
    """Anthropic's answer. Invariant: _end is set once the message has ended."""

    id_prefix = "msg"
    call_id_prefix = "toolu_"
    stream_end = b""
    keep_alive: ClassVar[bytes] = named_event("ping", PingEvent())
    field_names: ClassVar[Mapping[str, str]] = FIELD_NAMES

    def __init__(self, call: AnsweredCall[MessagesRequest]) -> None:
        super().__init__(call)
        self._writer = BlockWriter(shows_thinking=call.body.shows_thinking)
        self._end = MessageEnd(None, None)

    def _read(self, choice: int, delta: Delta) -> Sequence[MessageEvent]:
        return () if self._body.answers_nothing else super()._read(choice, delta)

    def _begin_events(self) -> Iterator[bytes]:
        yield named_event("message_start", MessageStart(self._message([])))

    def _message_events(
        self, choice: int, events: Sequence[MessageEvent], delta: Delta
    ) -> Iterator[bytes]:
        yield from self._writer.write(events)
        if delta.finish_reason is not None:
            yield from self._writer.close()
            self._end = self._end_of(delta)
            yield named_event("message_delta", MessageDelta(self._end, self._message_usage()))

    def _end_events(self) -> Iterator[bytes]:
        yield named_event("message_stop", MessageStop())

    def _error_event(self, error: QuireError) -> bytes:
        return named_event("error", error_body(error, self._error_form))

    def _whole(self, choices: list[Any]) -> Message:
        return self._message(choices)

    def _whole_message(
        self, choice: int, message: CollectedMessage, delta: Delta
    ) -> Iterable[bytes]:
        self._end = self._end_of(delta)
        return whole_blocks(message.parts, shows_thinking=self._body.shows_thinking)

    def _message(self, content: list[Any]) -> Message:
        return Message(
            # Anthropic's ids have an underscore.
            self._call_id.replace("-", "_", 1),
            self._service.answered_name(self._body.model),
            content,
            self._message_usage(),
            self._end.stop_reason,
            self._end.stop_sequence,
        )

    def _end_of(self, delta: Delta) -> MessageEnd:
        if self._body.answers_nothing:
            return MessageEnd("max_tokens", None)
        if isinstance(delta.stop_reason, str):
            return MessageEnd("stop_sequence", delta.stop_reason)
        reason = self._finish_reason(0, delta)
        if reason == TOOL_CALLS:
            return MessageEnd("tool_use", None)
        if reason != FinishReason.LENGTH.value:
            return MessageEnd("end_turn", None)
        is_bound = self._num_generated >= self._body.max_tokens
        return MessageEnd("max_tokens" if is_bound else "model_context_window_exceeded", None)

    def _message_usage(self) -> MessageUsage:
        usage = self._usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            usage.prompt_tokens - num_cached,
            usage.completion_tokens,
            num_cached,
            ThinkingTokens(self._num_reasoning_tokens),
        )
