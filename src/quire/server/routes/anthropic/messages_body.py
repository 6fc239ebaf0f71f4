"""The bodies of Anthropic's Messages API, and their conversion to a chat call and params.

Unknown fields are ignored and named in a header of the answer, since Anthropic's clients change
weekly and send fields that only Anthropic's servers support.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from quire.core.sampling_params import SamplingParams
from quire.server.generation.call_body import (
    HINTS,
    WORDS,
    ChatBody,
    Count,
    Params,
    Texts,
    left_out,
)
from quire.server.generation.chat_call import ChatCall
from quire.server.generation.http_generation import fields_named
from quire.server.generation.sampling_fields import ChoiceFields
from quire.server.http.body import Body, UnknownFields
from quire.server.limits import CallLimits
from quire.server.routes.anthropic.blocks import chat_messages, left_out_name
from quire.server.routes.anthropic.call_fields import (
    answer_format_of,
    ignored_tools,
    reasoning_of,
    shows_thinking,
    tool_use_of,
)
from quire.server.routes.openai.chat_body import check_few_values
from quire.text.chat_messages import LeftOut

FIELD_NAMES = {
    "prompt": "messages",
    "reasoning": "thinking",
    "response_format": "output_config",
    "stop": "stop_sequences",
}
"""Maps a field name in errors about the chat call to the body's field that it was made from."""

_OBJECT = {"type": "object"}
_TEXT_BLOCK = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}
_BLOCK = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {
            "enum": [*("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")]
        }
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]},
    },
}
_MESSAGES: dict[str, Any] = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TOOL = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"},
        "description": {"type": "string"},
        "input_schema": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"const": "object"}},
        },
        "strict": {"type": "boolean"},
    },
}
_CHOICE = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": {"type": "string"},
        "disable_parallel_tool_use": {"type": "boolean"},
    },
}
_THINKING = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["enabled", "adaptive", "between_tools", "disabled"]},
        "budget_tokens": {"type": "integer", "minimum": 1},
        "display": {"enum": ["summarized", "omitted"]},
    },
}


class PromptFields(Body):
    """The fields that determine the prompt, shared by messages and count_tokens."""

    unknown_fields: ClassVar[UnknownFields] = "ignore"
    list_bounds: ClassVar[Mapping[str, str]] = {"tools": "max_list_length"}
    hints: ClassVar[frozenset[str]] = HINTS | {
        *("betas", "inference_geo", "speed"),
        *("parallel_tool_calls", "user"),
    }
    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/v1/models`",
        "messages": "objects with a `role` and a `content`: a text, or blocks of the types `text`, "
        "`tool_use`, `tool_result`, `thinking`",
        "system": "a text, or text blocks; lines `x-anthropic-...:` at its beginning are left out",
        "tools": "objects with a `name` and an `input_schema`; others are ignored",
        "tool_choice": "`auto`, `any`, `tool` with a `name`, or `none`",
        "thinking": "`enabled` with a budget, `adaptive` or `disabled`; disabled where left out",
        "output_config": "`format`: a JSON schema that the text obeys; `effort`: of the thinking",
        "output_format": "the older name of `output_config.format`",
        "chat_template_kwargs": "further variables of the model's chat template",
    }

    model: str | None = None
    messages: Any = Field(json_schema_extra=_MESSAGES)
    system: Any = left_out(**_TEXTS)
    tools: Any = left_out(type="array", items=_TOOL)
    tool_choice: Any = left_out(**_CHOICE)
    thinking: Any = left_out(**_THINKING)
    output_config: Any = left_out(**_OBJECT)
    output_format: Any = left_out(**_OBJECT)
    # an extension to Anthropic's API
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        super().check_fields(fields, limits, max_model_len)
        check_few_values(fields, "chat_template_kwargs")

    @property
    def ignored_tools(self) -> list[str]:
        """Names of the tools that the model is not offered. Raises InvalidRequestError."""
        return ignored_tools(self.tools)

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        """Raises InvalidRequestError."""
        left_out: LeftOut = {}
        messages = chat_messages(self.system, self.messages, left_out, takes_images=takes_images)
        return ChatCall(
            messages=messages,
            left_out=left_out,
            image_result_name=left_out_name("image"),
            tool_use=tool_use_of(self.tools, self.tool_choice),
            reasoning=reasoning_of(self.thinking, self.output_config),
            answer_format=answer_format_of(self.output_config, self.output_format),
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=messages[-1]["role"] == "assistant",
        )


class CountTokensRequest(PromptFields):
    """The body of POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, ChoiceFields, ChatBody):
    """The body of POST /v1/messages."""

    list_bounds: ClassVar[Mapping[str, str]] = {
        **PromptFields.list_bounds,
        "stop_sequences": "max_stop_strings",
    }
    notes: ClassVar[Mapping[str, str]] = {
        "max_tokens": "the most tokens to generate; the context may have room for fewer. 0: the "
        "prompt is computed and cached, the answer has no content",
        "stop_sequences": "the text ends before the first of these",
        "stream": "the answer comes as server-sent events, piece by piece",
        "priority": "smaller goes first, under the policy `priority`",
        "cache_salt": "cached prefixes are shared only with calls that have the same salt and key",
        "deadline_s": "seconds after which the call ends with an error",
        "speculation_history": "false: the answer is not kept for drafts of later answers",
    }

    #: Maximum number of generated tokens. It may exceed the room in the context. 0 means that the
    #: prompt is computed and cached without an answer. The engine then still generates a token.
    max_tokens: Count = Field(json_schema_extra={"minimum": 0})
    stop_sequences: Texts | None = left_out(**WORDS)

    @property
    def answers_nothing(self) -> bool:
        """Whether only the prompt is computed."""
        return self.max_tokens == 0

    @property
    def shows_thinking(self) -> bool:
        """Whether thinking blocks contain the text of the reasoning."""
        return shows_thinking(self.thinking)

    def to_params(self) -> Params:
        """Raises InvalidRequestError."""
        with fields_named(FIELD_NAMES):
            sampling = SamplingParams(
                **self.given(ChoiceFields.model_fields),
                stop=self.stop_sequences or None,
                max_tokens=1 if self.answers_nothing else self.max_tokens,
            )
        return Params(sampling)
