"""POST /tokenize and /detokenize of vLLM's API.

The engine is only asked for the maximum context length and the vocabulary size. Long inputs are
processed in a thread.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.server.generation.call_body import TOKEN_IDS, TokenIds
from quire.server.generation.chat_call import ChatCall
from quire.server.generation.chat_prompt import chat_call_of, chat_prompt
from quire.server.generation.http_generation import blamed_on
from quire.server.http.body import Body
from quire.server.http.json_body import MAX_VALUES
from quire.server.http.long_work import call_for_text
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openai.chat_body import ChatPromptFields, Messages
from quire.server.routes.openai.chat_tools import labels_of_tools, make_tool_use, openai_tools
from quire.server.routes.openai.logprobs import token_name
from quire.server.routes.openapi import answers
from quire.server.service import Service, service_of

router = Endpoints()

MAX_CHARACTERS = 2 << 20
"""Maximum characters of one text. Its tokenization takes seconds, in a thread."""

MAX_TOKENS = 1 << 20
"""Maximum number of tokens in one list."""

_TEMPLATE_FIELDS = tuple(ChatPromptFields.model_fields)


class TokenizeRequest(ChatPromptFields):
    """The body of POST /tokenize: a prompt, or messages with options of the chat template."""

    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/v1/models`",
        "prompt": "a text; or give `messages`",
        "messages": "objects with a `role`, a `content` and perhaps a `name`",
        "add_special_tokens": "where left out: true for a prompt, false for messages",
        "return_token_strs": "the text of each token, too",
    }

    model: str | None = None
    prompt: str | None = Field(default=None, json_schema_extra={"maxLength": MAX_CHARACTERS})
    messages: Messages | None = None
    #: Whether to add the tokenizer's special tokens around the text. None means true for a prompt
    #: and false for messages, since chat templates write special tokens themselves.
    add_special_tokens: bool | None = None
    #: Whether the answer also has the text of each token.
    return_token_strs: bool = False

    def check(self) -> None:
        """Raises InvalidRequestError if the body has both or neither of a prompt and messages, or
        has a prompt with options of messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        if self.prompt is None:
            return
        if len(self.prompt) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"prompt has {len(self.prompt)} characters, above the bound of {MAX_CHARACTERS}",
                "prompt",
            )
        for name in _TEMPLATE_FIELDS:
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} is set, but goes with messages only; leave it out", name
                )

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        """The chat call of a body with messages."""
        return ChatCall(
            messages=self.messages or [],
            tool_use=make_tool_use(openai_tools(self.tools or ()), None),
            reasoning=self.reasoning_options(),
            chat_template_kwargs=self.chat_template_kwargs,
            picture_settings=self.mm_processor_kwargs or {},
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=bool(self.add_special_tokens),
        )


class DetokenizeRequest(Body):
    """The body of POST /detokenize: token ids, including special tokens."""

    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/v1/models`",
        "tokens": "token ids",
    }

    max_values: ClassVar[int] = MAX_VALUES  # a list of token ids may be long

    model: str | None = None
    tokens: TokenIds = Field(json_schema_extra=dict(TOKEN_IDS))


class Tokenized(msgspec.Struct):
    """The tokens of a text."""

    #: Number of tokens.
    count: int
    #: Maximum number of tokens of a prompt and its answer together.
    max_model_len: int
    tokens: list[int]
    #: Text of each token, or its bytes if they are not complete characters; null if the caller did
    #: not ask for it.
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The text of token ids."""

    prompt: str


@router.post("/tokenize", responses=answers(Tokenized))
async def tokenize(body: TokenizeRequest, http: HTTPRequest) -> Response:
    """The token ids of a text, or of messages in the form that the model gets."""
    service = service_of(http)
    service.check_model(body.model)
    body.check()
    if body.prompt is not None:
        with_special = body.add_special_tokens is not False
        token_ids = await call_for_text(
            len(body.prompt), _encode, service, body.prompt, with_special
        )
    else:
        service.report_or_refuse_fields(http, labels_of_tools(body.tools))
        prompt = await chat_prompt(service, await chat_call_of(service, body))
        service.report_or_refuse_fields(http, prompt.left_out)
        token_ids = prompt.token_ids
    content = await call_for_text(
        len(token_ids), _tokenized, service, token_ids, body.return_token_strs
    )
    return Response(content, media_type="application/json")


@router.post("/detokenize", responses=answers(Detokenized))
async def detokenize(body: DetokenizeRequest, http: HTTPRequest) -> Response:
    """The text of token ids. For the token ids from /tokenize, it is the tokenized text."""
    service = service_of(http)
    service.check_model(body.model)
    if len(body.tokens) > MAX_TOKENS:
        raise InvalidRequestError(
            f"tokens has {len(body.tokens)} entries, above the bound of {MAX_TOKENS}", "tokens"
        )
    content = await call_for_text(len(body.tokens), _detokenized, service, body.tokens)
    return Response(content, media_type="application/json")


def _encode(service: Service, text: str, with_special_tokens: bool) -> list[int]:
    with blamed_on("prompt"):
        return service.tokenizer.encode(text, add_special_tokens=with_special_tokens)


def _tokenized(service: Service, token_ids: list[int], with_strs: bool) -> bytes:
    answer = Tokenized(len(token_ids), service.engine.limits.max_model_len, token_ids)
    if with_strs:
        answer.token_strs = [token_name(service.tokenizer, token_id) for token_id in token_ids]
    return msgspec.json.encode(answer)


def _detokenized(service: Service, token_ids: list[int]) -> bytes:
    vocab_size = service.engine.limits.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"tokens contains {token_id}, but token ids go from 0 to {vocab_size - 1}", "tokens"
            )
    text = service.tokenizer.decode(token_ids, skip_special_tokens=False)
    return msgspec.json.encode(Detokenized(text))
