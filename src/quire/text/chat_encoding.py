"""Encodes chat messages to the token ids of a prompt.

Joins the template, which writes the text, and the tokenizer. Called by the server's chat APIs and
by the offline API.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from quire.text.chat_template import ChatTemplate
from quire.text.special_tokens import Escape, strings_in
from quire.text.tokenizer import Tokenizer


class EncodedChat(NamedTuple):
    """A chat as a model takes it. beginning: what the prompt has of the answer's message.
    left_out: names of what the messages have and the model does not read."""

    token_ids: list[int]
    beginning: str = ""
    left_out: Collection[str] = ()


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    allow_special_tokens: bool = False,
    add_special_tokens: bool = False,
    check_text: Callable[[str], None] | None = None,
    finds_beginning: bool = False,
    **options: Any,
) -> EncodedChat:
    """`messages` rendered by the template and encoded. Raises InvalidRequestError.

    allow_special_tokens: those that are written out in the messages take effect, as in a text
        prompt. Else all special tokens are the template's; what looks like one in a message is
        encoded as the characters that it is made of.
    add_special_tokens: put those of the tokenizer around the text; most templates write them out.
    check_text: is shown each text of the messages before any work with it, and the prompt's before
        it is encoded; may raise.
    finds_beginning: the result has it, for which the template runs twice.
    options: further arguments of `ChatTemplate.prepare`.
    """
    if check_text is not None:
        for message in messages:
            for part in strings_in(message):
                check_text(part)
    escape = None if allow_special_tokens else Escape(tokenizer.special_tokens)
    rendering = template.prepare(messages, escape=escape, **options)
    text = rendering.text()
    if check_text is not None:
        check_text(text)
    beginning = rendering.beginning(text) if finds_beginning else ""
    if escape is not None:
        beginning = escape.unmarked(beginning)
    encode = tokenizer.encode if escape is None else escape.encode
    token_ids = encode(text, add_special_tokens=add_special_tokens)
    return EncodedChat(token_ids, beginning, rendering.left_out)
