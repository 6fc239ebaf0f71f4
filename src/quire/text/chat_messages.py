"""Checks chat messages and converts their contents to a form that a chat template accepts.

The messages have the format of OpenAI's API. Called by `text.chat_template`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from quire.errors import InvalidRequestError, check_characters, did_you_mean, shown
from quire.text.tool_messages import NOT_TEXT, check_id, check_tool_calls, stand_in, text_of

# Fields with a message's reasoning text; most templates read the first one.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# Fields that are accepted even if the template ignores them: the answer does not depend on labels
# or on the reasoning of earlier answers.
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


def _letters(name: str) -> str:
    """The name in lower case without "_" and "-", to compare snake_case with camelCase
    spellings."""
    return name[:40].replace("_", "").replace("-", "").lower()


_NO_MEDIA = "the model reads only text; leave it out"
_MEDIA_FIELDS = dict.fromkeys(
    (
        *("audio", "input_audio", "image", "images", "image_url", "input_image", "video", "videos"),
        *("image_urls", "audio_url", "video_url", "file", "files"),
        *("attachments", "experimental_attachments"),
    ),
    _NO_MEDIA,
)
# Refused fields: they would change the answer, and no supported template reads them. Values: advice
# for the error.
_NOT_SUPPORTED_FIELDS = {
    **_MEDIA_FIELDS,
    "function_call": "it is the old form of tool_calls; send tool_calls, and their results with the"
    " role tool",
}
_CALLS = "send calls as tool_calls, and their results with the role tool"
# Fields that are refused unless the template reads them, since they would change the answer. Keys:
# names in the form of `_letters`. Values: advice for the error.
_NOT_LABELS = {
    **{_letters(name): advice for name, advice in _MEDIA_FIELDS.items()},
    **dict.fromkeys(("functioncall", "functioncalls", "tooluse", "toolinvocations"), _CALLS),
    **dict.fromkeys(("toolresult", "toolresults", "toolresponses"), _CALLS),
    "document": "put its text into content",
    "documents": "put their text into content",
    "functions": "send them as tools, beside messages",
    "partial": "set continue_final_message, beside messages",
    "parts": "put the parts of a message into content",
    "prefix": "set continue_final_message, beside messages",
    "text": "put the text of a message into content",
    "tools": "send them beside messages",
}
_FIELDS_OF_ROLES = {"assistant": ("content", "tool_calls"), "tool": ("content", "tool_call_id")}
_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API."""
_MEANT = {"ai": "assistant", "bot": "assistant", "human": "user", "model": "assistant"}
"""Other names of roles, which some data sets use -> the role of the API."""

PART_ROLES = ("system", "user", "assistant")
"""The roles whose content a template may accept as a list of parts; a probe finds out for each
role."""

IMAGE_PART: Mapping[str, str] = {"type": "image"}
VIDEO_PART: Mapping[str, str] = {"type": "video"}
"""The marks that templates read as the places of images and videos; `image_parts` puts them
there."""
_MARKS = IMAGE_PART, VIDEO_PART

LeftOut = dict[str, None]
"""An ordered set of the names of dropped fields and parts; the values are None."""

MAX_LABELS = 100
"""The maximum number of different unread field names in the messages of one call. It bounds the
time of comparing each name with the known names."""

MAX_NESTING = 64
"""The maximum depth of nested lists and objects, more than any real message or schema has."""


