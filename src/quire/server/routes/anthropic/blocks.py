"""Turns Anthropic's system prompt and messages, made of blocks, into the messages of a chat call.

Consecutive messages of one role are one turn. The assistant's turn becomes one message with text,
reasoning and calls. The user's turn becomes one message of role `tool` for each result, followed by
a message with the text. Leading messages of role system join the system prompt; later ones join the
user's turn, since few templates accept a later system message. Called by `messages_body`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from quire.errors import InvalidRequestError, shown
from quire.text.chat_messages import LeftOut
from quire.text.tool_messages import NOT_TEXT, check_num_arguments, stand_in

ChatMessage: TypeAlias = dict[str, Any]

NOT_SERVED = (
    "image",
    "document",
    "search_result",
    "container_upload",
    "server_tool_use",
    "mcp_tool_use",
)
"""Types of Anthropic's blocks that quire's models can't read, besides results of server tools."""

_CALL_LINES = re.compile(r"(?:x-anthropic-[a-z0-9-]++:[^\n]*+(?:\n|$)){0,64}+", re.IGNORECASE)
"""Lines at the start of Claude Code's system prompt, usually one or two, whose numbers change with
every call. In the prompt, they would make prefix cache hits impossible. One match covers all, since
removing line after line takes time quadratic in their number."""

_ROLES = ("user", "assistant", "system")


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a message."""

    #: Place of the block in the body, for errors.
    where: str
    #: Type of the block.
    kind: str
    fields: Mapping[str, Any]

    def text(self, name: str, default: str | None = None) -> str:
        """A text field of the block. It may be left out only if there is a default."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise _wrong(f"{self.where}.{name} is {shown(value)}, but must be a text")
        return value


@dataclass(slots=True)
class _Turn:
    """Consecutive messages of one role."""

    role: str
    where: str
    blocks: list[_Block] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[_Block]:
        return [block for block in self.blocks if block.kind == kind]

    @property
    def texts(self) -> list[str]:
        """The texts of the text blocks, without empty ones."""
        return [text for block in self.of_kind("text") if (text := block.text("text"))]


def chat_messages(
    system: Any, messages: Any, left_out: LeftOut | None = None, *, takes_images: bool = False
) -> list[ChatMessage]:
    """The messages in the form of OpenAI's chat API. Raises InvalidRequestError that names the
    faulty block.

    `system` is a text or text blocks, or None; `messages` is the body's field. Adds the names of
    tool result parts that no model can read to `left_out`. `takes_images`: whether the model takes
    images, which become image_url parts.
    """
    rules = [text for text in system_texts(system) if text]
    turns = list(_turns(messages, takes_images=takes_images))
    while turns and turns[0].role == "system":
        rules += turns.pop(0).texts
    if not turns:
        raise _wrong("messages has no message of the user; there must be at least one message")
    _check_results(turns)
    found = [{"role": "system", "content": _content(rules)}] if rules else []
    call_names: dict[str, str] = {}
    for turn in turns:
        if turn.role == "assistant":
            found.append(_assistant_message(turn, call_names))
        else:
            reader = _ResultReader({} if left_out is None else left_out, takes_images)
            found += _user_messages(turn, call_names, reader)
    return found


def system_texts(system: Any) -> list[str]:
    """The texts of a system prompt, without the lines that change at every call. Raises
    InvalidRequestError."""
    if system is None:
        return []
    turn = _Turn("system", "system", list(_blocks(system, "system", "system", _KINDS["system"])))
    texts = [block.text("text") for block in turn.blocks]
    for at, text in enumerate(texts):
        found = _CALL_LINES.match(text)
        assert found is not None, "it matches the empty text, too"
        texts[at] = text[found.end() :]
        if texts[at]:
            break
    return texts


def _turns(messages: Any, *, takes_images: bool) -> Iterator[_Turn]:
    """The turns of the conversation, each made of consecutive messages of one role."""
    if not isinstance(messages, list):
        raise _wrong(f"messages is {shown(messages)}, but must be a list of objects")
    turn: _Turn | None = None
    for at, message in enumerate(messages):
        where = f"messages.{at}"
        if not isinstance(message, dict):
            raise _wrong(f"{where} is {shown(message)}, but must be an object with a role")
        role = message.get("role")
        if role not in _ROLES:
            raise _wrong(f"{where}.role is {shown(role)}, but must be one of {', '.join(_ROLES)}")
        kinds = _KINDS[role]
        if takes_images and role == "user":
            kinds = (*kinds, "image")
        blocks = _blocks(message.get("content"), f"{where}.content", role, kinds)
        if role == "system" and turn is not None and turn.role != role:
            role = "user"
        if turn is None or turn.role != role:
            if turn is not None:
                yield turn
            turn = _Turn(role, where)
        turn.blocks += blocks
    if turn is not None:
        yield turn


_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def _blocks(content: Any, where: str, role: str, kinds: Sequence[str]) -> Iterator[_Block]:
    """The blocks of a message. Raises InvalidRequestError for types that are not among `kinds`. An
    assistant's message may have no content."""
    if content is None and role == "assistant":
        return
    if isinstance(content, str):
        yield _Block(where, "text", {"text": content})
        return
    if not isinstance(content, list):
        raise _wrong(f"{where} is {shown(content)}, but must be a text or a list of blocks")
    for at, part in enumerate(content):
        place = f"{where}.{at}"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise _wrong(f"{place} is {shown(part)}, but must be an object with a type")
        if kind not in kinds:
            raise _wrong(_refusal(place, kind, role, kinds))
        yield _Block(place, kind, part)


