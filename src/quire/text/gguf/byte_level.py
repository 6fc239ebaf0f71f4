"""Builds byte-level BPE tokenizers (like GPT-2's) from GGUF files. Called by `backend`."""

import tokenizers
from tokenizers import decoders, models

from quire.errors import CheckpointError, shown
from quire.text.gguf.pre_tokenizers import find_pre_tokenizer
from quire.text.gguf.vocabulary import PREFIX, GGUFVocabulary


def build_byte_level(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens. Raises CheckpointError and UnsupportedModelError."""
    rules = find_pre_tokenizer(vocabulary.pre)
    backend = tokenizers.Tokenizer(
        merging_model(vocabulary, read_merges(vocabulary), ignore_merges=rules.whole_words)
    )
    normalizer = rules.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.build(add_prefix_space=bool(vocabulary.add_space_prefix))
    backend.decoder = decoders.ByteLevel()
    return backend


def read_merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """The file's merges: each "LEFT RIGHT" split into a pair. LEFT may begin with a space. Raises
    CheckpointError."""
    merges = []
    for each in vocabulary.merges:
        middle = each.find(" ", 1)
        if middle < 0:
            raise CheckpointError(
                f"{PREFIX}merges has {shown(each)}, which is not two parts; fetch the file again"
            )
        merges.append((each[:middle], each[middle + 1 :]))
    if not merges:
        raise CheckpointError(f"it has no {PREFIX}merges; fetch the file again")
    return merges


def merging_model(
    vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], **options: bool | str | None
) -> models.BPE:
    """The BPE model with these options. Raises CheckpointError if a merge uses an unknown token."""
    vocab = vocabulary.ids_by_text()
    for left, right in merges:  # some unknown tokens would make the library panic
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(
                f"{PREFIX}merges has {shown(f'{left} {right}')}, but not all of {shown(left)},"
                f" {shown(right)} and {shown(left + right)} are tokens; fetch the file again"
            )
    return models.BPE(vocab=vocab, merges=merges, **options)
