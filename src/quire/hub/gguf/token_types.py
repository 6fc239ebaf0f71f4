"""Guesses token types for GGUF files that lack `tokenizer.ggml.token_type`.

llama.cpp treats all tokens of such files as normal, so it finds no end tokens and no special tokens
in chat templates. This module treats as special the tokens that the file names by id (such as
eos_token_id) and those whose text looks special (such as `<|im_end|>`). Called by
`text.gguf.vocabulary` and `hub.gguf.generation`.
"""

import re
from collections.abc import Collection, Sequence

NORMAL, CONTROL, BYTE = 1, 3, 6
"""Values of `tokenizer.ggml.token_type`."""

_CONTROL_TEXT = re.compile(r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>")
"""Matches special tokens of common vocabularies: <|im_end|>, and DeepSeek's with wide bars."""
_CONTROL_OF_SENTENCEPIECE = frozenset(
    {"<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"}
    | {"[INST]", "[/INST]"}
)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def guess_types(tokens: Sequence[str], kind: object, special_ids: Collection[int]) -> list[int]:
    """The type of each token. `kind` is the value of tokenizer.ggml.model. `special_ids` are the
    token ids that the file names, such as eos_token_id."""
    is_sentencepiece = kind == "llama"

    def guess(token_id: int, text: str) -> int:
        if token_id in special_ids or _CONTROL_TEXT.fullmatch(text):
            return CONTROL
        if is_sentencepiece and text in _CONTROL_OF_SENTENCEPIECE:
            return CONTROL
        return BYTE if is_sentencepiece and _BYTE.fullmatch(text) else NORMAL

    return [guess(token_id, text) for token_id, text in enumerate(tokens)]
