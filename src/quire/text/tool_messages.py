"""Checks tool calls and tool results in chat messages, and converts them for chat templates.

The messages have the format of OpenAI's API. Called by `text.chat_messages` and
`text.chat_template`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequestError, shown
from quire.text.json_values import has_more_values, text_has_more_values

Message = dict[str, Any]

MAX_CALL_VALUES = 20_000
"""The maximum number of values in one call's arguments; writing or parsing this number of values
takes a few milliseconds."""

NOT_TEXT = frozenset(
    {
        *("image", "image_url", "input_image", "document", "file", "input_file"),
        *("audio", "audio_url", "input_audio", "video", "video_url"),
    }
)
"""The types of parts that are not text but may occur in a tool's result, in any of the supported
APIs."""

_DESCRIPTION = """These functions can be called:

{}

To call one or more, write nothing but a JSON list of calls, each with a name and parameters:
[{{"name": "...", "parameters": {{...}}}}]
Their results follow in the next message. Where no function helps, answer in words."""


def check_tool_calls(calls: Any, where: str) -> None:
    """Raises InvalidRequestError unless `calls` is a list of function calls in the format of
    OpenAI's API.

    `calls` consists of plain JSON types. A call's arguments may be an object or its JSON text.
    """
    if not isinstance(calls, list):
        raise _wrong(f"{where} has tool_calls of type {type(calls).__name__}, not a list")
    for at, call in enumerate(calls):
        place = f"{where}.tool_calls[{at}]"
        if not isinstance(call, dict):
            raise _wrong(f"{place} is a {type(call).__name__}, but must be an object")
        if call.get("type", "function") != "function":
            raise _wrong(f"{place} has the type {shown(call['type'])}, but must be a function")
        check_id(call.get("id"), f"{place}.id")
        function = call.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"{place} has no function; it must be an object with name and arguments")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"{place}.function has no name; it must be a non-empty string")
        arguments = function.get("arguments", "")
        if not isinstance(arguments, (str, dict, type(None))):
            raise _wrong(f"{place} has arguments that are neither an object nor its JSON text")
        check_num_arguments(arguments, f"{place} has arguments")


def check_num_arguments(arguments: Any, what: str) -> None:
    """Raises InvalidRequestError if the arguments of a call (an object or its JSON text) have more
    than MAX_CALL_VALUES values. `what` is the beginning of the error message."""
    is_text = isinstance(arguments, str)
    has_more = text_has_more_values if is_text else has_more_values
    if has_more(arguments, MAX_CALL_VALUES):
        raise _wrong(
            f"{what} with more values, including nested ones, than the limit of"
            f" {MAX_CALL_VALUES}; send fewer"
        )


def check_id(value: Any, place: str) -> None:
    """Raises InvalidRequestError unless the id of a call is a string or None."""
    if value is not None and not isinstance(value, str):
        raise _wrong(f"{place} is {shown(value)}, but must be a string")


def with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages, with `change` applied to the arguments of each call."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def arguments_object(arguments: Any) -> Any:
    """The arguments as an object, which most templates expect: parsed if they are JSON text.

    Text that is not a JSON object is returned unchanged; the model may have written other text or
    been cut off.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def arguments_text(arguments: Any) -> str:
    """The arguments as JSON text; a string is returned unchanged."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template that does not support tools, with calls and results as text.

    Calls become a JSON list in the assistant's text, in the format of the tool-call parser `json`.
    Results become user messages; consecutive results are joined to one message.
    """
    names: dict[Any, str] = {}
    changed: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = _result_text(message, names)
            if was_result:
                last = changed[-1]
                changed[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
            else:
                changed.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            changed.append(_without_calls(message, calls))
        else:
            changed.append(message)
        was_result = is_result
    return changed


def _without_calls(message: Message, calls: Sequence[Mapping[str, Any]]) -> Message:
    written = [
        {
            "name": call["function"]["name"],
            "parameters": arguments_object(call["function"].get("arguments")),
        }
        for call in calls
    ]
    text, before = json.dumps(written, ensure_ascii=False), text_of(message.get("content"))
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{before}\n{text}" if before else text}


def _result_text(message: Message, names: Mapping[Any, str]) -> str:
    name = message.get("name") or names.get(message.get("tool_call_id"), "the tool")
    return f"Result of {name}:\n{text_of(message.get('content'))}"


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The messages for a template that does not support tools, with a description of the tools at
    the end of the system message. The description asks for calls in the format of the tool-call
    parser `json`."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _DESCRIPTION.format(listed)
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    before = text_of(first.get("content"))
    return [{**first, "content": f"{before}\n\n{text}"}, *messages[1:]]


def text_of(content: Any) -> str:
    """The content as one string; a list of parts is joined by line breaks, without images."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


def stand_in(kind: str) -> str:
    """The text that replaces a part of type `kind`, one of NOT_TEXT, in a tool's result."""
    name = kind.removeprefix("input_").removesuffix("_url")
    return f"[{name} left out: only text can be read]"


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "messages")
