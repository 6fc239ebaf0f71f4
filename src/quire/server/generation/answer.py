"""Turns a call's body into its answer, for every API: function `generate` and class `Answer`.

A route passes a subclass of `Answer` to `generate`. The subclass writes the choices in the form of
its API, both unstreamed and as stream events.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive

from quire.engine_client.results import Delta, RequestOutput
from quire.errors import QuireError
from quire.server.generation.call_body import CallBody
from quire.server.generation.http_generation import (
    Caller,
    HTTPGeneration,
    Prompts,
    fields_named,
    new_call_id,
    options_of,
    prepare,
)
from quire.server.http.errors import CLIENT_GONE_STATUS, ErrorForm, error_body, error_form
from quire.server.http.streaming import (
    DONE,
    KEEP_ALIVE,
    SSE,
    ClientGoneError,
    EventStream,
    answer,
    event,
    unless_disconnected,
)
from quire.server.limits import check_whole_answer
from quire.server.service import Service, service_of

BodyT = TypeVar("BodyT", bound=CallBody)

_HOLE = b"\0"
LATER: Any = msgspec.Raw(_HOLE)
"""A placeholder in a struct, which `filled` replaces by JSON that is made in pieces. JSON never
contains the placeholder's byte."""

_FEW_LOGPROBS = 16
"""The events of a batch are written without a pause if they have at most this many entries of
log-probabilities."""

_encode_json = msgspec.json.Encoder().encode


def filled(content: msgspec.Struct, *parts: Iterable[bytes]) -> Generator[bytes, None, None]:
    """The JSON of `content` in pieces. The n-th LATER in `content` is replaced by the n-th of
    `parts`."""
    first, *rest = _encode_json(content).split(_HOLE)
    yield first
    for part, text in zip(parts, rest, strict=True):
        yield from part
        yield text


