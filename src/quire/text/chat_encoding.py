"""Converts chat messages to the token ids of a prompt.

Renders the messages with the chat template and encodes the text with the tokenizer. Called by the
server's chat APIs and by the offline API.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import InvalidRequestError
from quire.text.chat_template import ChatTemplate
from quire.text.special_tokens import Escape, strings_in
from quire.text.tokenizer import Tokenizer


class ImageMessages(NamedTuple):
    """Messages with images or videos."""

    #: The messages, in which `image_parts` has marked the images' places.
    messages: Sequence[Mapping[str, Any]]
    #: For each image, in the order of the messages, the placeholder that the template writes for
    #: it, and the text that replaces the placeholder.
    texts: Sequence[tuple[str, str]]


class EncodedChat(NamedTuple):
    """The prompt of a chat."""

    token_ids: list[int]
    #: The text of the assistant's next message that the prompt already contains.
    beginning: str = ""
    #: Names of message fields that were dropped because the template does not read them.
    left_out: Collection[str] = ()


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]] | ImageMessages,
    *,
    allow_special_tokens: bool = False,
    add_special_tokens: bool = False,
    check_text: Callable[[str], None] | None = None,
    finds_beginning: bool = False,
    **options: Any,
) -> EncodedChat:
    """Render `messages` with the template and encode the text. Raises InvalidRequestError.

    `allow_special_tokens`: encode special tokens that are written out in messages as special
        tokens, as in a text prompt. If False, only the template's own special tokens are encoded as
        such, and those in messages are encoded as plain text.
    `add_special_tokens`: add the tokenizer's special tokens around the text; most templates already
        contain them.
    `check_text`: called with each text of the messages before the template runs, and with the
        prompt's text before it is encoded; may raise.
    `finds_beginning`: set `beginning` in the result, which requires a second run of the template.
    `options`: further arguments of `ChatTemplate.prepare`.
    """
    # First, check the texts that the caller sent.
    images = messages if isinstance(messages, ImageMessages) else None
    listed = messages.messages if isinstance(messages, ImageMessages) else messages
    if check_text is not None:
        for message in listed:
            for part in strings_in(message):
                check_text(part)
    # Then render the messages, with markers in their special tokens.
    escape = None if allow_special_tokens else Escape(tokenizer.special_tokens)
    rendering = template.prepare(listed, escape=escape, takes_images=images is not None, **options)
    text = rendering.text()
    if check_text is not None:
        check_text(text)
    beginning = rendering.beginning(text) if finds_beginning else ""
    if escape is not None:
        beginning = escape.unmarked(beginning)
    # Last, put in the images, and encode.
    if images is not None:
        text = _with_images(text, images)
    encode = tokenizer.encode if escape is None else escape.encode
    token_ids = encode(text, add_special_tokens=add_special_tokens)
    return EncodedChat(token_ids, beginning, rendering.left_out)


def _with_images(text: str, images: ImageMessages) -> str:
    """The rendered text with the text of each image in place of its placeholder.

    Placeholders in the messages' own texts are not found, since markers are inside of them, unless
    special tokens in messages take effect. Raises InvalidRequestError if the numbers differ.
    """
    expected = [placeholder for placeholder, _ in images.texts]
    pieces = re.split("(" + "|".join(map(re.escape, sorted(set(expected)))) + ")", text)
    if pieces[1::2] != expected:
        raise InvalidRequestError(
            f"the messages have {len(expected)} images, but the model's chat template makes"
            f" {len(pieces) // 2} placeholders ({', '.join(sorted(set(expected)))}) of them, or"
            " makes them in another order",
            "messages",
        )
    pieces[1::2] = [text for _, text in images.texts]
    return "".join(pieces)
