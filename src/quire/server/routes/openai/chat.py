"""POST /v1/chat/completions: messages in, the assistant's next message out.

A streamed answer has, for each choice, a chunk with the role, chunks with text, and one with the
reason why it ended, as OpenAI's has; joined they are the whole answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire.engine_client.outputs import Delta
from quire.errors import InvalidRequestError
from quire.server.generation.answer import LATER, Call, event_of, filled
from quire.server.generation.body import ChatCompletionRequest, TemplateOptions
from quire.server.generation.http_generation import blamed_on, new_call_id, prepare
from quire.server.generation.limits import check_text, check_whole_answer
from quire.server.http.json_body import JSONRoute
from quire.server.http.streaming import event
from quire.server.routes.openai.logprobs import chat_logprobs_json
from quire.server.routes.openai.shapes import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from quire.server.routes.openapi import answers
from quire.server.service import LONG_TEXT_CHARACTERS, Service, call_for_text, service_of
from quire.server.tenants.tenancy import options_of
from quire.text.chat_template import encode_chat

router = APIRouter(route_class=JSONRoute)

BYTES_PER_LOGPROB = 96
"""In the answer, about: a token's text, its bytes, its number, and their names."""


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))
async def create_chat_completion(body: ChatCompletionRequest, http: HTTPRequest) -> Response:
    """Answer the messages n times."""
    service = service_of(http)
    service.check_model(body.model)
    service.limits.check(body, service.engine.limits.max_logprobs)
    params = body.to_params()
    call_id = new_call_id("chatcmpl")
    options = options_of(http, body)
    token_ids = await chat_token_ids(
        service, body.messages, body, add_special_tokens=body.add_special_tokens
    )
    with _prompt_is_messages():
        generation = await prepare(service, http, call_id, [token_ids], params, options)
    call = _ChatCall(service, body, generation, call_id)
    if body.stream:
        return call.stream()
    check_whole_answer(
        generation.requests,
        service.engine.limits.max_model_len,
        bytes_per_logprob=BYTES_PER_LOGPROB,
    )
    return await call.answer(http.receive)


@contextmanager
def _prompt_is_messages() -> Iterator[None]:
    """A client of this API knows no field `prompt` that could be at fault."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == "prompt":
            error.param = "messages"
        raise


async def chat_token_ids(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions,
    *,
    add_special_tokens: bool,
) -> list[int]:
    """The messages as the model takes them. Raises InvalidRequestError.

    add_special_tokens: beside those that the template itself writes.
    """
    size = _num_characters([messages, options.chat_template_kwargs])
    return await call_for_text(size, _render, service, messages, options, add_special_tokens)


def _render(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions,
    add_special_tokens: bool,
) -> list[int]:
    begins_message = options.add_generation_prompt
    if begins_message is None:
        begins_message = not options.continue_final_message
    max_model_len = service.engine.limits.max_model_len
    with blamed_on("messages"):
        return encode_chat(
            service.chat_template,
            service.tokenizer,
            messages,
            allow_special_tokens=service.allow_special_tokens,
            add_special_tokens=add_special_tokens,
            check_text=lambda text: check_text(text, service.tokenizer, max_model_len, "messages"),
            add_generation_prompt=begins_message,
            continue_final_message=options.continue_final_message,
            chat_template_kwargs=options.chat_template_kwargs,
        )


def _num_characters(value: Any) -> int:
    """Of all texts in a JSON value, counted as far as `call_for_text` wants to know."""
    count, rest = 0, [value]
    while rest and count < LONG_TEXT_CHARACTERS:
        each = rest.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, Mapping):
            count += len(each)
            rest.extend(each.values())
        elif isinstance(each, Sequence):
            count += len(each)
            rest.extend(each)
    return count


class _ChatCall(Call[ChatCompletionRequest]):
    """One call. Invariant: the role is in the first chunk of each choice and in no other."""

    def _whole(self, choices: list[Any]) -> ChatCompletion:
        return ChatCompletion(
            self._call_id,
            self._created_s,
            self._service.model_name,
            choices,
            self._usage(),
            system_fingerprint=self._service.system_fingerprint,
            prompt_logprobs=UNSET if self._body.prompt_logprobs is None else LATER,
            prompt_token_ids=self._prompt_token_ids(0),
        )

    def _rest_of_whole(self) -> Iterable[Iterable[bytes]]:
        return () if self._body.prompt_logprobs is None else (self._prompt_logprobs(0),)

    def _whole_choice(self, choice: int, delta: Delta) -> Iterable[bytes]:
        self._num_generated += len(delta.token_ids)
        whole = ChatChoice(
            choice,
            ChatMessage(delta.text),
            LATER if self._body.logprobs else None,
            delta.finish_reason,
            delta.stop_reason,
            self._token_ids(delta),
        )
        return filled(whole, *([self._logprobs_json(delta)] if self._body.logprobs else ()))

    def _events(self, choice: int, delta: Delta) -> Iterator[bytes]:
        if self._begins(choice):
            role = ChatChunkChoice(choice, ChatDelta(role="assistant", content=""))
            yield event(self._chunk([role], prompt_token_ids=self._prompt_token_ids(choice)))
        self._num_generated += len(delta.token_ids)
        if delta.logprobs:
            content = self._chunk([self._content(choice, delta, LATER)])
            yield from event_of(filled(content, self._logprobs_json(delta)))
        elif delta.text or (self._body.return_token_ids and delta.token_ids):
            yield event(self._chunk([self._content(choice, delta)]))
        if delta.finish_reason is not None:
            end = ChatChunkChoice(
                choice,
                ChatDelta(),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            yield event(self._chunk([end]))

    def _usage_event(self) -> bytes:
        return event(self._chunk([], self._usage()))

    def _content(
        self, choice: int, delta: Delta, logprobs: ChatLogprobs | None = None
    ) -> ChatChunkChoice:
        return ChatChunkChoice(
            choice, ChatDelta(content=delta.text), logprobs, token_ids=self._token_ids(delta)
        )

    def _logprobs_json(self, delta: Delta) -> Iterable[bytes]:
        return chat_logprobs_json(self._service.tokenizer, delta.logprobs)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None = None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        """usage: of the last chunk; the others have their own."""
        return ChatCompletionChunk(
            self._call_id,
            self._created_s,
            self._service.model_name,
            choices,
            self._chunk_usage() if usage is None else usage,
            system_fingerprint=self._service.system_fingerprint,
            prompt_token_ids=prompt_token_ids,
        )
