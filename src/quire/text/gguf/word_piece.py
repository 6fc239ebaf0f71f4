"""Builds a WordPiece tokenizer (like BERT's) from a GGUF file.

    original   play    ##ing   [CLS]
    file       ▁play   ing     [CLS]

Called by `text.gguf.backend`.
"""

from dataclasses import replace

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.errors import CheckpointError
from quire.text.gguf.vocabulary import PREFIX, GGUFVocabulary, TokenType

_BEGINNING = "▁"
_CONTINUATION = "##"


def build_word_piece(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens. Raises CheckpointError."""
    original = replace(vocabulary, tokens=original_tokens(vocabulary))
    vocab, unknown = original.ids_by_text(), original.text_of("unk_token")
    if unknown not in vocab:
        raise CheckpointError(
            f"it has no {PREFIX}unknown_token_id, for words that are not in its vocabulary; fetch"
            " the file again"
        )
    lowercase = vocabulary.lowercase is not False
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=vocabulary.strip_accents
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_CONTINUATION)
    return backend


def original_tokens(vocabulary: GGUFVocabulary) -> list[str]:
    """The tokens in the original tokenizer's form."""
    return [
        _original(text) if each == TokenType.NORMAL else text
        for text, each in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]


def _original(text: str) -> str:
    if text.startswith(_BEGINNING):
        return text[len(_BEGINNING) :]
    return _CONTINUATION + text
