"""The body of POST /v1/chat/completions, and the fields that it shares with /tokenize.

A body is converted to sampling params and a `ChatCall`. Independent of the engine.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.server.generation.body import NOT_FOR_BEAMS, NOT_SUPPORTED, GenerationBody
from quire.server.generation.call_body import ChatBody, MaxTokens, Params, bounded, left_out
from quire.server.generation.chat_call import ChatCall, ReasoningOptions
from quire.server.http.body import Body, UnknownFields
from quire.server.limits import CallLimits
from quire.server.routes.openai.chat_tools import (
    labels_of_tools,
    make_tool_use,
    openai_tools,
    read_tool_choice,
)
from quire.text.json_values import has_more_values

_OLD_NAMES = {"functions": "tools", "function_call": "tool_choice"}

MAX_OBJECT_VALUES = 10_000
"""Maximum number of JSON values in chat_template_kwargs, and in mm_processor_kwargs, at all
depths."""


_TOOL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "cache_control": {"description": "accepted; it changes no answer"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "cache_control": {"description": "accepted; it changes no answer"},
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.:/-]{1,128}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {
                    "type": ["object", "null"],
                    "properties": {"type": {"const": "object"}},
                },
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
}
_ALLOWED = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": _NAMED},
            },
        },
    },
}
_TOOL_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=0, lt=2**31)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, json_schema_extra={"items": _TOOL})]


class ReasoningFields(Body):
    """The object `reasoning`, by which clients of some gateways control the reasoning."""

    unknown_fields: ClassVar[UnknownFields] = "ignore"
    notes: ClassVar[Mapping[str, str]] = {
        "effort": "the same as `reasoning_effort`",
        "max_tokens": "the same as `thinking_token_budget`",
        "enabled": "false: the model does not think first, where its template can say so",
        "exclude": "true: the answer leaves the reasoning out",
    }

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool = False


class PredictedPart(Body):
    """A part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """The object `prediction`: the text that the caller expects as the answer."""

    notes: ClassVar[Mapping[str, str]] = {"content": "a text, or a list of parts of text"}

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """The parts joined, or the text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TemplateOptions(Body):
    """The fields that control how the template renders messages to a prompt."""

    notes: ClassVar[Mapping[str, str]] = {
        "chat_template_kwargs": "further variables of the model's chat template",
        "add_generation_prompt": "false: the prompt ends after the last message",
        "continue_final_message": "the answer goes on where the last message ends",
    }

    chat_template_kwargs: dict[str, Any] | None = None
    #: Whether the prompt begins the answer's message; null means true unless continue_final_message
    #: is set.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        super().check_fields(fields, limits, max_model_len)
        for name in ("chat_template_kwargs", "mm_processor_kwargs"):
            check_few_values(fields, name)


class ChatPromptFields(TemplateOptions):
    """The fields of chat and /tokenize, besides the messages, that determine the prompt."""

    list_bounds: ClassVar[Mapping[str, str]] = {"tools": "max_list_length"}
    notes: ClassVar[Mapping[str, str]] = {
        "tools": "functions that the model may call: name, description and a JSON schema of the"
        " arguments",
        "reasoning_effort": "handed to the model's template; `none` turns reasoning off",
        "reasoning": "`effort`, `max_tokens`, `enabled` and `exclude` together",
        "enable_thinking": "the same as `reasoning.enabled`",
        "mm_processor_kwargs": "settings of the model's image processor for this call, as"
        ' `{"max_pixels": 500000}`',
    }

    tools: Tools | None = None
    reasoning_effort: Effort | None = None
    # extensions to OpenAI's API
    reasoning: ReasoningFields | None = None
    enable_thinking: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def reasoning_options(self, budget_tokens: int | None = None) -> ReasoningOptions:
        """The reasoning options in the fields. `budget_tokens` is the value of a further field for
        the budget. Raises InvalidRequestError."""
        given = self.reasoning or ReasoningFields()
        return ReasoningOptions(
            effort=_one_of(
                ("reasoning_effort", self.reasoning_effort), ("reasoning.effort", given.effort)
            ),
            is_enabled=_one_of(
                ("enable_thinking", self.enable_thinking), ("reasoning.enabled", given.enabled)
            ),
            budget_tokens=_one_of(
                ("thinking_token_budget", budget_tokens), ("reasoning.max_tokens", given.max_tokens)
            ),
        )


_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MEDIA_PARTS = [
    {
        "type": "object",
        "required": ["type", name],
        "properties": {
            "type": {"const": name},
            name: {
                "type": "object",
                "required": ["url"],
                "properties": {"url": {"type": "string"}},
            },
        },
    }
    for name in ("image_url", "video_url")
]
_PARTS = {"type": "array", "items": {"anyOf": [_TEXT_PART, *_MEDIA_PARTS]}}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
        "name": {"type": "string"},
    },
}
Messages = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True, json_schema_extra={"items": _MESSAGE, "minItems": 1}),
]
"""Objects with a role and a content, checked by `text.chat_messages`."""


class ChatCompletionRequest(GenerationBody, ChatPromptFields, ChatBody):
    """The body of POST /v1/chat/completions."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NOT_SUPPORTED,
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "web_search_options": (),
    }
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NOT_FOR_BEAMS,
        "logprobs": (False,),
        "prediction": (),
        "top_logprobs": (),
        "tools": ([],),
    }
    list_bounds: ClassVar[Mapping[str, str]] = {
        **GenerationBody.list_bounds,
        **ChatPromptFields.list_bounds,
    }

    notes: ClassVar[Mapping[str, str]] = {
        "messages": "objects with a `role`, a `content` and perhaps a `name`",
        "max_completion_tokens": "the newer name of `max_tokens`",
        "logprobs": "each token's log-probability and bytes",
        "top_logprobs": "this many likeliest tokens at each position; with `logprobs` only",
        "tool_choice": "`none`, `auto`, `required`, a function, or the tools that are allowed",
        "prediction": "the text that the answer is expected to have; it changes no token, but"
        " tokens as expected come faster",
        "parallel_tool_calls": "false: one message calls one tool at most",
        "echo": "true: the content begins with the last message, where that is the assistant's",
        "include_reasoning": "false: the answer leaves the reasoning out",
        "thinking_token_budget": "tokens of reasoning after which it is ended",
        "add_special_tokens": "true: the rendered messages get the tokenizer's special "
        "tokens, beside those of the template",
    }

    #: The messages. A template may read additional fields of a message, such as `name`.
    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    #: Number of likeliest tokens to report at each position, with `logprobs`.
    top_logprobs: int | None = bounded("logprobs")
    tool_choice: str | dict[str, Any] | None = left_out(**_TOOL_CHOICE)
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # extensions to OpenAI's API
    echo: bool = False
    include_reasoning: bool = True
    thinking_token_budget: Budget | None = None
    #: Whether the tokenizer adds its special tokens around the rendered messages. Most templates
    #: write these tokens themselves.
    add_special_tokens: bool = False

    @property
    def gives_reasoning(self) -> bool:
        """Whether the answer includes the reasoning."""
        return self.include_reasoning and not (
            self.reasoning is not None and self.reasoning.exclude
        )

    @property
    def labels(self) -> list[str]:
        return [*super().labels, *labels_of_tools(self.tools)]

    @property
    def names_a_tool(self) -> bool:
        """Whether the caller has named the function to be called."""
        choice = self.tool_choice
        return isinstance(choice, dict) and choice.get("type") == "function"

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name in _OLD_NAMES:
            return f"{name} is the old form of {_OLD_NAMES[name]}; send {_OLD_NAMES[name]} instead"
        return super()._refusal(name)

    def to_params(self) -> Params:
        """Raises InvalidRequestError."""
        if self.top_logprobs and not self.logprobs:
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
            structured_outputs=None,
        )

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        mode, names = read_tool_choice(self.tool_choice)
        tools = openai_tools(self.tools or ())
        is_parallel = self.parallel_tool_calls is not False and not self.names_a_tool
        return ChatCall(
            messages=self.messages,
            tool_use=make_tool_use(tools, mode, names, is_parallel=is_parallel),
            reasoning=self.reasoning_options(self.thinking_token_budget),
            chat_template_kwargs=self.chat_template_kwargs,
            picture_settings=self.mm_processor_kwargs or {},
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            answer_format=self.answer_format(),
            prediction=None if self.prediction is None else self.prediction.text,
            is_truncated=self.is_truncated,
        )


def _one_of(*given: tuple[str, Any]) -> Any:
    """The value of the field that is set; None if none is. Raises InvalidRequestError if several
    are set and differ."""
    found = [(name, value) for name, value in given if value is not None]
    if len(found) > 1 and found[0][1] != found[1][1]:
        (first, _), (second, _) = found
        raise InvalidRequestError(f"{first} and {second} are both set and differ; give one", first)
    return found[0][1] if found else None


def check_few_values(fields: Mapping[str, Any], name: str) -> None:
    """Check the number of values in an object of the body's fields. Raises InvalidRequestError."""
    if has_more_values(fields.get(name), MAX_OBJECT_VALUES):
        raise InvalidRequestError(
            f"{name} has more values, at all depths together, than the bound of"
            f" {MAX_OBJECT_VALUES}; send fewer",
            name,
        )