def check_messages(
    messages: Any, left_out: LeftOut | None = None, *, takes_images: bool = False
) -> list[dict[str, Any]]:
    """Check `messages` and return a copy of plain JSON types. Fields that are None are dropped, as
    in transformers.

    A content that is None, or missing in an assistant's message, is replaced by the message's
    `refusal`, or by an empty text if there is none. In tool results, parts that are not text are
    replaced by a line of text that names their type.

    `left_out` receives the names of dropped fields and parts: extra fields (labels) of text parts,
    and parts of tool results that are not text. If it is None, labels are refused. `takes_images`:
    accept the marks of images' and videos' places, {"type": "image"} and {"type": "video"}. Raises
    InvalidRequestError that names the message and the problem.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise _wrong(f"messages is a {type(messages).__name__}, but must be a list of objects")
    if not messages:
        raise _wrong("messages is empty; there must be at least one message")
    return [
        _check_message(message, f"messages[{at}]", left_out, takes_images=takes_images)
        for at, message in enumerate(messages)
    ]


def check_roles(messages: Sequence[Mapping[str, Any]], knows: Callable[[str], bool]) -> None:
    """Refuse roles that misspell a role of the API, or that are another name of one. `knows(name)`
    is True if the template names a role so. Raises InvalidRequestError.

    Other roles are accepted: some models were trained with roles of their own, which a template
    may write without naming them.
    """
    for role in {message["role"]: None for message in messages}:
        if role in ROLES or knows(role):
            continue
        meant = _MEANT.get(role.lower())
        hint = did_you_mean(role, ROLES) if meant is None else f"; did you mean {meant}?"
        if hint:
            at = next(at for at, message in enumerate(messages) if message["role"] == role)
            raise _wrong(f"messages[{at}] has the role {shown(role)}{hint}")


def without_labels(
    messages: list[dict[str, Any]], knows: Callable[[str], bool], left_out: LeftOut | None
) -> list[dict[str, Any]]:
    """The messages without labels: fields that the template does not read and that would not change
    the answer.

    `knows(name)` is True if the template reads a field of that name. `left_out` receives the names
    of the dropped fields; if it is None, such fields are refused. Raises InvalidRequestError for an
    unread field that would change the answer. Empty fields are never refused.
    """
    labels: dict[str, None] = {}
    advised = cache(_advice)
    kept = []
    for at, message in enumerate(messages):
        unread = [name for name, value in message.items() if _is_unread(name, value, knows)]
        labels |= dict.fromkeys(unread)
        if len(labels) > MAX_LABELS:
            raise _wrong(
                f"messages have more than {MAX_LABELS} different fields that the model's chat"
                " template does not read; leave them out"
            )
        missing = _missing_fields(message)
        for name in unread:
            advice = advised(name, missing)
            if advice or left_out is None:
                raise _wrong(
                    f"messages[{at}] has {name!r:.80}, which the model's chat template does not"
                    f" read{advice or '; leave it out'}"
                )
        kept.append({name: each for name, each in message.items() if name not in labels})
    if left_out is not None:
        left_out |= dict.fromkeys(f"messages.{name}" for name in labels)
    return kept


def _is_unread(name: str, value: Any, knows: Callable[[str], bool]) -> bool:
    known = name in _OPTIONAL_FIELDS or name == "tool_calls" or knows(name)
    return not known and value not in _ASKS_FOR_NOTHING


def _missing_fields(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that a message of this role should have, but that are missing or empty here."""
    known = _FIELDS_OF_ROLES.get(message["role"], ("content",))
    return tuple(name for name in known if not message.get(name))


def _advice(name: str, missing: tuple[str, ...]) -> str:
    """Advice about a field that the template does not read; empty if the field may be dropped."""
    if name in ("parts", "text") and "content" not in missing:
        return ""  # some clients add a copy of the content under this name
    letters = _letters(name)
    if letters in _NOT_LABELS:
        return f"; {_NOT_LABELS[letters]}"
    meant = [each for each in missing if _letters(each) == letters]
    return f"; did you mean {meant[0]}?" if meant else did_you_mean(name, missing)


def with_joined_parts(
    messages: list[dict[str, Any]], but_for: Collection[str] = ()
) -> list[dict[str, Any]]:
    """The messages with each list of text parts joined to one string by line breaks.

    Messages with an image, and those whose role is in `but_for`, a subset of PART_ROLES, keep their
    lists. For this choice, developer messages count as system messages, and those of other roles as
    user messages.
    """
    return [
        {**message, "content": text_of(message["content"])}
        if isinstance(message.get("content"), list)
        and _part_role(message["role"]) not in but_for
        and not any(mark in message["content"] for mark in _MARKS)
        else message
        for message in messages
    ]


