"""POST /v1/chat/completions: messages in, the assistant's next message out.

As in OpenAI's API, a stream has for each choice a chunk with the role, chunks with text, and a
chunk with the finish reason. The joined chunks are equal to the unstreamed answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.results import Delta
from quire.server.generation.answer import (
    LATER,
    AnsweredCall,
    CompletionTokensDetails,
    Usage,
    event_around_hole,
    event_of,
    filled,
    generate,
)
from quire.server.generation.chat_answer import ChatAnswer
from quire.server.generation.collected_message import CollectedMessage
from quire.server.http.streaming import event
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs_json,
    id_name,
    prompt_logprobs_json,
)
from quire.server.routes.openapi import answers
from quire.text.parsers.message_events import (
    CallArguments,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)
from quire.text.tool_messages import text_of

_encode_json = msgspec.json.Encoder().encode

router = Endpoints(generating_paths=("/v1/chat/completions",))
router.refuse("/v1/chat/completions/{rest:path}")  # chat answers are not stored

BYTES_PER_LOGPROB = 96
"""Approximate bytes of JSON per log-probability: the token's text, its bytes, the number, and the
names of these fields."""


class CalledFunction(msgspec.Struct):
    """The function of a tool call."""

    name: str
    #: Arguments as JSON text; only the beginning of the JSON if the call was cut off.
    arguments: str


class ToolCall(msgspec.Struct):
    """A function that the assistant wants to be called."""

    #: Id that the message with the result refers to.
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The assistant's answer. The content is null only if the answer consists of tool calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    #: The reasoning, under both names that clients read.
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a call."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    #: Stop string or stop token that ended the choice; null if it ended otherwise.
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct):
    """The unstreamed answer. Fields that were not asked for are null, as clients of vLLM expect."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class FunctionDelta(msgspec.Struct):
    """The part that a chunk adds to a tool call's function."""

    arguments: str
    #: Name of the function, in the call's first chunk only.
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The part that a chunk adds to the call at `index`. Only the call's first chunk has the id and
    the type."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The part that a chunk adds to the message.

    A choice's first chunk has the role. Its content is null if tools may be called, since the
    answer may have no content. If the answer has no call either, the last chunk adds an empty text.
    """

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """The part that a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    #: Only the choice's last chunk, which may also have text, has a finish reason and a stop
    #: reason.
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One server-sent event."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    #: Token ids of the prompt, in each choice's first chunk.
    prompt_token_ids: list[int] | UnsetType = UNSET


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))
async def create_chat_completion(body: ChatCompletionRequest, http: HTTPRequest) -> Response:
    """Answer the messages n times."""
    return await generate(http, body, _ChatAnswer)