def event_of(parts: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Join the parts of an event's JSON to one server-sent event. Yields b"" for each part and the
    whole event at the end, since a keep-alive may be sent between two yields."""
    collected = []
    for part in parts:
        collected.append(part)
        yield b""
    yield b"".join([b"data: ", *collected, b"\n\n"])


def event_around_hole(content: msgspec.Struct) -> tuple[bytes, bytes]:
    """A server-sent event's bytes before and after the one LATER in `content`."""
    before, _, after = event(content).partition(_HOLE)
    return before, after


class PromptTokensDetails(msgspec.Struct):
    """OpenAI's `prompt_tokens_details`."""

    #: Prompt tokens that were served from the prefix cache.
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """OpenAI's `completion_tokens_details`."""

    #: Generated tokens of the reasoning before the answer.
    reasoning_tokens: int
    #: Tokens of the call's prediction that the answer has, and those that it does not have; unset
    #: without a prediction.
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Token counts of one call, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(results: Sequence[RequestOutput], num_generated: int) -> Usage:
    """The usage of a call. A prompt with several choices counts once."""
    num_prompt = sum(len(result.prompt_token_ids) for result in results)
    num_cached = sum(result.num_cached_tokens for result in results)
    return Usage(
        num_prompt, num_generated, num_prompt + num_generated, PromptTokensDetails(num_cached)
    )


@dataclass(frozen=True, slots=True)
class AnsweredCall(Generic[BodyT]):
    """One call whose generation has begun."""

    service: Service
    body: BodyT
    prompts: Prompts
    generation: HTTPGeneration
    #: The API's JSON form of an error inside of a stream.
    error_form: ErrorForm


class Answer(ABC, Generic[BodyT]):
    """The answer to one call, made in pieces so that the event loop can serve other calls in
    between.

    Invariant: `_num_generated` counts the tokens in the pieces so far, and `_unbegun` contains the
    choices that have no piece yet.
    """

    #: Prefix of the answer's id.
    id_prefix: ClassVar[str] = "gen"
    #: Name of the operation in OpenTelemetry's conventions.
    operation: ClassVar[str] = "text_completion"
    #: Approximate bytes of a log-probability in the JSON of an unstreamed answer.
    bytes_per_logprob: ClassVar[int] = 96
    #: Maps the names of fields in errors to the API's own names.
    field_names: ClassVar[Mapping[str, str]] = {}
    #: Bytes after a stream's last event.
    stream_end: ClassVar[bytes] = DONE
    #: Bytes that a stream without output sends at intervals.
    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    #: Content type of a stream.
    media_type: ClassVar[str] = SSE

    @classmethod
    @abstractmethod
    async def prompts(cls, service: Service, body: BodyT) -> Prompts:
        """The prompts that the answer continues. Raises InvalidRequestError."""

    def __init__(self, call: AnsweredCall[BodyT]) -> None:
        self._service = call.service
        self._body = call.body
        self._prompts = call.prompts
        self._generation = generation = call.generation
        self._call_id = generation.call_id
        self._error_form = call.error_form
        self._created_s = int(time.time())
        self._results: Sequence[RequestOutput] = generation.results
        self._num_generated = 0
        self._has_begun = False
        self._unbegun = set(range(generation.num_choices))
        self._deltas: Iterator[tuple[int, Delta]] = iter(())

    async def whole(self, receive: Receive) -> Response:
        """The answer in one piece, once all of it has been generated. Raises InvalidRequestError
        if it could be too long."""
        check_whole_answer(
            self._generation.requests,
            self._service.engine.limits.max_model_len,
            bytes_per_logprob=self.bytes_per_logprob,
        )
        pieces = self._service.work.join(self._whole_answer())
        return await answer(receive, self._collect(), pieces)

    def stream(self) -> Response:
        """The answer as a stream of events while it is generated."""
        return EventStream(
            self._stream(),
            self._service.keep_alive_s,
            end=self.stream_end,
            keep_alive=self.keep_alive,
            media_type=self.media_type,
            error_event=self._error_event,
        )

    @abstractmethod
    def _whole(self, choices: list[Any]) -> msgspec.Struct:
        """The unstreamed answer with `choices`, and LATER for each item of `_rest_of_whole`."""

    @abstractmethod
    def _whole_choice(self, choice: int, delta: Delta) -> Iterable[bytes]:
        """The JSON of a finished choice, in parts."""

    def _rest_of_whole(self) -> Iterable[Iterable[bytes]]:
        """The JSON for each LATER after the choices, in order."""
        return ()

    @abstractmethod
    def _events(self, choice: int, delta: Delta) -> Iterable[bytes]:
        """The events for new output of a choice."""

    def _begin_events(self) -> Iterable[bytes]:
        """The events at the beginning of a stream, sent once the first output has arrived."""
        return ()

    def _end_events(self) -> Iterable[bytes]:
        """The events at the end of a stream, after the choices' events."""
        return ()

    def _error_event(self, error: QuireError) -> bytes:
        """An error as an event. It replaces the rest of the stream and is followed by
        `stream_end`."""
        return event(error_body(error, self._error_form))

    async def _collect(self) -> None:
        async with self._generation as generation:
            self._deltas = await generation.rest()

    def _whole_answer(self) -> Generator[bytes, None, None]:
        """The answer's JSON in parts. Each output is freed once it has been written."""
        yield _encode_json(self._whole([LATER])).partition(_HOLE)[0]
        separator = b""
        for choice, delta in self._deltas:
            yield separator
            yield from self._whole_choice(choice, delta)
            separator = b","
        # Make the struct again, since the usage after the choices is complete only now.
        again = filled(self._whole([LATER]), (), *self._rest_of_whole())
        next(again)
        yield from again

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        async with self._generation as generation:
            async for batch in generation.batches():
                events = self._batch_events(batch)
                if sum(len(delta.logprobs) for _, delta in batch) <= _FEW_LOGPROBS:
                    if piece := b"".join(events):
                        yield piece
                    continue
                async with aclosing(self._service.work.join(events)) as pieces:
                    async for piece in pieces:
                        yield piece
        if piece := b"".join(self._end_events()):
            yield piece

    def _batch_events(self, batch: Iterable[tuple[int, Delta]]) -> Generator[bytes, None, None]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._begin_events()
        for choice, delta in batch:
            yield from self._events(choice, delta)

    def _is_first_piece(self, choice: int) -> bool:
        """Whether the next piece of a choice is its first piece. Marks the choice as begun."""
        if choice not in self._unbegun:
            return False
        self._unbegun.discard(choice)
        return True

    def _token_ids(self, delta: Delta) -> list[int] | None:
        return delta.token_ids if self._body.gives_token_ids else None

    def _prompt_token_ids(self, choice: int) -> list[int] | None:
        if not self._body.gives_token_ids:
            return None
        return self._results[choice // self._generation.params.n].prompt_token_ids

    def _usage(self, num_pending: int = 0) -> Usage:
        """The usage so far, without `num_pending` tokens that are already counted although a later
        event has them."""
        return usage_of(self._results, self._num_generated - num_pending)

    def _chunk_usage(self, num_pending: int = 0) -> Usage | UnsetType | None:
        """The `usage` of a chunk before the last chunk. If the caller asked for the usage in every
        chunk, it is the usage so far; else null with include_usage, or else unset, as in OpenAI's
        API."""
        if self._body.continuous_usage:
            return self._usage(num_pending)
        return None if self._body.include_usage else UNSET


async def generate(http: HTTPRequest, body: BodyT, kind: type[Answer[BodyT]]) -> Response:
    """Answer a call: check the body, send its requests to the engine, write the outputs.

    Raises UnknownModelError, AdapterError, InvalidRequestError, ServerDrainingError,
    OverloadedError and its subclasses, EngineDeadError, DeadlineExceededError.
    """
    service = service_of(http)
    service.check_model(body.model)
    named = service.adapters.get(body.model)  # before any await, since the name may be removed then
    body.adopt(service.answer_defaults)
    body.check_amounts(service.limits, service.engine.limits.max_logprobs)
    params = body.to_params()
    service.report_or_refuse_fields(http, body.labels)
    caller = Caller.of(http, new_call_id(kind.id_prefix), kind.operation)
    with fields_named({"structured_outputs": body.format_field, **kind.field_names}):
        prompts = await kind.prompts(service, body)
        service.report_or_refuse_fields(http, prompts.left_out)
        adapter = await service.adapters.ref_of(named)
        options = options_of(http, body, service, speculation_history=body.speculation_history)
        preparing = prepare(service, caller, prompts, params, options, adapter)
        if prompts.form is None and params.sampling.structured_outputs is None:
            generation = await preparing
        else:
            try:  # grammars may take long to compile; a disconnect must stop their worker
                generation = await unless_disconnected(http.receive, preparing)
            except ClientGoneError:
                return Response(status_code=CLIENT_GONE_STATUS)
    answer = kind(AnsweredCall(service, body, prompts, generation, error_form(http.scope)))
    return answer.stream() if body.stream else await answer.whole(http.receive)