def _part_role(role: str) -> str:
    return "system" if role == "developer" else role if role in PART_ROLES else "user"


def with_text_as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each content string replaced by a list of one text part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def with_role_renamed(messages: list[dict[str, Any]], old: str, new: str) -> list[dict[str, Any]]:
    """The messages with the role `old` replaced by `new`."""
    return [{**message, "role": new} if message["role"] == old else message for message in messages]


def plain_value(value: Any, param: str, num_levels: int = MAX_NESTING) -> Any:
    """A copy of `value` in plain JSON types; a template gets no others.

    Other objects are refused, since the template's sandbox does not know their methods. Values
    nested deeper than num_levels are refused, because recursive code would exhaust the stack.
    """
    if isinstance(value, str):
        check_characters(value, param, f"a text in {param}")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # converts a subclass, such as StrEnum
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


def _check_message(
    message: Any, where: str, left_out: LeftOut | None, *, takes_images: bool
) -> dict[str, Any]:
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
    _refuse_some(plain, where)
    check_id(plain.get("tool_call_id"), f"{where}.tool_call_id")
    if "tool_calls" in plain:
        check_tool_calls(plain["tool_calls"], where)
    if "content" in plain:
        content = _checked_content(
            plain["content"], role, where, left_out, takes_images=takes_images
        )
    else:
        content = _missing_content(plain, where, is_null="content" in message)
    return _with_reasoning({**plain, "content": content})


def _refuse_some(fields: Mapping[str, Any], where: str) -> None:
    for name, value in fields.items():
        if name in _NOT_SUPPORTED_FIELDS and value not in _ASKS_FOR_NOTHING:
            raise _wrong(
                f"{where} has {name}, which is not supported; {_NOT_SUPPORTED_FIELDS[name]}"
            )


def _missing_content(message: dict[str, Any], where: str, *, is_null: bool) -> str:
    refusal = message.get("refusal")
    if isinstance(refusal, str):
        return refusal
    if is_null or message["role"] == "assistant":  # many clients omit null fields
        return ""
    raise _wrong(f"{where} has no content; it must be a string or a list of text parts")


def _checked_content(
    content: Any, role: str, where: str, left_out: LeftOut | None, *, takes_images: bool
) -> Any:
    """The content after its check: a string, or a list of text parts without labels, in which
    images' places are marked."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(
            f"{where} has a content of type {type(content).__name__}, "
            "but it must be a string or a list of text parts"
        )
    is_result = role == "tool"
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if takes_images and part in _MARKS:
            parts.append(part)
        elif is_result and isinstance(kind, str) and kind in NOT_TEXT:
            parts.append({"type": "text", "text": stand_in(kind)})
            if left_out is not None:
                left_out[f"messages.content ({kind})"] = None
        else:
            parts.append(_checked_part(part, f"at position {at}", where, left_out))
    # Join a tool's parts, since templates that accept lists of parts from users often don't from
    # tools.
    is_text = not any(mark in parts for mark in _MARKS)
    return text_of(parts) if is_result and is_text else parts


def _checked_part(part: Any, place: str, where: str, left_out: LeftOut | None) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = "refusal" if kind == "refusal" else "text"
    if kind not in ("refusal", "text"):
        raise _wrong(
            f"{where} has a content part of type {shown(kind)} {place}, "
            'but only text is supported: {"type": "text", "text": ...}'
        )
    if not isinstance(part.get(name), str):
        raise _wrong(f"{where} has a {name} part without a string as {name} {place}")
    _refuse_some(part, f"{where} in its text part {place}")
    for label, value in part.items():
        if value in _ASKS_FOR_NOTHING or label in ("type", name, *_DROPPED_FIELDS):
            continue
        if left_out is None:
            raise _wrong(
                f"{where} has {label!r:.80} in its text part {place}, which is not supported;"
                " leave it out"
            )
        if len(left_out) < MAX_LABELS:
            left_out[f"messages.content.{label}"] = None
    return {"type": "text", "text": part[name]}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning in `thinking` and `reasoning_content`, as in transformers."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "messages")
