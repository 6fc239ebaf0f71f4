"""POST /v1/chat/completions: messages in, the assistant's next message out.

A streamed answer and a whole one are made of the same pieces, so they say the same.
"""

import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from quire.engine.outputs import Delta
from quire.server.generation import Generation, blamed_on, new_call_id, prepare
from quire.server.logprobs import chat_logprobs
from quire.server.protocol import ChatCompletionRequest
from quire.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
    usage_of,
)
from quire.server.service import Service, call_for_text, service_of
from quire.server.streaming import EventStream, answer, event
from quire.server.tenancy import options_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, http: HTTPRequest) -> Response:
    """Answer the messages n times."""
    service = service_of(http)
    service.check_model(body.model)
    wish = body.to_wish()
    call_id = new_call_id("chatcmpl")
    num_characters = sum(len(str(message)) for message in body.messages)
    token_ids = await call_for_text(num_characters, _prompt_token_ids, service, body)
    options = options_of(http, body.priority, body.cache_salt)
    generation = await prepare(service, call_id, [token_ids], wish, options)
    call = _ChatCall(service, body, generation, call_id)
    if body.stream:
        return EventStream(call.events())
    return await answer(http.receive, call.collect())


def _prompt_token_ids(service: Service, body: ChatCompletionRequest) -> list[int]:
    """The rendered template, which writes its own special tokens. Raises InvalidRequestError."""
    begins_message = body.add_generation_prompt
    if begins_message is None:
        begins_message = not body.continue_final_message
    text = service.chat_template.render(
        body.messages,
        add_generation_prompt=begins_message,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    with blamed_on("messages"):
        return service.tokenizer.encode(text, add_special_tokens=False)


class _ChatCall:
    """One call. Invariant: the role is in the first piece of each choice and in no other."""

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        generation: Generation,
        call_id: str,
    ) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._call_id = call_id
        self._created_s = int(time.time())
        self._to_begin = set(range(generation.num_choices))

    async def collect(self) -> ChatCompletion:
        """The whole answer."""
        choices = [
            ChatChoice(index, ChatMessage(""), ChatLogprobs([]) if self._body.logprobs else None)
            for index in range(self._generation.num_choices)
        ]
        async with self._generation as generation:
            async for index, delta in generation.deltas():
                self._grow(choices[index], delta)
        usage = usage_of(self._generation.results)
        return ChatCompletion(
            self._call_id, self._created_s, self._service.model_name, choices, usage
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        async with self._generation as generation:
            async for index, delta in generation.deltas():
                if delta.text or delta.logprobs or delta.finish_reason or index in self._to_begin:
                    yield self._event([self._piece(index, delta)])
        if self._body.include_usage:
            yield self._event([], usage_of(self._generation.results))

    def _grow(self, choice: ChatChoice, delta: Delta) -> None:
        choice.message.content += delta.text
        if choice.logprobs is not None:
            choice.logprobs.content += chat_logprobs(
                self._service.tokenizer, delta.logprobs
            ).content
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def _piece(self, index: int, delta: Delta) -> ChatChunkChoice:
        piece = ChatChunkChoice(index, ChatDelta())
        if index in self._to_begin:
            self._to_begin.discard(index)
            piece.delta = ChatDelta(role="assistant", content="")
        if delta.text:
            piece.delta.content = delta.text
        if delta.logprobs:
            piece.logprobs = chat_logprobs(self._service.tokenizer, delta.logprobs)
        if delta.finish_reason is not None:
            piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
        return piece

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        chunk = ChatCompletionChunk(
            self._call_id, self._created_s, self._service.model_name, choices
        )
        if self._body.include_usage:
            chunk.usage = usage
        return event(chunk)
