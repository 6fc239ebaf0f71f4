"""Takes images out of chat messages, so that a template gets only marks of their places.

Reads the forms of OpenAI's, Hugging Face's and vLLM's messages. The images themselves are not
examined here. Called by the server's chat APIs and the offline API before `chat_encoding`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import InvalidRequestError, shown
from quire.text.chat_messages import IMAGE_PART, MAX_LABELS, LeftOut
from quire.text.tool_messages import stand_in

IMAGE_KINDS = ("image_url", "input_image", "image", "image_pil")
"""Types of parts that have an image."""

_SOURCES = ("image_url", "image", "image_pil", "url")
_DETAILS = ("auto", "low", "high", "original")
_DROPPED = ("type", "detail", "cache_control", *_SOURCES)


class TakenImage(NamedTuple):
    """An image of the messages, in their order."""

    #: The place of its part, such as "messages[0].content[1]".
    where: str
    #: A URL, or another object that a caller of the offline API gives.
    source: Any


def has_images(messages: Any) -> bool:
    """Whether any message has an image, however malformed the messages are."""
    return isinstance(messages, Sequence) and any(
        _is_image(part)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def take_images(
    messages: Sequence[Any], roles: Collection[str], left_out: LeftOut | None
) -> tuple[list[Any], list[TakenImage]]:
    """The messages with IMAGE_PART in place of each image, and the images.

    roles: those whose images the chat template places. If it does not place images in results of
    tools, they are replaced by a line of text and named in `left_out`; if that is None, they are
    refused. left_out: as in `check_messages`. Raises InvalidRequestError for images in messages of
    other roles, and malformed parts. Messages without images are not checked.
    """
    taken: list[TakenImage] = []
    changed = list(messages)
    for at, message in enumerate(messages):
        if not has_images([message]):
            continue
        role = message.get("role")
        if role not in roles and (role != "tool" or left_out is None):
            named = " or ".join(sorted(roles)) or "no role"
            raise _wrong(
                f"messages[{at}] has an image and the role {shown(role)}, but the model's chat"
                f" template places images in messages of {named}; move it"
            )
        parts = list(message["content"])
        for place, part in enumerate(parts):
            if _is_image(part) and role not in roles:
                parts[place] = {"type": "text", "text": stand_in("image")}
                assert left_out is not None, "such images were refused above"
                left_out[f"messages.content ({part['type']})"] = None
            elif _is_image(part):
                where = f"messages[{at}].content[{place}]"
                taken.append(TakenImage(where, _source_of(part, where, left_out)))
                parts[place] = dict(IMAGE_PART)
        changed[at] = {**message, "content": parts}
    return changed, taken


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS


def _source_of(part: Mapping[str, Any], where: str, left_out: LeftOut | None) -> Any:
    """The image of a part, which is not checked but for the URL of an `image_url`."""
    found = [part[name] for name in _SOURCES if part.get(name) is not None]
    if not found:
        other = " by its file_id; send it as a data: URL" if part.get("file_id") else ""
        raise _wrong(f"{where} has no image{other}" if other else f"{where} has no image_url")
    source, labels = found[0], dict(part)
    if isinstance(source, Mapping):  # OpenAI's {"url": ..., "detail": ...}
        labels |= {name: value for name, value in source.items() if name != "url"}
        source = source.get("url")
        if not isinstance(source, str):
            raise _wrong(f"{where}.image_url.url is {shown(source)}, but must be a text")
    detail = labels.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise _wrong(f"{where}.detail is {shown(detail)}, but must be {' or '.join(_DETAILS)}")
    for label, value in labels.items():
        if label in _DROPPED or value in (None, "", False):
            continue
        if left_out is None:
            raise _wrong(f"{where} has {label!r:.80}, which is not supported; leave it out")
        if len(left_out) < MAX_LABELS:
            left_out[f"messages.content.{label}"] = None
    return source


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "messages")
