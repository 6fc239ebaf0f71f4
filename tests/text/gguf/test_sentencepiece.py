"""SentencePiece's vocabularies from metadata encode as SentencePiece and transformers do."""

import json
from typing import Any

import pytest
import tokenizers
from tests.text.gguf.metadata import HARD_TEXTS, sentencepiece_answers, trained_sentencepiece
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from quire.errors import CheckpointError
from quire.text.gguf.backend import build_backend
from quire.text.tokenizer import Tokenizer


def converted(architecture: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """As transformers reads it."""
    fields = {"model": "tokenizer_type", "tokens": "tokens", "scores": "scores"}
    fields |= {"token_type": "token_type", "merges": "merges"}
    named = {
        theirs: metadata[f"tokenizer.ggml.{ours}"]
        for ours, theirs in fields.items()
        if f"tokenizer.ggml.{ours}" in metadata
    }
    backend: tokenizers.Tokenizer = convert_gguf_tokenizer(architecture, named)[0]
    return backend


def test_encodes_as_sentencepiece_does() -> None:
    backend = build_backend(trained_sentencepiece())
    for text, expected in sentencepiece_answers():
        assert backend.encode(text, add_special_tokens=False).ids == expected, text


def test_texts_come_back_whole_and_streamed() -> None:
    tokenizer = Tokenizer(build_backend(trained_sentencepiece()))
    for text in HARD_TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids) == text.replace("</s>", "")
        shares = [tokenizer.first_token_bytes(token_ids[0])] if token_ids else []
        shares += [tokenizer.token_bytes(token_id) for token_id in token_ids[1:]]
        assert b"".join(shares).decode() == text


def test_a_space_begins_each_text_between_special_tokens() -> None:
    backend = build_backend(trained_sentencepiece())
    tokens = backend.encode("the</s>the<tool>the").tokens
    assert tokens == ["<s>", "▁the", "</s>", "▁the", "<tool>", "▁the"]
    assert build_backend(trained_sentencepiece(add_bos_token=False)).encode("a").ids[0] != 1


def test_mistrals_later_tokenizers_put_a_space_before_a_whole_text_only() -> None:
    metadata = trained_sentencepiece()
    metadata["tokenizer.ggml.tokens"][459] = "[INST]"
    metadata["tokenizer.ggml.token_type"][459] = 3
    ours = build_backend(metadata)
    tokens = ours.encode("the[INST] the", add_special_tokens=False).tokens
    assert tokens == ["▁the", "[INST]", "▁the"]
    theirs = converted("llama", metadata)
    for text in [*HARD_TEXTS, "[INST]hi [INST] there"]:
        assert ours.encode(text, add_special_tokens=False).ids == (
            theirs.encode(text, add_special_tokens=False).ids
        )


def test_phi_3_takes_spaces_behind_special_tokens_in() -> None:
    for name in ({"general.name": "Phi-3 mini"}, {"general.architecture": "phi3"}):
        backend = build_backend(trained_sentencepiece() | name)
        for text, same in (("</s> \n the", "</s>the"), ("<unk> the", "<unk> the")):
            expected = build_backend(trained_sentencepiece()).encode(same).ids
            assert backend.encode(text).ids == expected


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3"])
def test_gemma_is_read_as_transformers_reads_it(architecture: str) -> None:
    metadata = trained_sentencepiece(add_space_prefix=False)
    metadata["general.architecture"] = architecture
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    for token_id, text in enumerate(tokens):  # user-defined in Gemma's, and written with spaces
        if len(text) > 1 and not text.strip("▁"):
            tokens[token_id], types[token_id], scores[token_id] = " " * len(text), 4, -1000.0
    assert 4 in types
    tokens[1], tokens[2] = "<bos>", "<eos>"
    theirs = converted(architecture, metadata)
    ours = build_backend(metadata)
    for text in [*HARD_TEXTS, "a  b   c    d", "the<bos> the", "   ", "<tool>  x"]:
        found = ours.encode(text, add_special_tokens=False)
        assert found.ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(found.ids) == theirs.decode(found.ids)


def test_tokens_of_very_many_letters_end_with_a_sentence() -> None:
    metadata = trained_sentencepiece()
    metadata["tokenizer.ggml.tokens"][400] = "a" * 1025
    with pytest.raises(CheckpointError, match=r"of 1025 letters, but at most 1024 are read"):
        build_backend(metadata)


def test_gemma_4_has_merges() -> None:
    metadata = trained_sentencepiece(add_space_prefix=False) | {"general.architecture": "gemma4"}
    first = build_backend(metadata | {"general.architecture": "llama"})
    merges = [f"{left} {right}" for left, right in json.loads(first.to_str())["model"]["merges"]]
    del metadata["tokenizer.ggml.scores"]
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    # Gemma 4's first files say so by mistake.
    ours = build_backend(metadata | {"tokenizer.ggml.add_bos_token": False})
    for text in HARD_TEXTS:
        assert ours.encode(text).ids == first.encode(text).ids
        assert ours.encode(text).ids[0] == 1


def test_without_types_bytes_and_special_tokens_are_told_by_their_texts() -> None:
    metadata = trained_sentencepiece()
    del metadata["tokenizer.ggml.token_type"]
    backend = build_backend(metadata)
    for text, expected in sentencepiece_answers():
        assert backend.encode(text, add_special_tokens=False).ids == expected, text
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    assert special == {0, 1, 2}
