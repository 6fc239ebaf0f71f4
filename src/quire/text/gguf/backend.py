"""Builds a tokenizer from the metadata of a GGUF file.

    kind (tokenizer.ggml.model)   algorithm                             example
    gpt2                          byte-level BPE, rules by name         Llama 3, Qwen, GPT-2
    llama                         SentencePiece's BPE                   Llama 2, Mistral, Gemma 3
    gemma4                        BPE over characters, with merges      Gemma 4
    bert                          WordPiece                             BERT

The result splits texts like the original tokenizer. `pre_tokenizers` and `sentencepiece` supply
details that the metadata lacks. Called by `text.tokenizer`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from quire.errors import UnsupportedModelError, shown
from quire.text.gguf.byte_level import build_byte_level
from quire.text.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire.text.gguf.sentencepiece import build_marked_bpe, build_sentencepiece
from quire.text.gguf.vocabulary import GGUFVocabulary, read_vocabulary
from quire.text.gguf.word_piece import build_word_piece

_BUILDERS: dict[str, Callable[[GGUFVocabulary], tokenizers.Tokenizer]] = {
    "bert": build_word_piece,
    "gemma4": build_marked_bpe,
    "gpt2": build_byte_level,
    "llama": build_sentencepiece,
}
_ADD_BOS = ("bert", "gemma4", "llama")
"""The kinds that add a BOS token if the file has no setting for it."""

_ALWAYS_BOS = ("gemma4",)
"""The kinds that always add a BOS token, since early files have a wrong setting (llama.cpp
#21500)."""

_PHI3 = ("phi-3", "phi3")
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def build_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer that a file's metadata fields describe. Raises CheckpointError for
    invalid fields, and UnsupportedModelError for an unknown kind or unknown pre-tokenizer rules."""
    vocabulary = read_vocabulary(metadata)
    if vocabulary.kind not in _BUILDERS:
        raise UnsupportedModelError(
            f"its tokenizer is of the kind {shown(vocabulary.kind)} (tokenizer.ggml.model), but"
            f" only {', '.join(_BUILDERS)} are read; name the original model's tokenizer by"
            " --tokenizer (tokenizer= in Python): its folder or hub id"
        )
    backend = _BUILDERS[vocabulary.kind](vocabulary)
    backend.add_tokens(_added_tokens(vocabulary, backend))
    _add_special_tokens(backend, vocabulary)
    return backend


def _added_tokens(vocabulary: GGUFVocabulary, backend: tokenizers.Tokenizer) -> list[AddedToken]:
    """The special tokens, and the user-defined tokens, which are matched as a whole in any text."""
    takes_spaces = vocabulary.kind == "llama" and any(
        each in name for each in _PHI3 for name in (vocabulary.architecture, vocabulary.model_name)
    )
    special = [
        AddedToken(
            text,
            special=True,
            normalized=False,
            rstrip=takes_spaces and text not in _PHI3_KEEPS_SPACES,
        )
        for text in map(vocabulary.tokens.__getitem__, vocabulary.control_ids)
        if text
    ]
    whole = [
        AddedToken(text, special=False, normalized=False)
        for text in map(vocabulary.tokens.__getitem__, vocabulary.user_defined_ids)
        if backend.token_to_id(text) is not None  # absent if it was replaced by a normal token
    ]
    return special + whole


def _add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Make the tokenizer add special tokens around each text. In a pair, each text gets its own
    special tokens, except in BERT, which puts one token between the two texts."""
    named, adds, is_bert = vocabulary.named, vocabulary.adds, vocabulary.kind == "bert"
    rules = PRE_TOKENIZERS.get(vocabulary.pre) if vocabulary.kind == "gpt2" else None
    adds_bos = vocabulary.kind in _ADD_BOS or (rules is not None and rules.adds_bos)
    adds_bos = vocabulary.kind in _ALWAYS_BOS or adds.get("bos", adds_bos)
    before = [named["bos_token"]] if "bos_token" in named and adds_bos else []
    after = [named["eos_token"]] if "eos_token" in named and adds.get("eos", False) else []
    if is_bert:
        after = [named["sep_token"]] if "sep_token" in named else []
    if not before and not after:
        return
    first = [*map(_name, before), "$A", *map(_name, after)]
    second = [*map(_name, [] if is_bert else before), "$B", *map(_name, after)]
    backend.post_processor = processors.TemplateProcessing(
        single=first,
        pair=[*first, *(f"{each}:1" for each in second)],
        special_tokens=[
            {"id": _name(each), "ids": [each], "tokens": [vocabulary.tokens[each]]}
            for each in {*before, *after}
        ],
    )


def _name(token_id: int) -> str:
    """A name for a token in the post-processor's template. The token's text might have a meaning in
    the template's syntax."""
    return f"token-{token_id}"
