"""Takes images and videos out of chat messages, and marks their places for the template.

Reads the forms of OpenAI's, Hugging Face's and vLLM's messages. The images themselves are not
examined here. Called by the server's chat APIs and the offline API before `chat_encoding`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import InvalidRequestError, shown
from quire.text.chat_messages import IMAGE_PART, MAX_LABELS, VIDEO_PART, LeftOut
from quire.text.chat_template import ChatTemplate
from quire.text.tool_messages import stand_in

IMAGE_KINDS = ("image_url", "input_image", "image", "image_pil")
"""Types of parts that have an image."""
VIDEO_KINDS = ("video_url", "video")
"""Types of parts that have a video."""

_SOURCES = ("image_url", "image", "image_pil", "url")
_VIDEO_SOURCES = ("video_url", "video", "url")
_DETAILS = ("auto", "low", "high", "original")
_DROPPED = ("type", "detail", "cache_control")


class MediaRoles(NamedTuple):
    """The roles in whose messages the chat template places images, and videos."""

    images: Collection[str]
    videos: Collection[str] = ()


def media_roles(
    template: ChatTemplate, placeholders: Sequence[tuple[str, Any, Any]], *, has_tools: bool
) -> MediaRoles:
    """The roles of a template. placeholders: one for images and, if the model takes videos, one for
    videos; each begins with its text. has_tools: as in `ChatTemplate.mentions`."""
    marks = zip(placeholders, (IMAGE_PART, VIDEO_PART), strict=False)
    return MediaRoles(
        *(
            template.image_roles(placeholder[0], part=part, has_tools=has_tools)
            for placeholder, part in marks
        )
    )


class TakenImage(NamedTuple):
    """An image or a video of the messages, in their order."""

    #: The place of its part, such as "messages[0].content[1]".
    where: str
    #: A URL, or another object that a caller of the offline API gives.
    source: Any
    is_video: bool = False


def has_images(messages: Any) -> bool:
    """Whether any message has an image or a video, however malformed the messages are."""
    return isinstance(messages, Sequence) and any(
        _kind_of(part) is not None
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def take_images(
    messages: Sequence[Any],
    roles: MediaRoles,
    left_out: LeftOut | None,
    result_name: str | None = None,
) -> tuple[list[Any], list[TakenImage]]:
    """The messages with IMAGE_PART in place of each image and VIDEO_PART in place of each video,
    and the images and videos.

    If the chat template does not place images in results of tools, they are replaced by a line of
    text and named in `left_out`; if `left_out` is None, they are refused. left_out: as in
    `check_messages`. Raises InvalidRequestError for images in messages of other roles, and
    malformed parts. Messages without images are not checked.

    result_name: the name of an image of a result in `left_out`; None means that of its part.
    """
    taken: list[TakenImage] = []
    changed = list(messages)
    for at, message in enumerate(messages):
        if not has_images([message]):
            continue
        role = message.get("role")
        parts = list(message["content"])
        for place, part in enumerate(parts):
            kind = _kind_of(part)
            if kind is None:
                continue
            allowed = roles.videos if kind == "video" else roles.images
            if role in allowed:
                where = f"messages[{at}].content[{place}]"
                source = _source_of(part, where, left_out, is_video=kind == "video")
                taken.append(TakenImage(where, source, kind == "video"))
                parts[place] = dict(VIDEO_PART if kind == "video" else IMAGE_PART)
            elif role == "tool" and left_out is not None:
                parts[place] = {"type": "text", "text": stand_in(kind)}
                left_out[result_name or f"messages.content ({part['type']})"] = None
            else:
                raise _misplaced(at, kind, role, allowed)
        changed[at] = {**message, "content": parts}
    return changed, taken


def _misplaced(at: int, kind: str, role: Any, allowed: Collection[str]) -> InvalidRequestError:
    if kind == "video" and not allowed:
        return _wrong(
            f"messages[{at}] has a video, but this model takes none; send its frames as images, or"
            " leave it out"
        )
    named = " or ".join(sorted(allowed)) or "no role"
    article = "an" if kind == "image" else "a"
    return _wrong(
        f"messages[{at}] has {article} {kind} and the role {shown(role)}, but the model's chat"
        f" template places {kind}s in messages of {named}; move it"
    )


def _kind_of(part: Any) -> str | None:
    """ "image" or "video"; None for a part that has neither."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGE_KINDS:
        return "image"
    return "video" if kind in VIDEO_KINDS else None


def _source_of(
    part: Mapping[str, Any], where: str, left_out: LeftOut | None, *, is_video: bool
) -> Any:
    """The image or video of a part, which is not checked but for the URL of an `image_url`."""
    names = _VIDEO_SOURCES if is_video else _SOURCES
    found = [part[name] for name in names if part.get(name) is not None]
    if not found:
        other = " by its file_id; send it as a data: URL" if part.get("file_id") else ""
        kind = "video" if is_video else "image"
        raise _wrong(f"{where} has no {kind}{other}" if other else f"{where} has no {names[0]}")
    source, labels = found[0], dict(part)
    if isinstance(source, Mapping):  # OpenAI's {"url": ..., "detail": ...}
        labels |= {name: value for name, value in source.items() if name != "url"}
        source = source.get("url")
        if not isinstance(source, str):
            raise _wrong(f"{where}.{names[0]}.url is {shown(source)}, but must be a text")
    if is_video and not isinstance(source, str) and part.get("fps") is not None:
        source = (source, {"fps": labels.pop("fps")})
    detail = labels.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise _wrong(f"{where}.detail is {shown(detail)}, but must be {' or '.join(_DETAILS)}")
    for label, value in labels.items():
        if label in (*_DROPPED, *names) or value in (None, "", False):
            continue
        if left_out is None:
            raise _wrong(f"{where} has {label!r:.80}, which is not supported; leave it out")
        if len(left_out) < MAX_LABELS:
            left_out[f"messages.content.{label}"] = None
    return source


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "messages")