class _ChatAnswer(ChatAnswer[ChatCompletionRequest]):
    """The answer in OpenAI's form. Invariant: only the first chunk of each choice has the role."""

    id_prefix = "chatcmpl"
    bytes_per_logprob = BYTES_PER_LOGPROB
    field_names: ClassVar[Mapping[str, str]] = {"prompt": "messages", "logprobs": "top_logprobs"}

    def __init__(self, call: AnsweredCall[ChatCompletionRequest]) -> None:
        super().__init__(call)
        #: Streamed choices whose content began with null and that have no text and no call yet.
        self._unsaid: set[int] = set()
        #: For each choice that has begun with text or a call: the bytes before and after the text
        #: of a chunk that contains only text.
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        body = call.body
        self._has_frames = not (body.gives_token_ids or body.continuous_usage or body.logprobs)

    def _whole(self, choices: list[Any]) -> ChatCompletion:
        return ChatCompletion(
            self._call_id,
            self._created_s,
            self._service.answered_name(self._body.model),
            choices,
            self._usage(),
            system_fingerprint=self._service.system_fingerprint,
            prompt_logprobs=None if self._body.prompt_logprobs is None else LATER,
            prompt_token_ids=self._prompt_token_ids(0),
        )

    def _rest_of_whole(self) -> Iterable[Iterable[bytes]]:
        num_top = self._body.prompt_logprobs
        if num_top is None:
            return ()
        entries = self._generation.prompt_entries(0)
        return (prompt_logprobs_json(self._service.tokenizer, entries, num_top),)

    def _whole_message(
        self, choice: int, message: CollectedMessage, delta: Delta
    ) -> Iterable[bytes]:
        whole = ChatChoice(
            choice,
            self._chat_message(message),
            LATER if self._body.logprobs else None,
            self._finish_reason(choice, delta),
            delta.stop_reason,
            self._token_ids(delta),
        )
        return filled(whole, *([self._logprobs_json(delta)] if self._body.logprobs else ()))

    def _chat_message(self, message: CollectedMessage) -> ChatMessage:
        reasoning = message.reasoning if self._body.gives_reasoning else ""
        calls = [
            ToolCall(call.call_id, CalledFunction(call.name, call.arguments))
            for call in message.calls
        ]
        return ChatMessage(
            self._echoed + message.text or (None if calls else ""),
            reasoning_content=reasoning or None,
            reasoning=reasoning or None,
            tool_calls=calls or UNSET,
        )

    @property
    def _echoed(self) -> str:
        """The text of the assistant's message that the answer continues, if the caller asked to
        echo it; otherwise empty."""
        last = self._body.messages[-1]
        if not self._body.echo or last.get("role") != "assistant":
            return ""
        content = last.get("content")
        if isinstance(content, list):
            content = [{"text": part.get(part["type"])} for part in content]  # text or refusal
        return text_of(content)

    def _finish_reason(self, choice: int, delta: Delta) -> str | None:
        """OpenAI's finish reason. If tool_choice named the function to call, it is "stop"."""
        return (
            delta.finish_reason
            if self._body.names_a_tool
            else super()._finish_reason(choice, delta)
        )

    def _message_events(
        self, choice: int, events: Sequence[MessageEvent], delta: Delta
    ) -> Iterator[bytes]:
        # Most chunks have a piece of text and nothing else, so the rest is encoded once.
        is_text = len(events) == 1 and isinstance(events[0], str)
        if is_text and delta.finish_reason is None and choice in self._frames:
            before, after = self._frames[choice]
            yield before + _encode_json(events[0]) + after
            return
        pieces = [found for each in events if (found := self._delta(each)) is not None]
        # First, the chunk with the role.
        if self._is_first_piece(choice):
            content = self._echoed or (None if self._tool_use.callable_tools else "")
            role = ChatChunkChoice(choice, ChatDelta(role="assistant", content=content))
            ids = self._prompt_token_ids(choice)
            yield event(self._chunk([role], len(delta.token_ids), ids))
            if content is None:
                self._unsaid.add(choice)
        if any(isinstance(each, str | CallStart) for each in events):
            self._unsaid.discard(choice)
            if self._has_frames and choice not in self._frames:
                text = ChatChunkChoice(choice, ChatDelta(content=LATER))
                self._frames[choice] = event_around_hole(self._chunk([text]))
        # A delta without text may still have log-probabilities, token ids or a finish reason.
        has_more = delta.logprobs or (self._body.return_token_ids and delta.token_ids)
        if not pieces and (has_more or delta.finish_reason is not None):
            pieces.append(ChatDelta())
        # Then a chunk for each piece. The first has the delta's tokens, the last the finish reason.
        for at, piece in enumerate(pieces):
            chunk = ChatChunkChoice(choice, piece)
            if delta.finish_reason is not None and at == len(pieces) - 1:
                chunk.finish_reason = self._finish_reason(choice, delta)
                chunk.stop_reason = delta.stop_reason
                if choice in self._unsaid:
                    piece.content = ""
            if at == 0:
                ids = self._token_ids(delta)
                chunk.token_ids = UNSET if ids is None else ids
                if delta.logprobs:
                    chunk.logprobs = LATER
                    yield from event_of(filled(self._chunk([chunk]), self._logprobs_json(delta)))
                    continue
            yield event(self._chunk([chunk]))

    def _delta(self, event: MessageEvent) -> ChatDelta | None:
        if isinstance(event, str):
            return ChatDelta(content=event)
        if isinstance(event, ReasoningPiece):
            if not self._body.gives_reasoning:
                return None
            return ChatDelta(reasoning_content=event.text, reasoning=event.text)
        if isinstance(event, CallStart):
            assert event.call_id is not None, "`ChatAnswer` has set one"
            begun = FunctionDelta("", event.name)
            return ChatDelta(
                tool_calls=[ToolCallDelta(event.index, begun, event.call_id, "function")]
            )
        if isinstance(event, CallArguments):
            return ChatDelta(tool_calls=[ToolCallDelta(event.index, FunctionDelta(event.text))])
        return None

    def _usage(self, num_pending: int = 0) -> Usage:
        usage = super()._usage(num_pending)
        details = CompletionTokensDetails(self._num_reasoning_tokens)
        if self._predicted is not None:
            details.accepted_prediction_tokens = self._predicted.num_accepted
            details.rejected_prediction_tokens = self._predicted.num_rejected
        usage.completion_tokens_details = details
        return usage

    def _end_events(self) -> Iterable[bytes]:
        if not self._body.include_usage:
            return ()
        chunk = self._chunk([])
        chunk.usage = self._usage()
        return [event(chunk)]

    def _logprobs_json(self, delta: Delta) -> Iterable[bytes]:
        name = id_name if self._body.return_tokens_as_token_ids else None
        are_listed = self._body.logprob_token_ids is not None
        return chat_logprobs_json(
            self._service.tokenizer, delta.logprobs, name, are_listed=are_listed
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        num_pending: int = 0,
        prompt_token_ids: list[int] | None = None,
    ) -> ChatCompletionChunk:
        """A chunk of these choices. Its usage omits `num_pending` tokens of later chunks."""
        return ChatCompletionChunk(
            self._call_id,
            self._created_s,
            self._service.answered_name(self._body.model),
            choices,
            self._chunk_usage(num_pending),
            system_fingerprint=self._service.system_fingerprint,
            prompt_token_ids=UNSET if prompt_token_ids is None else prompt_token_ids,
        )
