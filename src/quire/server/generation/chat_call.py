"""The common form of chat calls, into which the bodies of all chat APIs are converted.

Plain data: messages, tools, reasoning options and the answer's form. The bodies of OpenAI's chat
and Responses, Anthropic's Messages and Ollama's API make it; `chat_prompt` reads it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.parsers.tool_use import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Whether and for how long the model reasons. If a field is None, the template decides."""

    #: OpenAI's effort level, such as "low", which is passed to the template.
    effort: str | None = None
    #: Value of the template's `enable_thinking`.
    is_enabled: bool | None = None
    #: Number of reasoning tokens after which the reasoning is ended.
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A chat call. Fields without a comment have the meaning of the chat API's fields."""

    #: Messages in the form of OpenAI's chat API, including tool calls and tool messages.
    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse = NO_TOOLS
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    #: Constraint on the text of an answer that calls no tool; None means free text.
    answer_format: StructuredOutputsParams | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    #: Settings that replace those of the image processor.
    picture_settings: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    #: The answer that the caller expects; None if the call has no prediction.
    prediction: str | None = None
    #: Whether a prompt that is too long is cut when its request is made.
    is_truncated: bool = False
    #: The API's name of an image in a tool's result, to report one that the prompt leaves out; None
    #: means the name of its part.
    image_result_name: str | None = None
    #: Names of the body's fields that have no equivalent in the messages.
    left_out: Collection[str] = ()
