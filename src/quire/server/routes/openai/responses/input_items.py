"""Turns the input of a Responses body, item by item, into the messages of a chat.

An assistant's turn is several items: reasoning, text, calls. This module joins the items to one
message, so that the chat template renders the turn as the model wrote it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import InvalidRequestError, shown
from quire.server.routes.openai.responses.tool_definitions import CUSTOM_ARGUMENT, function_name
from quire.text.chat_messages import LeftOut
from quire.text.tool_messages import NOT_TEXT, stand_in

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_INSTRUCTING = ("system", "developer")


def kind_of(item: Mapping[str, Any]) -> Any:
    """The type of an item. An item with a role but no type is a message."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference"
    return kind


def messages_of(
    instructions: str | None,
    history: Sequence[Any],
    items: Sequence[Any],
    left_out: LeftOut | None = None,
    *,
    takes_images: bool = False,
) -> list[dict[str, Any]]:
    """The messages of a chat, in OpenAI's form. Raises InvalidRequestError that names the item.

    `instructions` come first. They are joined with leading system and developer messages, since
    most templates accept only one. The items of `history` were checked before. Adds the names of
    tool output parts that no model can read to `left_out`. `takes_images`: whether the model takes
    images, which become image_url parts.
    """
    chat = _Chat({} if left_out is None else left_out, takes_images)
    if instructions:
        chat.messages.append({"role": "system", "content": instructions})
    for at, item in enumerate(history):
        chat.add(item, f"history[{at}]")
    for at, item in enumerate(items):
        chat.add(item, f"input[{at}]")
    return _with_one_head(chat.messages)


class _Chat:
    """The messages so far.

    Invariant: an assistant's item joins the last message if this is the assistant's and its items
    stay in the order reasoning, text, calls.
    """

    def __init__(self, left_out: LeftOut, takes_images: bool) -> None:
        """Names of tool output parts that no model can read are added to `left_out`."""
        self._takes_images = takes_images
        self.messages: list[dict[str, Any]] = []
        self.left_out = left_out
        self._adders: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._add_message,
            "reasoning": self._add_reasoning,
            "function_call": self._add_function_call,
            "custom_tool_call": self._add_custom_call,
            "function_call_output": self._add_output,
            "custom_tool_call_output": self._add_output,
        }

    def add(self, item: Any, where: str) -> None:
        """Add an item. Raises InvalidRequestError."""
        if not isinstance(item, dict):
            raise _wrong(f"{where} is {shown(item)}, but must be an object")
        item_id = item.get("id")
        if item_id is not None and not isinstance(item_id, str):
            raise _wrong(f"{where}.id is {shown(item_id)}, but must be a string")
        kind = kind_of(item)
        add = self._adders.get(kind) if isinstance(kind, str) else None
        if kind == "item_reference":
            raise _wrong(
                f"{where} refers to {shown(item.get('id'))}, which is not stored here; send"
                " the item itself"
            )
        if add is None:
            raise _wrong(
                f"{where} has the type {shown(kind)}, but only {', '.join(self._adders)} are"
                " understood; leave it out"
            )
        add(item, where)

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise _wrong(f"{where}.role is {shown(role)}, but must be one of {', '.join(ROLES)}")
        given = _given(item, "content")
        if self._takes_images and role == "user" and _has_image(given):
            parts = [
                _image_or_text(part, f"{where}.content[{at}]") for at, part in enumerate(given)
            ]
            self.messages.append({"role": role, "content": parts})
            return
        texts = _texts(given, f"{where}.content")
        if role != "assistant":
            content = texts[0] if len(texts) == 1 else [_part(text) for text in texts]
            self.messages.append({"role": role, "content": content})
            return
        message = self._open_turn(lambda open_: not open_["content"] and "tool_calls" not in open_)
        message["content"] = "".join(texts)

    def _add_reasoning(self, item: Mapping[str, Any], where: str) -> None:
        for name in ("content", "summary"):
            if item.get(name):
                reasoning = "\n\n".join(_texts(item[name], f"{where}.{name}"))
                message = self._open_turn(lambda open_: False)
                message["reasoning_content"] = reasoning
                return

    def _add_function_call(self, item: Mapping[str, Any], where: str) -> None:
        self._add_call(item, _string(item, "arguments", where), where)

    def _add_custom_call(self, item: Mapping[str, Any], where: str) -> None:
        text = _string(item, "input", where)
        self._add_call(item, msgspec.json.encode({CUSTOM_ARGUMENT: text}).decode(), where)

    def _add_call(self, item: Mapping[str, Any], arguments: str, where: str) -> None:
        namespace = item.get("namespace")
        name = function_name(
            _string(item, "name", where), namespace if isinstance(namespace, str) else None
        )
        call = {
            "id": _string(item, "call_id", where),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        message = self._open_turn(lambda open_: True)
        message.setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        output = _given(item, "output")
        if isinstance(output, list):
            output = [self._readable(part) for part in output]
        content: Any
        if self._takes_images and _has_image(output):
            content = [
                _image_or_text(part, f"{where}.output[{at}]") for at, part in enumerate(output)
            ]
        else:
            content = "\n".join(_texts(output, f"{where}.output"))
        call_id = _string(item, "call_id", where)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _readable(self, part: Any) -> Any:
        """A part of a tool's output. Images and other parts that are not text are replaced by a
        line of text."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in NOT_TEXT:
            return part
        if self._takes_images and kind == "input_image":
            return part
        self.left_out[left_out_name(kind)] = None
        return {"type": "input_text", "text": stand_in(kind)}

    def _open_turn(self, fits: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        """The last message, if it is the assistant's and `fits` accepts it; otherwise a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or not fits(last):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def left_out_name(kind: str) -> str:
    """The name of a part of a tool's output that is not text, in reports of ignored fields."""
    return f"input.output ({kind})"


def _with_one_head(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with leading system and developer messages joined into one."""
    count = 0
    while count < len(messages) and messages[count]["role"] in _INSTRUCTING:
        count += 1
    if count < 2:
        return messages
    texts = [text for message in messages[:count] for text in _content_texts(message["content"])]
    return [{"role": messages[0]["role"], "content": "\n\n".join(texts)}, *messages[count:]]


def _content_texts(content: Any) -> Iterable[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _has_image(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "input_image" for part in content
    )


def _image_or_text(part: Any, where: str) -> dict[str, Any]:
    """A part as one of the chat API. `text.image_parts` checks images."""
    if isinstance(part, dict) and part.get("type") == "input_image":
        return dict(part)
    return _part(_part_text(part, where))


def _given(item: Mapping[str, Any], name: str) -> Any:
    """The value of an item's field: "" if the field is null, None if it is missing."""
    return "" if name in item and item[name] is None else item.get(name)


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a message's content, which is a text or a list of parts. Returns at least one
    text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _wrong(f"{where} is {shown(content)}, but must be a string or a list of text parts")
    return [_part_text(part, f"{where}[{at}]") for at, part in enumerate(content)] or [""]


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = "refusal" if kind == "refusal" else "text"
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise _wrong(
            f"{where} is a part of type {shown(kind)}, but only text is understood:"
            ' {"type": "input_text", "text": ...}'
        )
    return _string(part, name, where)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise _wrong(f"{where}.{name} is {shown(found)}, but must be a string")
    return found


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "input")
