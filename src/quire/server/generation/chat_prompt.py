"""Turns a chat call into a prompt, and into the parser of the model's text.

Used by Chat, Responses, Messages and the routes that only count tokens. The model's template
renders the messages and tools. The model's dialect determines which text may be generated and how
it is parsed. Errors name fields of `ChatCall`; `fields_named` replaces them by the API's names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.core.structured_outputs import KINDS
from quire.engine_client.grammar_forms import WholeMessage
from quire.engine_client.inputs import InputProcessor
from quire.server.generation.chat_call import ChatCall, ReasoningOptions
from quire.server.generation.chat_images import ChatImages, read_images
from quire.server.generation.http_generation import Prompts, blamed_on
from quire.server.http.long_work import LONG_TEXT_CHARACTERS, call_for_text
from quire.server.limits import check_text
from quire.server.service import Service
from quire.text.chat_encoding import encode_chat
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.dialect import Dialect, MessageParser
from quire.text.parsers.tool_use import NO_TOOLS, ToolMode, ToolUse

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on and off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt(Prompts):
    """The prompt of one chat call, and the settings of the parser of its answers."""

    dialect: Dialect
    tool_use: ToolUse = NO_TOOLS
    #: The beginning of the assistant's message that the template has put into the prompt.
    beginning: str = ""
    #: Whether an answer without tool calls has to obey a constraint.
    has_answer_format: bool = False

    @property
    def token_ids(self) -> list[int]:
        (token_ids,) = self.inputs
        assert isinstance(token_ids, list)
        return token_ids

    def new_parser(self) -> MessageParser:
        """A parser for the text of one choice."""
        return self.dialect.parser(
            self.tool_use, self.beginning, has_answer_format=self.has_answer_format
        )


class MakesChatCall(Protocol):
    """A body that can be converted to a chat call. `vars` of the body returns its fields."""

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall: ...


async def chat_call_of(service: Service, body: MakesChatCall) -> ChatCall:
    """The chat call that a body becomes. Raises InvalidRequestError. A long body is converted in a
    thread, since each of its blocks, items and tools is examined."""
    size, takes_images = _num_characters(vars(body)), service.image_reader is not None
    return await call_for_text(size, body.to_chat_call, takes_images=takes_images)


async def chat_prompt(service: Service, call: ChatCall) -> ChatPrompt:
    """Render and encode a call, and read its images. Raises InvalidRequestError, and
    UploadsFullError if the images of all calls take too much memory."""
    tools = shown_tools(call.tool_use, hides_unused=service.answer_defaults.hides_unused_tools)
    wanted = call.answer_format
    form = [getattr(wanted, kind) for kind in KINDS] if wanted is not None else ()
    found = await read_images(service, call, has_tools=bool(tools))
    parts = [found.messages, tools, call.chat_template_kwargs, form, call.prediction, found.texts]
    return await call_for_text(_num_characters(parts), _chat_prompt, service, call, tools, found)


def shown_tools(tool_use: ToolUse, *, hides_unused: bool) -> list[dict[str, Any]]:
    """The tools in the form that the template takes. With `hides_unused`, the list is empty if no
    tool may be called."""
    if hides_unused and tool_use.mode is ToolMode.NONE:
        return []
    return [tool.as_openai() for tool in tool_use.tools]


def _chat_prompt(
    service: Service, call: ChatCall, tools: list[dict[str, Any]], found: ChatImages
) -> ChatPrompt:
    begins_message = call.add_generation_prompt
    if begins_message is None:
        begins_message = not call.continue_final_message
    # Render the messages with the template, and encode the text.
    template = service.chat_template
    variables = reasoning_variables(template, call.reasoning, has_tools=bool(tools))

    def check(text: str) -> None:
        longest = service.engine.limits.max_model_len
        check_text(text, service.tokenizer, longest, "messages", is_truncated=call.is_truncated)

    with blamed_on("messages"):
        encoded = encode_chat(
            template,
            service.tokenizer,
            found.to_encode,
            allow_special_tokens=service.allow_special_tokens,
            add_special_tokens=call.add_special_tokens,
            check_text=check,
            add_generation_prompt=begins_message,
            continue_final_message=call.continue_final_message,
            tools=tools or None,
            chat_template_kwargs={
                **service.default_chat_template_kwargs,
                **variables,
                **(call.chat_template_kwargs or {}),
            },
            finds_beginning=service.dialect.has_reasoning,
            leaves_out=service.unknown_fields != "refuse",
        )
        images = found.placed(encoded.token_ids)
    # Constrain the whole message, of which reasoning and tool calls are a part.
    form = WholeMessage(
        call.tool_use, call.answer_format, call.reasoning.budget_tokens, encoded.beginning
    )
    return ChatPrompt(
        inputs=[encoded.token_ids],
        form=None if form.is_free else form,
        kept_special_token_ids=_kept_special_token_ids(service, call.tool_use),
        left_out=[*call.left_out, *found.left_out, *encoded.left_out],
        images=[images],
        prediction_token_ids=_prediction_token_ids(service, call.prediction),
        dialect=service.dialect,
        tool_use=call.tool_use,
        beginning=encoded.beginning,
        has_answer_format=call.answer_format is not None,
    )


def _prediction_token_ids(service: Service, prediction: str | None) -> tuple[int, ...]:
    if prediction is None:
        return ()
    return InputProcessor(service.tokenizer, service.engine.limits).encode_prediction(prediction)


def _kept_special_token_ids(service: Service, tool_use: ToolUse) -> frozenset[int]:
    """The special tokens that stay in the text, since the parser needs them. The marks of tool
    calls are included only if a tool may be called."""
    return service.tokenizer.special_ids_of(service.dialect.tokens_kept_for(tool_use))


def reasoning_variables(
    template: ChatTemplate, reasoning: ReasoningOptions, *, has_tools: bool
) -> dict[str, Any]:
    """The reasoning options as template variables, without variables the template ignores. An
    effort of "none" turns reasoning off if the template has a switch but no such effort."""
    is_enabled = reasoning.is_enabled
    if is_enabled is None and reasoning.effort is not None:
        is_enabled = reasoning.effort != "none"
    wanted: dict[str, Any] = {}
    if is_enabled is not None:
        wanted |= dict.fromkeys(_THINKING_SWITCHES, is_enabled)
    if reasoning.effort not in (None, "none"):
        wanted["reasoning_effort"] = reasoning.effort
    return {
        name: value
        for name, value in wanted.items()
        if template.mentions(name, has_tools=has_tools)
    }


def _num_characters(value: Any) -> int:
    """Number of characters of all strings in a JSON value. Stops counting beyond the bound of
    `call_for_text`."""
    count, rest = 0, [value]
    while rest and count < LONG_TEXT_CHARACTERS:
        each = rest.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, Mapping):
            count += len(each)
            rest += [*each, *each.values()]
        elif isinstance(each, Sequence):
            count += len(each)
            rest.extend(each)
    return count
