"""A chat call as every API's body becomes one: messages, tools, reasoning, the answer's form.

Plain data between the bodies of chat, Responses and Messages and what they share.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.parsers.tool_use import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Whether and how long the model thinks before it answers. None: as its template has it.

    effort: as OpenAI names it, handed to the template. is_enabled: the template's
    `enable_thinking`. budget_tokens: so many tokens of reasoning, then it is ended.
    """

    effort: str | None = None
    is_enabled: bool | None = None
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """messages: in the form of OpenAI's chat API, tool calls and tool messages included.

    answer_format: what the answer's text obeys, where it calls no tool.
    chat_template_kwargs, add_generation_prompt, continue_final_message, add_special_tokens: as in
    the chat API. is_truncated: a prompt that is too long is cut, when its request is made.
    left_out: names of what the body has and the messages have not.
    """

    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse = NO_TOOLS
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    answer_format: StructuredOutputsParams | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    is_truncated: bool = False
    left_out: Collection[str] = ()
