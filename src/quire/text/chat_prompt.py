"""Chat messages to the token ids of a prompt: the template, and then the tokenizer.

Called by the server's chat API and by the offline API, which `quire chat` uses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.text.chat_template import ChatTemplate
from quire.text.special_tokens import Escape, strings_in
from quire.text.tokenizer import Tokenizer


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    allow_special_tokens: bool = False,
    add_special_tokens: bool = False,
    check_text: Callable[[str], None] | None = None,
    **options: Any,
) -> list[int]:
    """The token ids of `messages`. Raises InvalidRequestError.

    allow_special_tokens: those that are written out in the messages take effect, as in a text
        prompt. Else all special tokens are the template's; what looks like one in a message is
        encoded as the characters that it is made of.
    add_special_tokens: put those of the tokenizer around the text; most templates write them out.
    check_text: is shown each text of the messages before any work with it, and the prompt's before
        it is encoded; may raise.
    options: further arguments of `ChatTemplate.render`.
    """
    if check_text is not None:
        for message in messages:
            for part in strings_in(message):
                check_text(part)
    escape = None if allow_special_tokens else Escape(tokenizer.special_tokens)
    text = template.render(messages, escape=escape, **options)
    if check_text is not None:
        check_text(text)
    if escape is None:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return escape.encode(text, add_special_tokens=add_special_tokens)