def _refusal(place: str, kind: str, owner: str, known: Sequence[str]) -> str:
    if kind in NOT_SERVED or kind.endswith("_tool_result"):
        return (
            f"{place} is of the type {kind}, which is not supported: the model takes text, and the"
            " server runs no tools; leave it out"
        )
    return f"{place} has the type {shown(kind)}, but in {owner} it must be {' or '.join(known)}"


def _check_results(turns: Sequence[_Turn]) -> None:
    """Check, like Anthropic, that each call has a result in the user's next turn, and each result
    has a call in the assistant's previous turn."""
    open_ids: dict[str, str] = {}
    for turn in turns:
        results = {block.text("tool_use_id"): block for block in turn.of_kind("tool_result")}
        for call_id, where in open_ids.items():
            if call_id not in results:
                raise _wrong(
                    f"{where} is a tool_use, but the next message has no tool_result with its"
                    f" tool_use_id {shown(call_id)}; put one there"
                )
        for call_id, block in results.items():
            if call_id not in open_ids:
                raise _wrong(
                    f"{block.where} has the tool_use_id {shown(call_id)}, but the message before"
                    " it has no tool_use of that id"
                )
        open_ids = {block.text("id"): block.where for block in turn.of_kind("tool_use")}
    for call_id, where in open_ids.items():
        raise _wrong(
            f"{where} is a tool_use ({shown(call_id)}) in the last message; its tool_result must"
            " follow in a message of the user"
        )


def _assistant_message(turn: _Turn, call_names: dict[str, str]) -> ChatMessage:
    """The assistant's message. The name of each tool call is added to `call_names` under its id."""
    message: ChatMessage = {"role": "assistant", "content": "\n".join(turn.texts)}
    reasoning = [block.text("thinking") for block in turn.of_kind("thinking")]
    if any(reasoning):
        message["reasoning_content"] = "\n".join(filter(None, reasoning))
    calls = [_call(block, call_names) for block in turn.of_kind("tool_use")]
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def _call(block: _Block, call_names: dict[str, str]) -> dict[str, Any]:
    call_id, name = block.text("id"), block.text("name")
    arguments = block.fields.get("input")
    if not isinstance(arguments, dict):
        raise _wrong(f"{block.where}.input is {shown(arguments)}, but must be an object")
    check_num_arguments(arguments, f"{block.where} has an input")
    call_names[call_id] = name
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _user_messages(
    turn: _Turn, call_names: Mapping[str, str], reader: "_ResultReader"
) -> list[ChatMessage]:
    """The messages of a user's turn: tool results first, since they must follow their calls."""
    found: list[ChatMessage] = []
    for block in turn.of_kind("tool_result"):
        call_id = block.text("tool_use_id")
        content = reader.content(block)
        if block.fields.get("is_error") is True:
            content = (
                f"Error: {content}" if isinstance(content, str) else [_part("Error:"), *content]
            )
        found.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": call_names[call_id],
                "content": content,
            }
        )
    if turn.of_kind("image"):
        found.append({"role": "user", "content": list(_parts(turn))})
    elif texts := turn.texts:
        found.append({"role": "user", "content": _content(texts)})
    if not found:
        raise _wrong(f"{turn.where}.content is empty; a message of the user must say something")
    return found


@dataclass(frozen=True, slots=True)
class _ResultReader:
    """Reads the contents of tool results."""

    #: Receives the names of parts that the model can't read.
    left_out: LeftOut
    takes_images: bool

    def content(self, block: _Block) -> str | list[dict[str, Any]]:
        """The text of a tool's result; empty if it has no content. If it has images that the model
        takes, a list of parts."""
        content = block.fields.get("content")
        if content is None or isinstance(content, str):
            return content or ""
        where = f"{block.where}.content"
        if not isinstance(content, list):
            raise _wrong(
                f"{where} is {shown(content)}, but must be a text or a list of text blocks"
            )
        parts = [self._part(part, f"{where}.{at}") for at, part in enumerate(content)]
        if any("text" not in part for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)

    def _part(self, part: Any, place: str) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            return _part(_Block(place, kind, part).text("text"))
        if kind == "tool_reference":  # a tool search found it; the prompt has all tools already
            return _part(_Block(place, kind, part).text("tool_name"))
        if not isinstance(kind, str):
            raise _wrong(f"{place} is {shown(part)}, but must be an object with a type")
        if kind == "image" and self.takes_images:
            return _image(_Block(place, kind, part))
        if kind in NOT_TEXT:
            self.left_out[left_out_name(kind)] = None
            return _part(stand_in(kind))
        raise _wrong(_refusal(place, kind, "a tool_result", ("text",)))


def left_out_name(kind: str) -> str:
    """The name of a part of a tool's result that is not text, in reports of ignored fields."""
    return f"messages.content.content ({kind})"


def _parts(turn: _Turn) -> Iterator[dict[str, Any]]:
    """The text and image blocks of a user's turn, in their order, as parts of OpenAI's API."""
    for block in turn.blocks:
        if block.kind == "image":
            yield _image(block)
        elif block.kind == "text" and (text := block.text("text")):
            yield _part(text)


def _image(block: _Block) -> dict[str, Any]:
    """An image block as a part of OpenAI's API."""
    source = block.fields.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise _wrong(f"{block.where}.source has the type {shown(kind)}, but must be base64 or url")
    inner = _Block(f"{block.where}.source", kind, source)
    if kind == "url":
        url = inner.text("url")
    else:
        url = f"data:{inner.text('media_type', 'image/png')};base64,{inner.text('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a message: a string for one text, and parts for several texts, which the
    template joins."""
    if len(texts) == 1:
        return texts[0]
    return [_part(text) for text in texts]


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "system" if sentence.startswith("system") else "messages")
