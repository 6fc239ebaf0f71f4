"""The body of a Responses call, and its conversion to a chat call.

Fields for features of OpenAI's servers other than generation (search, background work, stored
conversations) are refused with an error. Unknown fields are ignored and named in a header of the
answer.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from quire.core.sampling_params import SamplingDefaults, SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError, shown
from quire.server.generation.answer_format import AnswerFormatFields
from quire.server.generation.answer_store import StoredItems
from quire.server.generation.call_body import (
    HINTS,
    ChatBody,
    Count,
    MaxTokens,
    Params,
    Texts,
)
from quire.server.generation.chat_call import ChatCall, ReasoningOptions
from quire.server.generation.sampling_fields import SamplingFields
from quire.server.http.body import UnknownFields
from quire.server.limits import CallLimits
from quire.server.routes.openai.chat_body import TemplateOptions
from quire.server.routes.openai.responses.conversation import Conversation
from quire.server.routes.openai.responses.input_items import left_out_name, messages_of
from quire.server.routes.openai.responses.response_object import Echo
from quire.server.routes.openai.responses.tool_definitions import ToolNames, read_tools, tool_use
from quire.text.chat_messages import LeftOut
from quire.text.parsers.tool_use import Tool

LOGPROBS = "message.output_text.logprobs"
"""The value in `include` that asks for log-probabilities."""

WHOLE_CONTEXT = -1
"""The value of truncate_prompt_tokens that cuts a prompt to the context less one token."""

FIELD_NAMES: Mapping[str, str] = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning",
    "max_tokens": "max_output_tokens",
    "truncate_prompt_tokens": "truncation",
}
"""Maps field names in errors about the chat call to the names of the body's fields."""

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "truncation",
    "user",
)
_OWN_HINTS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store"}
)
"""Fields that other bodies ignore, but that have a meaning here or are repeated in the answer."""

_ECHOED_REASONING = ("effort", "summary", "generate_summary")
_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": _TEXT},
}
_IMAGE_PART = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {"type": {"const": "input_image"}, "image_url": _TEXT},
}
_PARTS = {"type": "array", "items": {"anyOf": [_PART, _IMAGE_PART]}}
_CONTENT = {"anyOf": [_TEXT, _PARTS]}
_ITEM = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": _CONTENT,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"const": "function_call"},
                "call_id": _TEXT,
                "name": _TEXT,
                "arguments": _TEXT,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": _TEXT,
                "output": _CONTENT,
            },
        },
    ]
}
_TOOL = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "minLength": 1},
        "description": _TEXT,
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
Items = Annotated[list[Any], Field(fail_fast=True, json_schema_extra={"items": _ITEM})]
Definitions = Annotated[list[Any], Field(fail_fast=True, json_schema_extra={"items": _TOOL})]


class ContextBody(TemplateOptions):
    """The fields that determine the prompt, shared by /responses and /responses/input_tokens."""

    unknown_fields: ClassVar[UnknownFields] = "ignore"
    list_bounds: ClassVar[Mapping[str, str]] = {"tools": "max_list_length"}
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "conversation": (),
        "personality": (),
    }
    notes: ClassVar[Mapping[str, str]] = {
        "input": "a text, or items: messages, calls and what they brought, reasoning",
        "instructions": "the system's message, before the input",
        "tools": "functions, custom tools, and namespaces of them; others are left out, by name",
        "tool_choice": "`none`, `auto`, `required`, or an object that names tools",
        "parallel_tool_calls": "false: at most one call in an answer",
        "text": "`format`: the form of the answer's text; `verbosity` changes nothing",
        "reasoning": "`effort`: how much the model thinks, where its template knows efforts",
        "truncation": "`auto`: a prompt that is too long loses its first tokens",
        "previous_response_id": "go on from a stored response, where the server stores any",
    }

    model: str | None = None
    input: str | Items
    instructions: str | None = None
    tools: Definitions = Field(default_factory=list)
    tool_choice: Annotated[str | dict[str, Any], Field(json_schema_extra={"default": "auto"})] = (
        "auto"
    )
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field(default_factory=dict)
    reasoning: dict[str, Any] = Field(default_factory=dict)
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"

    #: The conversation that the input continues, once the route has set it.
    _conversation: Conversation = PrivateAttr(default_factory=Conversation)
    #: The tools that `tools` defines, once they have been read.
    _tools: tuple[tuple[Tool, ...], ToolNames] | None = PrivateAttr(default=None)

    @property
    def items(self) -> list[Any]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def conversation(self) -> Conversation:
        """The conversation that the input continues."""
        return self._conversation

    @property
    def tool_names(self) -> ToolNames:
        """The names of the defined tools. Raises InvalidRequestError."""
        return self._read_tools()[1]

    def continue_conversation(self, conversation: Conversation) -> None:
        """Set the conversation that the input continues, and replace references in the input by
        stored items. Raises InvalidRequestError."""
        self._conversation = conversation
        if not isinstance(self.input, str):
            self.input = conversation.resolved(self.input)

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        """Raises InvalidRequestError."""
        tools, names = self._read_tools()
        effort = self.reasoning.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise InvalidRequestError(
                f"reasoning.effort is {shown(effort)}, but must be a string", "reasoning"
            )
        left_out: LeftOut = {}
        history = self._conversation.history
        return ChatCall(
            messages=messages_of(
                self.instructions, history, self.items, left_out, takes_images=takes_images
            ),
            left_out=left_out,
            image_result_name=left_out_name("input_image"),
            tool_use=tool_use(tools, names, self.tool_choice, is_parallel=self.parallel_tool_calls),
            reasoning=ReasoningOptions(effort=effort),
            answer_format=self._form(),
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            is_truncated=self.truncation == "auto",
        )

    def _form(self) -> StructuredOutputsParams | None:
        return _format_of_text(self.text.get("format"))

    def _read_tools(self) -> tuple[tuple[Tool, ...], ToolNames]:
        if self._tools is None:
            self._tools = read_tools(self.tools)
        return self._tools


