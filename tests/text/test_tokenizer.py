"""Encoding equals transformers' on tokenizers of each kind; what a folder may lack is said."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pooling_folders import make_bert
from tests.text.small_tokenizers import SPECIAL, make_byte_level, make_plain, make_sentencepiece
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.errors import CheckpointError, InvalidRequestError
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_config import TokenizerConfig

TEXTS = [
    "the quick brown fox",
    " leading and trailing ",
    "two  spaces\n\nand\ttabs",
    "你好,世界 🙂 👋🏽 naïve cafe\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>two words",
    "<s>[TOOL] the</s>path <unk>",
    "",
    "\x00\x7f\ufffd",
]
LISTED = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False},
    "unk_token": "<unk>",
}


def check_equal_to_transformers(folder: Path) -> Tokenizer:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        for add_special_tokens in (True, False):
            token_ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert token_ids == theirs.encode(text, add_special_tokens=add_special_tokens), text
            for skip in (True, False):
                decoded = ours.decode(token_ids, skip_special_tokens=skip)
                assert decoded == theirs.decode(token_ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_token_ids >= set(theirs.all_special_ids)
    return ours


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tokenizer_class", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "bos_token": "<|im_start|>"}])
def test_byte_level_equals_transformers(
    save_folder: Callable[..., Path], model_type: str, tokenizer_class: str, flags: dict[str, Any]
) -> None:
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    folder = save_folder(
        make_byte_level(),
        config={"model_type": model_type},
        tokenizer_config={"tokenizer_class": tokenizer_class, **named, **flags},
    )
    tokenizer = check_equal_to_transformers(folder)
    assert tokenizer.encode("the") == tokenizer.encode("the", add_special_tokens=False)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
@pytest.mark.parametrize("adds_bos", [True, False])
def test_sentencepiece_equals_transformers(
    save_folder: Callable[..., Path],
    model_type: str,
    tokenizer_class: str,
    flags: dict[str, Any],
    adds_bos: bool,
) -> None:
    folder = save_folder(
        make_sentencepiece(adds_bos=adds_bos),
        config={"model_type": model_type},
        tokenizer_config={"tokenizer_class": tokenizer_class, "legacy": False, **LISTED, **flags},
    )
    tokenizer = check_equal_to_transformers(folder)
    assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) == adds_bos


def test_tokens_that_only_the_configuration_names(save_folder: Callable[..., Path]) -> None:
    entry = {"content": "[A]", "lstrip": False, "normalized": False, "rstrip": False}
    folder = save_folder(
        make_byte_level(),
        config={"model_type": "llama"},
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "[EOS]",
            "image_token": "[IMAGE]",
            "additional_special_tokens": ["[X]", "[Y]"],
            "added_tokens_decoder": {"406": {**entry, "special": False, "single_word": False}},
        },
    )
    tokenizer = check_equal_to_transformers(folder)
    ids = tokenizer.encode("[A][EOS][X]")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["[A]", "[EOS]", "[X]"]
    assert tokenizer.decode(ids) == "[A]"


def test_special_tokens_map_counts_where_no_added_tokens_are_listed(
    save_folder: Callable[..., Path],
) -> None:
    folder = save_folder(
        make_byte_level(),
        config={"model_type": "llama"},
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "the"},
        special_tokens_map={
            "eos_token": {"content": SPECIAL[2], "lstrip": False, "normalized": False},
            "additional_special_tokens": ["[NEW]"],
        },
    )
    tokenizer = check_equal_to_transformers(folder)
    assert tokenizer.token_text(tokenizer.eos_token_id or 0) == SPECIAL[2]


def test_split_special_tokens_are_plain_text(save_folder: Callable[..., Path]) -> None:
    folder = save_folder(
        make_byte_level(),
        config={"model_type": "llama"},
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "split_special_tokens": True,
        },
    )
    tokenizer = check_equal_to_transformers(folder)
    assert not tokenizer.special_token_ids & set(tokenizer.encode(SPECIAL[1]))


def test_folder_with_tokenizer_json_alone(save_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_folder(save_folder(make_byte_level()))
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_id is None
    assert tokenizer.decode(tokenizer.encode("the path")) == "the path"


def test_truncation_and_padding_in_the_file_are_off(save_folder: Callable[..., Path]) -> None:
    backend = make_byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_folder(save_folder(backend))
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=4), special=st.booleans())
def test_batch_equals_one_by_one(sentencepiece: Tokenizer, texts: list[str], special: bool) -> None:
    batch = sentencepiece.encode_batch(texts, add_special_tokens=special)
    assert batch == [sentencepiece.encode(text, add_special_tokens=special) for text in texts]


@pytest.mark.parametrize("bad, words", [("a\ud800", "U+D800 at position 1"), (3, "is a int")])
def test_text_that_is_no_text_is_refused(byte_level: Tokenizer, bad: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as of_one_text:
        byte_level.encode(bad)
    with pytest.raises(InvalidRequestError) as of_many_texts:
        byte_level.encode_batch(["fine", bad])
    assert words in str(of_one_text.value) and words in str(of_many_texts.value)


def test_decode_ignores_ids_beyond_the_vocabulary(byte_level: Tokenizer) -> None:
    the = byte_level.encode("the")
    assert byte_level.decode([*the, byte_level.vocab_size + 7]) == "the"
    assert byte_level.token_bytes(byte_level.vocab_size + 7) == b""
    with pytest.raises(InvalidRequestError, match="-1 is not a token id"):
        byte_level.decode([*the, -1])


@pytest.mark.parametrize("file", ["tokenizer.model", "vocab.json"])
def test_unconverted_folder_is_refused_with_the_conversion(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    message = str(caught.value)
    assert file in message
    assert f"AutoTokenizer.from_pretrained({str(tmp_path)!r}).save_pretrained(" in message


def test_missing_folder_and_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"{}", b"", b'{"model": ', b"\xff\xfe"])
def test_corrupt_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(path) in str(caught.value)


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode()


def test_token_texts_keep_their_space(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        token_ids = tokenizer.encode("see the path", add_special_tokens=False)
        assert tokenizer.token_text(token_ids[-1]) == " path"
        assert text_of(tokenizer, token_ids).strip() == "see the path"


def test_bytes_of_a_character_in_parts(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        token_ids = tokenizer.encode("\n\U00010348", add_special_tokens=False)[-4:]
        shares = [tokenizer.token_bytes(token_id) for token_id in token_ids]
        assert shares == [b"\xf0", b"\x90", b"\x8d", b"\x88"]
        assert [tokenizer.token_text(token_id) for token_id in token_ids] == ["\ufffd"] * 4


def test_byte_fallback_of_a_line_break(sentencepiece: Tokenizer) -> None:
    (token_id,) = sentencepiece.encode("\n", add_special_tokens=False)[-1:]
    assert sentencepiece.token_bytes(token_id) == b"\n"


@pytest.mark.parametrize("word", ["the", "dog", "path", "世", "zq!"])
def test_bad_word_is_covered_wherever_it_stands(
    byte_level: Tokenizer, sentencepiece: Tokenizer, word: str
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        sequences = tokenizer.encode_bad_word(word)
        for text in (word, f"a {word}", f"\n{word}", f"\n {word}"):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            ends = [token_ids[-len(sequence) :] == sequence for sequence in sequences]
            assert any(ends), (text, sequences)
        for sequence in sequences:
            assert text_of(tokenizer, sequence).strip() == word
            others = [other for other in sequences if other is not sequence]
            assert not any(sequence[-len(other) :] == other for other in others)


def test_bad_word_with_its_space_leaves_the_bare_word_alone(byte_level: Tokenizer) -> None:
    (sequence,) = byte_level.encode_bad_word(" the")
    assert text_of(byte_level, sequence) == " the"


def test_bad_word_without_tokens_is_refused() -> None:
    backend = make_sentencepiece()
    backend.normalizer = normalizers.Replace("x", "")
    backend.pre_tokenizer = None
    with pytest.raises(InvalidRequestError, match="'x', which has no tokens") as caught:
        Tokenizer(backend).encode_bad_word("x")
    assert caught.value.param == "bad_words"


def test_named_token_beyond_the_vocabulary_is_added() -> None:
    config = TokenizerConfig(named_tokens={"eos_token": AddedToken("<end>", special=True)})
    backend = make_byte_level()
    num_tokens = backend.get_vocab_size()
    tokenizer = Tokenizer(backend, config)
    assert tokenizer.eos_token_id == num_tokens == tokenizer.vocab_size - 1
    assert tokenizer.eos_token_id in tokenizer.special_token_ids


def test_import_is_light() -> None:
    program = (
        "import sys, quire.text.tokenizer, quire.text.detokenizer\n"
        "heavy = {'jinja2', 'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("remembers_words", [True, False])
def test_words_are_remembered_only_where_they_may_be(remembers_words: bool) -> None:
    """A rule that is changed between two calls shows which words are looked up and not worked out:
    those of an earlier text, whoever sent it."""
    backend = make_sentencepiece()
    tokenizer = Tokenizer(backend, remembers_words=remembers_words)
    first = tokenizer.encode("\u65e5", add_special_tokens=False)
    assert len(first) > 1, "it is written in bytes"
    backend.model.byte_fallback = False
    again = tokenizer.encode("\u65e5", add_special_tokens=False)
    assert (again == first) == remembers_words


def test_one_without_a_memory_for_words_needs_none_to_be_switched_off() -> None:
    plain = Tokenizer(make_plain(None), remembers_words=False)
    assert plain.encode("hello") == Tokenizer(make_plain(None)).encode("hello")


@pytest.mark.parametrize("most", [None, 3, 6, 7, 100])
def test_pairs_are_joined_and_cut_at_the_end_of_the_second(most: int | None, tmp_path: Path):
    make_bert(tmp_path)
    tokenizer, theirs = (
        Tokenizer.from_folder(tmp_path),
        PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")),
    )
    first, second = "cats sleep", "paris is the capital"
    token_ids, types = tokenizer.encode_pair(first, second, most)
    whole = theirs(first, second)
    num_kept = max(5, len(whole["input_ids"]) if most is None else min(most, 9))
    assert token_ids == whole["input_ids"][: num_kept - 1] + whole["input_ids"][-1:]
    assert types == [0, 0, 0, 0] + [1] * (num_kept - 4)
    end_kept, its_types = tokenizer.encode_pair(first, second, most, keeps_end=True)
    num_cut = len(whole["input_ids"]) - num_kept
    assert end_kept == whole["input_ids"][:4] + whole["input_ids"][4 + num_cut :]
    assert its_types == types
    alone = tokenizer.encode_pair(second, None, most)[0]
    assert alone == [*theirs(second)["input_ids"][: len(alone) - 1], 3]
    assert len(alone) == (6 if most is None else min(most, 6))
    with pytest.raises(InvalidRequestError):
        tokenizer.encode_pair("\ud800", second)


def test_the_time_for_a_pair_grows_as_its_length(byte_level: Tokenizer) -> None:
    """Minutes, if the library's lists of tokens were copied for each token."""
    token_ids, types = byte_level.encode_pair("cats", "cats " * 60_000, 100_000)
    assert len(token_ids) == len(types) == 100_000
