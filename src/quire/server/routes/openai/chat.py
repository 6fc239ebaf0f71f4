"""POST /v1/chat/completions: messages in, the assistant's next message out.

A streamed answer has, for each choice, a chunk with the role, chunks with text, and one with the
reason why it ended, as OpenAI's has; joined they are the whole answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.responses import Response

from quire.engine_client.results import Delta
from quire.errors import InvalidRequestError
from quire.server.generation.answer import LATER, Answer, Usage, event_of, filled, generate
from quire.server.generation.body import (
    NOT_FOR_BEAMS,
    NOT_SUPPORTED,
    GenerationBody,
    Params,
    left_out,
)
from quire.server.generation.http_generation import blamed_on
from quire.server.http.body import Body
from quire.server.http.long_work import LONG_TEXT_CHARACTERS, call_for_text
from quire.server.http.streaming import event
from quire.server.limits import CallLimits, check_text
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs_json,
    prompt_logprobs_json,
)
from quire.server.routes.openapi import answers
from quire.server.service import Service
from quire.text.chat_template import encode_chat

router = Endpoints()
router.refuse("/v1/chat/completions/{rest:path}")  # answers that were stored: none are

BYTES_PER_LOGPROB = 96
"""In the answer, about: a token's text, its bytes, its number, and their names."""


MAX_TEMPLATE_VALUES = 10_000
"""Of chat_template_kwargs: what a template is given beside the messages."""


class TemplateOptions(Body):
    """How messages become a prompt.

    add_generation_prompt: null means true, unless continue_final_message is set.
    """

    notes: ClassVar[Mapping[str, str]] = {
        "chat_template_kwargs": "further variables of the model's chat template",
        "add_generation_prompt": "false: the prompt ends after the last message",
        "continue_final_message": "the answer goes on where the last message ends",
    }

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        super().check_fields(fields, limits, max_model_len)
        _check_template_arguments(fields.get("chat_template_kwargs"))


_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        "name": {"type": "string"},
    },
}
Messages = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True, json_schema_extra={"items": _MESSAGE, "minItems": 1}),
]
"""Objects with a role and a content, checked by `text.chat_messages`."""


class ChatCompletionRequest(GenerationBody, TemplateOptions):
    """POST /v1/chat/completions.

    messages: a template may read further fields of them, such as name.
    logprobs, top_logprobs: report each token's, and those of so many likeliest ones.
    add_special_tokens: whether the rendered messages get those that the tokenizer puts around a
        text. Most templates write them out themselves.
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NOT_SUPPORTED,
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "metadata": (),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # says how to call tools, of which there are none
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NOT_FOR_BEAMS,
        "logprobs": (False,),
        "top_logprobs": (),
    }

    notes: ClassVar[Mapping[str, str]] = {
        "messages": "objects with a `role`, a `content` and perhaps a `name`",
        "max_completion_tokens": "the newer name of `max_tokens`",
        "logprobs": "each token's log-probability and bytes",
        "top_logprobs": "so many likeliest tokens at each position; with `logprobs` only",
        "add_special_tokens": "true: the rendered messages get the tokenizer's special "
        "tokens, beside those of the template",
    }

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: int | None = left_out(minimum=0)
    # ours
    add_special_tokens: bool = False

    def to_params(self) -> Params:
        """Raises InvalidRequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs is set, but logprobs is not; set logprobs to true", "top_logprobs"
            )
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise InvalidRequestError(
                "max_tokens and its newer name, max_completion_tokens, are both set; give one",
                "max_completion_tokens",
            )
        given = self.max_completion_tokens
        return self._make_params(
            self.max_tokens if given is None else given,
            (self.top_logprobs or 0) if self.logprobs else None,
        )


class ChatMessage(msgspec.Struct):
    """The assistant's answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct):
    """stop_reason: the stop string or stop token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What a chunk adds to the message. The role comes with a choice's first chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """stop_reason: comes with finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One server-sent event. prompt_token_ids: come with each choice's first chunk."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))
async def create_chat_completion(body: ChatCompletionRequest, http: HTTPRequest) -> Response:
    """Answer the messages n times."""
    return await generate(http, body, _ChatAnswer)


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


def _check_template_arguments(value: Any) -> None:
    """Stops to count at the bound."""
    count, rest = 0, [value]
    while rest:
        inner = rest.pop()
        if isinstance(inner, (dict, list)):
            count += len(inner)
            if count > MAX_TEMPLATE_VALUES:
                raise InvalidRequestError(
                    "chat_template_kwargs has more values, those inside of others included, than"
                    f" the bound of {MAX_TEMPLATE_VALUES}; send fewer",
                    "chat_template_kwargs",
                )
            rest += inner.values() if isinstance(inner, dict) else inner


class _ChatAnswer(Answer[ChatCompletionRequest]):
    """Invariant: the role is in the first chunk of each choice and in no other."""

    id_prefix = "chatcmpl"
    operation = "chat"
    bytes_per_logprob = BYTES_PER_LOGPROB
    prompt_field = "messages"

    @classmethod
    async def prompts(cls, service: Service, body: ChatCompletionRequest) -> list[str | list[int]]:
        return [
            await chat_token_ids(
                service, body.messages, body, add_special_tokens=body.add_special_tokens
            )
        ]

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
        num_top = self._body.prompt_logprobs
        if num_top is None:
            return ()
        entries = self._generation.prompt_entries(0)
        return (prompt_logprobs_json(self._service.tokenizer, entries, num_top),)

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
