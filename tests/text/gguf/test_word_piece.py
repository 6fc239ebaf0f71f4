"""BERT's vocabularies from metadata encode as BERT's tokenizers do."""

import pytest
from tests.text.gguf.metadata import HARD_TEXTS
from transformers import BertTokenizer

from quire.errors import CheckpointError
from quire.text.gguf.backend import build_backend
from quire.text.tokenizer import Tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "play", "##ing", "##s", "a", "hello"]
WORDS += ["world", ",", ".", "'", "1", "##2", "na", "##ive", "Hello", "你", "def", "x", "(", ")"]


def metadata(**more: object) -> dict[str, object]:
    """As llama.cpp's converter writes it."""
    tokens = [
        word if word.startswith("[") else word[2:] if word.startswith("##") else "▁" + word
        for word in WORDS
    ]
    types = [3 if word.startswith("[") else 1 for word in WORDS]
    fields = {"model": "bert", "tokens": tokens, "token_type": types, "bos_token_id": 2}
    fields |= {"seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0, **more}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize("lowercase", [True, False])
def test_encodes_as_bert_does(lowercase: bool) -> None:
    vocab = {word: token_id for token_id, word in enumerate(WORDS)}
    theirs = BertTokenizer(vocab=vocab, do_lower_case=lowercase).backend_tokenizer
    more = {} if lowercase else {"normalizer.lowercase": False}
    ours = build_backend(metadata(**more))
    for text in [*HARD_TEXTS, "Hello plays, PLAYING naïve 12 [MASK] the"]:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        found, expected = ours.encode(text, "the world"), theirs.encode(text, "the world")
        assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)
        assert ours.decode(found.ids) == theirs.decode(found.ids)


def test_without_an_unknown_token_there_is_none() -> None:
    given = {name: value for name, value in metadata().items() if "unknown" not in name}
    with pytest.raises(CheckpointError, match=r"it has no tokenizer\.ggml\.unknown_token_id"):
        build_backend(given)


def test_its_tokens_can_be_streamed() -> None:
    tokenizer = Tokenizer(build_backend(metadata()))
    assert tokenizer.token_bytes(WORDS.index("##ing")) == b"ing"
    assert tokenizer.token_bytes(WORDS.index("play")) == b" play"
