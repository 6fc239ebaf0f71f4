"""POST /v1/responses: answers a list of items with the assistant's items.

A stream sends these items as events, in OpenAI's order. The last event repeats the whole answer.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.core.request import FinishReason
from quire.engine_client.logprob_entries import LogprobEntries
from quire.engine_client.results import Delta
from quire.errors import QuireError
from quire.server.generation.answer import AnsweredCall, generate
from quire.server.generation.chat_answer import ChatAnswer
from quire.server.generation.collected_message import CollectedMessage, ReasoningPart, TextPart
from quire.server.http.errors import error_body
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openai.logprobs import last_entries, token_logprobs_json
from quire.server.routes.openai.responses.conversation import Conversation
from quire.server.routes.openai.responses.request_body import FIELD_NAMES, ResponsesRequest
from quire.server.routes.openai.responses.response_object import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    RawMessage,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from quire.server.routes.openai.responses.response_writer import ResponseWriter
from quire.server.routes.openai.responses.stream_events import (
    Completed,
    Created,
    Incomplete,
    InProgress,
    ResponseFailed,
    StreamError,
    StreamEvent,
    encoded,
)
from quire.server.routes.openapi import answers
from quire.server.service import report_ignored_fields
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)

router = Endpoints(generating_paths=("/v1/responses",))

_CUT_SHORT = (FinishReason.LENGTH.value,)
"""Finish reasons of answers that a limit has cut off."""

_encode_json = msgspec.json.Encoder().encode


@router.post("/v1/responses", responses=answers(ResponseObject, streams=True))
async def create_response(body: ResponsesRequest, http: HTTPRequest) -> Response:
    """Answer the input."""
    body.continue_conversation(await Conversation.of(http, body.previous_response_id))
    report_ignored_fields(http, body.tool_names.left_out)
    return await generate(http, body, _ResponsesAnswer)


class _ResponsesAnswer(ChatAnswer[ResponsesRequest]):
    """The answer in the form of the Responses API. Invariant: `_writer` has all items of the answer
    so far."""

    id_prefix = "resp"
    field_names: ClassVar[Mapping[str, str]] = FIELD_NAMES
    stream_end = b""

    def __init__(self, call: AnsweredCall[ResponsesRequest]) -> None:
        super().__init__(call)
        self._writer = ResponseWriter(self._body.tool_names)
        self._status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
        self._error: ResponseError | None = None
        #: Log-probabilities of tokens whose text the parser still holds back, as a JSON list
        #: without brackets.
        self._held_logprobs = b""

    def _begin_events(self) -> Iterable[bytes]:
        first = [Created(response=self._response([])), InProgress(response=self._response([]))]
        return map(encoded, self._writer.numbered(first))

    def _message_events(
        self, choice: int, events: Sequence[MessageEvent], delta: Delta
    ) -> Generator[bytes, None, None]:
        made = yield from self._events_of(events, delta)
        yield from map(encoded, made)

    def _end_events(self) -> Iterable[bytes]:
        response = self._response(self._writer.items)
        last = Completed if self._status == "completed" else Incomplete
        self._store_response(response)
        return map(encoded, self._writer.numbered([last(response=response)]))

    def _error_event(self, error: QuireError) -> bytes:
        begun = () if self._has_begun else self._begin_events()
        told = error_body(error)["error"]
        self._status = "failed"
        self._error = ResponseError(_error_code(error), told["message"])
        events: list[StreamEvent] = [
            StreamError(code=told["code"], message=told["message"], param=told["param"]),
            ResponseFailed(response=self._response(self._writer.items)),
        ]
        return b"".join([*begun, *map(encoded, self._writer.numbered(events))])

    def _whole(self, choices: list[Any]) -> ResponseObject:
        return self._response(choices)

    def _whole_message(
        self, choice: int, message: CollectedMessage, delta: Delta
    ) -> Generator[bytes, None, None]:
        yield from self._events_of(list(_events_of(message)), delta)
        separator = b""
        for item in self._writer.items:
            yield separator + _encode_json(item)
            separator = b","

    def _rest_of_whole(self) -> Iterable[Iterable[bytes]]:
        self._store_response(self._response(self._writer.items))
        return ()

    def _events_of(
        self, events: Sequence[MessageEvent], delta: Delta
    ) -> Generator[bytes, None, list[StreamEvent]]:
        """Returns the stream events of a delta. Yields only to let the event loop run; the yielded
        values are empty."""
        logprobs = yield from self._text_logprobs(events, delta)
        made: list[StreamEvent] = []
        for event in events:
            if isinstance(event, str):
                made += self._writer.push(event, logprobs)
                logprobs = b""
            else:
                made += self._writer.push(event)
        if delta.finish_reason is not None:
            if self._held_logprobs:
                made += self._writer.push("", self._held_logprobs)
            is_complete = delta.finish_reason not in _CUT_SHORT
            self._status = "completed" if is_complete else "incomplete"
            made += self._writer.finish(is_complete=is_complete)
        return made

    def _text_logprobs(
        self, events: Sequence[MessageEvent], delta: Delta
    ) -> Generator[bytes, None, bytes]:
        """The log-probabilities of the events' text, including tokens that were held back from
        earlier deltas. May pause at each yield."""
        entries = delta.logprobs
        if not entries:
            return b""
        text = "".join(event for event in events if isinstance(event, str))
        if any(isinstance(event, ReasoningPiece) for event in events):
            self._held_logprobs = b""
            if not text:
                return b""
            entries = LogprobEntries.of(last_entries(self._service.tokenizer, entries, text))
        parts = [self._held_logprobs]
        for part in token_logprobs_json(self._service.tokenizer, entries):
            parts.append(part)
            yield b""
        joined = b",".join(part for part in parts if part)
        self._held_logprobs = b"" if text else joined
        return joined if text else b""

    def _response(self, output: list[OutputItem]) -> ResponseObject:
        is_over = self._status in ("completed", "incomplete")
        defaults = self._service.engine.limits.defaults
        echo = self._body.echo(defaults, is_stored=self._is_stored)
        response = ResponseObject(
            id=self._response_id,
            created_at=self._created_s,
            model=self._service.answered_name(self._body.model),
            output=list(output),
            status=self._status,
            error=self._error,
            incomplete_details=IncompleteDetails() if self._status == "incomplete" else None,
            completed_at=int(time.time()) if self._status == "completed" else None,
            usage=self._response_usage() if is_over else None,
            **msgspec.structs.asdict(echo),
        )
        if is_over and self._body.enable_response_messages:
            (result,) = self._results
            response.input_messages = [self._raw_message(result.prompt_token_ids)]
            response.output_messages = [self._raw_message(result.outputs[0].token_ids)]
        return response

    def _raw_message(self, token_ids: Sequence[int]) -> RawMessage:
        text = self._service.tokenizer.decode(token_ids, skip_special_tokens=False)
        return RawMessage(message=text, tokens=list(token_ids))

    def _response_usage(self) -> ResponseUsage:
        usage = self._usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    @property
    def _response_id(self) -> str:
        return self._call_id.replace("-", "_", 1)

    @property
    def _is_stored(self) -> bool:
        return self._body.store and self._service.answers.is_on

    def _store_response(self, response: ResponseObject) -> None:
        if self._is_stored:
            self._body.conversation.store_answer(response, self._body.listed_items)


def _events_of(message: CollectedMessage) -> Iterator[MessageEvent]:
    """Parser events from which this message could have been collected."""
    for index, part in enumerate(message.parts):
        if isinstance(part, TextPart):
            yield part.text
        elif isinstance(part, ReasoningPart):
            yield ReasoningPiece(part.text)
        else:
            yield CallStart(index, part.name, part.call_id)
            if part.arguments:
                yield CallArguments(index, part.arguments)
            if part.is_complete:
                yield CallEnd(index)


def _error_code(error: QuireError) -> str:
    """The code of a failed response: one of OpenAI's codes."""
    if error.http_status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.http_status == 400 else "server_error"