class ResponsesRequest(AnswerFormatFields, SamplingFields, ContextBody, ChatBody):
    """The body of POST /v1/responses."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ContextBody.not_supported,
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "moderation": (),
        "n": (1,),
        "prompt": (),
    }
    hints: ClassVar[frozenset[str]] = HINTS - _OWN_HINTS | {
        *("client_metadata", "image", "stream_options"),
    }
    list_bounds: ClassVar[Mapping[str, str]] = {
        **ContextBody.list_bounds,
        **SamplingFields.list_bounds,
        "include": "max_list_length",
        "metadata": "max_list_length",
    }
    notes: ClassVar[Mapping[str, str]] = {
        "stream": "the answer comes as server-sent events, piece by piece",
        "max_output_tokens": "the most tokens to generate, those of reasoning included",
        "include": f"`{LOGPROBS}`; what else OpenAI has changes nothing",
        "top_logprobs": f"this many likeliest tokens at each position; with `{LOGPROBS}` only",
        "store": "keep the response, where the server stores any",
        "metadata": "comes back in the answer",
        "enable_response_messages": "the answer has the prompt and what the model wrote, as text"
        " and as token ids",
        "max_tool_calls": "accepted: it counts calls of tools that the server runs, and none is",
    }

    max_output_tokens: MaxTokens | None = None
    include: Texts = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    store: bool = True
    # The answer repeats these fields; they change no token.
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: Count | None = None
    # extensions to OpenAI's API
    enable_response_messages: bool = False

    _listed_items: StoredItems = PrivateAttr(default_factory=StoredItems)

    @property
    def listed_items(self) -> StoredItems:
        """The input's items in their stored form. Call `to_chat_call` before."""
        return self._listed_items

    @property
    def gives_logprobs(self) -> bool:
        return LOGPROBS in self.include

    def check_amounts(self, limits: CallLimits, max_logprobs: int) -> None:
        if self.top_logprobs is not None and self.top_logprobs > max_logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {self.top_logprobs}, but must be at most {max_logprobs}",
                "top_logprobs",
            )

    def to_params(self) -> Params:
        if self.top_logprobs and not self.gives_logprobs:
            raise InvalidRequestError(
                f"top_logprobs is set, but include lacks {LOGPROBS!r}; add it", "top_logprobs"
            )
        if self.gives_logprobs and self.tools and self.tool_choice != "none":
            raise InvalidRequestError(
                f"include has {LOGPROBS!r}, which does not go with tools that may be called; leave"
                " one of them out, or set tool_choice to none",
                "include",
            )
        given = self.given(SamplingFields.model_fields)
        if self.truncation == "auto":
            given["truncate_prompt_tokens"] = WHOLE_CONTEXT
        logprobs = (self.top_logprobs or 0) if self.gives_logprobs else None
        return Params(SamplingParams(**given, max_tokens=self.max_output_tokens, logprobs=logprobs))

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        call = super().to_chat_call(takes_images=takes_images)
        if self.store:
            self._listed_items = self._conversation.listed(self.items)
        return call

    def _form(self) -> StructuredOutputsParams | None:
        form, other = super()._form(), self.answer_format()
        if form is not None and other is not None:
            raise InvalidRequestError(
                "text.format and another field for the answer's form are both set; give one",
                "text.format",
            )
        return other if form is None else form

    def echo(self, defaults: SamplingDefaults, *, is_stored: bool) -> Echo:
        """The fields of the body that the answer repeats. A missing field gets the value that was
        used, such as the model's from `defaults`. `is_stored`: whether the answer will be stored.
        """
        return Echo(
            **{name: getattr(self, name) for name in _ECHOED},
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            top_logprobs=self.top_logprobs or 0,
            metadata=self.metadata,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning={name: self.reasoning.get(name) for name in _ECHOED_REASONING},
            store=is_stored,
            text={"format": {"type": "text"}} | self.text,
            tool_choice=self.tool_choice,
            tools=list(self.tool_names.served),
        )


class InputTokensRequest(ContextBody):
    """The body of POST /v1/responses/input_tokens: the fields that determine the prompt."""


def _format_of_text(form: Any) -> StructuredOutputsParams | None:
    """The constraint that text.format asks for; None for free text. Raises InvalidRequestError."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object" and form.get("schema") in (None, {}):
        return StructuredOutputsParams(json_object=True)
    if kind not in ("json_object", "json_schema"):  # json_object may have a schema, as in chats
        raise InvalidRequestError(
            f"text.format is {shown(form)}, but must be an object of type text, json_schema or"
            " json_object",
            "text.format",
        )
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"text.format.schema is {shown(schema)}, but must be a JSON schema", "text.format"
        )
    return StructuredOutputsParams(json=schema)
