"""Builds BPE tokenizers with "▁" for spaces from GGUF files: SentencePiece's and Gemma 4's.

A SentencePiece file has no merges, but a score for each token: among all adjacent pairs that form a
token, the pair whose token has the highest score is merged first. The tokenizers library needs a
list of merges instead, which this module derives from the scores. Called by `text.gguf.backend`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from quire.errors import CheckpointError, shown
from quire.text.gguf.byte_level import merging_model, read_merges
from quire.text.gguf.vocabulary import PREFIX, GGUFVocabulary, TokenType

SPACE = "▁"
_INSTRUCTION = "[INST]"
"""A special token that marks a Mistral tokenizer of version 2 or later. These add a space only at
the beginning of a text. Older Mistral and Llama tokenizers add a space to each piece of text
between special tokens."""


_MAX_LETTERS = 1024
"""Maximum length of a normal token in characters. Real tokens have at most 31 (Gemma's tokens of
spaces)."""
_IN_ORDER = "gemma"
"""Prefix of the architectures whose tokens are listed in merge order. Their scores are not usable:
they differ from that order for tokens of several spaces."""


def build_sentencepiece(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens. Raises CheckpointError."""
    vocabulary = _with_marked_spaces(vocabulary)
    has_prefix = vocabulary.add_space_prefix is not False
    backend = _backend(vocabulary, _merges_by_score(vocabulary), strips_space=has_prefix)
    if not has_prefix:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    elif vocabulary.ids_by_text().get(_INSTRUCTION) in vocabulary.control_ids:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    return backend


def build_marked_bpe(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """The tokenizer of a file that has merges, without added tokens. Raises CheckpointError."""
    vocabulary = _with_marked_spaces(vocabulary)
    backend = _backend(vocabulary, read_merges(vocabulary), strips_space=False)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    return backend


def _backend(
    vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], *, strips_space: bool
) -> tokenizers.Tokenizer:
    has_bytes = TokenType.BYTE in vocabulary.types
    unknown = vocabulary.text_of("unk_token")
    backend = tokenizers.Tokenizer(
        merging_model(
            vocabulary,
            merges,
            unk_token=unknown if unknown in vocabulary.ids_by_text() else None,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback(), decoders.Fuse()]
    if strips_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _with_marked_spaces(vocabulary: GGUFVocabulary) -> GGUFVocabulary:
    """The vocabulary with Gemma's tokens of several spaces changed to normal tokens of "▁", so that
    they are merged as in the original tokenizer. In the file, they are user-defined tokens of
    spaces."""
    tokens, types = list(vocabulary.tokens), list(vocabulary.types)
    for token_id in vocabulary.user_defined_ids:
        text = tokens[token_id]
        if text and not text.strip(f" {SPACE}"):
            tokens[token_id] = SPACE * len(text)
            types[token_id] = TokenType.NORMAL
    return replace(vocabulary, tokens=tokens, types=types)


def _merges_by_score(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """All pairs of normal tokens that form a normal token, in the order in which they are
    merged."""
    normal = {
        _check_length(vocabulary.tokens[token_id]): token_id
        for token_id, each in enumerate(vocabulary.types)
        if each == TokenType.NORMAL and vocabulary.tokens[token_id]
    }
    scores = vocabulary.scores or [0.0] * len(vocabulary.tokens)
    order = list(normal)
    if not vocabulary.architecture.startswith(_IN_ORDER):
        order.sort(key=lambda token: -scores[normal[token]])
    return [pair for token in order for pair in _pairs(token, normal)]


def _check_length(token: str) -> str:
    """Return the token. Raises CheckpointError if it is longer than _MAX_LETTERS, since the time of
    `_pairs` grows quadratically with the length."""
    if len(token) > _MAX_LETTERS:
        raise CheckpointError(
            f"{PREFIX}tokens has {shown(token)} of {len(token)} letters, but at most"
            f" {_MAX_LETTERS} are read; fetch the file again"
        )
    return token


def _pairs(token: str, normal: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The splits of a token into two tokens, longest left part first, as in transformers."""
    for middle in range(len(token) - 1, 0, -1):
        left, right = token[:middle], token[middle:]
        if left in normal and right in normal:
            yield left, right
