"""Checks chat messages and prepares their contents for a template.

Knows the shape of OpenAI's messages, as far as they are text, and no template. Called by
`text.chat_template`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequestError, check_characters, shown
from quire.text.tool_messages import check_id, check_tool_calls, text_of

# Names under which a message's reasoning is passed; the first is what most templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# Of a message's fields those that a template may leave unread without a loss: labels, what was
# thought before an earlier answer, and marks for caches.
_OPTIONAL_FIELDS = {
    "role",
    "content",
    "name",
    "tool_call_id",
    "annotations",
    "refusal",
    *_REASONING_FIELDS,
}
_DROPPED_FIELDS = ("cache_control",)

# What messages may have in OpenAI's API and no template here understands, and what to do.
_NOT_SUPPORTED_FIELDS = {
    "audio": "leave it out",
    "function_call": "it is the old form of tool_calls; send these, and their results with the role"
    " tool",
}

MAX_NESTING = 64
"""Levels of lists and objects inside of each other: more than any message or schema has."""


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A plain copy of `messages`, without the fields that are None, as transformers drops them.

    An assistant's message that only calls tools has an empty text as its content, since templates
    join it with others. A refusal stands for a content that is missing.

    Raises InvalidRequestError that names the message and what is wrong with it.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise _wrong(f"messages is a {type(messages).__name__}, but must be a list of objects")
    if not messages:
        raise _wrong("messages is empty; there must be at least one message")
    return [_check_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def check_read(messages: list[dict[str, Any]], knows: Callable[[str], bool]) -> None:
    """Refuse the first field that would be ignored, unless it is empty.

    knows: whether the template reads a field of that name. Raises InvalidRequestError.
    """
    for at, message in enumerate(messages):
        for name, value in message.items():
            if name not in _OPTIONAL_FIELDS and value not in ([], {}, "") and not knows(name):
                raise _wrong(
                    f"messages[{at}] has {name!r:.80}, which the model's chat template does not"
                    " read; leave it out"
                )


def with_joined_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with lists of text parts joined to one string, by line breaks."""
    return [
        {**message, "content": text_of(message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def with_text_as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each string as a list of one text part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def with_role_renamed(messages: list[dict[str, Any]], old: str, new: str) -> list[dict[str, Any]]:
    """The messages of one role as if they were of another."""
    return [{**message, "role": new} if message["role"] == old else message for message in messages]


def plain_value(value: Any, param: str, num_levels: int = MAX_NESTING) -> Any:
    """A copy of `value` out of plain JSON types, all that a template may be handed.

    Other objects have methods that the template's sandbox can't judge, so they are refused. So is
    what is nested deeper than num_levels, before it exhausts the stack of code that walks over it.
    """
    if isinstance(value, str):
        check_characters(value, param, f"a text in {param}")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration, say: the plain string
    if isinstance(value, Mapping):
        left = _one_level_less(num_levels, param)
        return {
            plain_value(key, param): plain_value(item, param, left) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        left = _one_level_less(num_levels, param)
        return [plain_value(item, param, left) for item in value]
    raise InvalidRequestError(
        f"{param} contains a {type(value).__name__}, but only JSON values can go into a template",
        param,
    )


def _one_level_less(num_levels: int, param: str) -> int:
    if num_levels == 0:
        raise InvalidRequestError(
            f"{param} is nested more than {MAX_NESTING} levels deep; make it flatter", param
        )
    return num_levels - 1


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"{where} is a {type(message).__name__}, but must be an object with a role")
    plain = {
        plain_value(name, "messages"): plain_value(value, "messages")
        for name, value in message.items()
        if value is not None and name not in _DROPPED_FIELDS
    }
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where} has the role {shown(role)}, but a role must be a non-empty string")
    for name, advice in _NOT_SUPPORTED_FIELDS.items():
        if name in plain:
            raise _wrong(f"{where} has {name}, which is not supported; {advice}")
    check_id(plain.get("tool_call_id"), f"{where}.tool_call_id")
    if "tool_calls" in plain:
        check_tool_calls(plain["tool_calls"], where)
    return _with_reasoning({**plain, "content": _content(plain, where)})


def _content(message: dict[str, Any], where: str) -> Any:
    if "content" in message:
        content = _checked_content(message["content"], where)
        # Templates that take parts from users often don't from tools.
        return text_of(content) if message["role"] == "tool" else content
    if isinstance(message.get("refusal"), str):
        return message["refusal"]
    if "tool_calls" not in message:
        raise _wrong(f"{where} has no content; it must be a string or a list of text parts")
    return ""


def _checked_content(content: Any, where: str) -> Any:
    """A list has nothing but text parts, without their marks for caches."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(
            f"{where} has a content of type {type(content).__name__}, "
            "but it must be a string or a list of text parts"
        )
    return [_checked_part(part, f"at position {at}", where) for at, part in enumerate(content)]


def _checked_part(part: Any, place: str, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind != "text":
        raise _wrong(
            f"{where} has a content part of type {shown(kind)} {place}, "
            'but only text is understood: {"type": "text", "text": ...}'
        )
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where} has a text part without a string as text {place}")
    for name, value in part.items():
        if value is not None and name not in ("type", "text", *_DROPPED_FIELDS):
            raise _wrong(
                f"{where} has {name!r:.80} in its text part {place}, which is not supported;"
                " leave it out"
            )
    return {name: value for name, value in part.items() if name not in _DROPPED_FIELDS}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Pass a message's reasoning under both names that templates read, as transformers does."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "messages")
