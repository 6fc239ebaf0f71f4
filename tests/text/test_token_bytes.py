"""Joined shares of tokens are what the tokenizers library decodes, for every kind of decoder."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.small_tokenizers import make_byte_level, make_plain
from tokenizers import Regex, decoders

from quire.errors import CheckpointError
from quire.text.tokenizer import TokenBytes, Tokenizer


def joined(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    shares = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    if shares:
        shares[0] = tokenizer.first_token_bytes(token_ids[0])
    return b"".join(shares).decode(errors="replace")


@settings(deadline=None)
@given(data=st.data())
def test_byte_level_equals_decode(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1)))
    assert joined(byte_level, ids) == byte_level.decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(data=st.data())
def test_sentencepiece_equals_decode(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    """All tokens but the bytes above 0x7F, which are whole characters only together."""
    ids = data.draw(st.lists(st.integers(0, sentencepiece.vocab_size - 1)))
    ids = [token_id for token_id in ids if sentencepiece.token_bytes(token_id)[:1] < b"\x80"]
    assert joined(sentencepiece, ids) == sentencepiece.decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(text=st.text())
def test_sentencepiece_characters_out_of_bytes(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert joined(sentencepiece, ids) == sentencepiece.decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(data=st.data())
def test_plain_decoders_equal_decode(plain: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, plain.vocab_size - 1)))
    assert joined(plain, ids) == plain.decode(ids, skip_special_tokens=False)


def test_whole_text_is_that_of_tokens_made_of_whole_characters(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        whole = 0
        for token_id in range(tokenizer.vocab_size + 1):
            share, text = tokenizer.token_bytes(token_id), tokenizer.whole_text(token_id)
            assert tokenizer.whole_text(token_id) == text  # looked up the second time
            if text is None:
                assert "\ufffd" in share.decode(errors="replace")
            else:
                assert text.encode() == share
                whole += 1
        assert 0 < whole < tokenizer.vocab_size  # both kinds are there


def test_every_byte_is_a_byte_level_token(byte_level: Tokenizer) -> None:
    shares = {byte_level.token_bytes(token_id) for token_id in range(byte_level.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= shares


def test_first_token_loses_its_space(sentencepiece: Tokenizer, byte_level: Tokenizer) -> None:
    (token_id,) = sentencepiece.encode("the", add_special_tokens=False)
    assert sentencepiece.token_bytes(token_id) == b" the"
    assert sentencepiece.first_token_bytes(token_id) == b"the"
    (token_id,) = byte_level.encode(" the")
    assert byte_level.first_token_bytes(token_id) == b" the"


def test_added_tokens_outside_the_byte_alphabet_stand_for_themselves(byte_level: Tokenizer) -> None:
    shares = [byte_level.token_bytes(token_id) for token_id in byte_level.encode("世xtwo words")]
    assert shares == ["世x".encode(), b"two words"]


@pytest.mark.parametrize(
    "decoder, named",
    [
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "CTC"),
        (decoders.Strip(" ", 0, 1), "Strip with a stop"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "ByteLevel, Strip"),
    ],
)
def test_decoder_without_fixed_shares_is_refused(decoder: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        TokenBytes(make_plain(decoder))


def test_nested_sequence_is_understood() -> None:
    backend = make_byte_level()
    backend.decoder = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])])
    shares = TokenBytes(backend)
    ids = backend.encode("the 世").ids
    assert b"".join(map(shares.following, ids)) == "the 世".encode()


def test_vocabulary_without_any_text_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has any text"):
        TokenBytes(make_plain(decoders.Replace(Regex(".*"), "")))


def test_no_token_is_longer_than_the_longest(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        shares = [len(tokenizer.token_bytes(each)) for each in range(tokenizer.vocab_size)]
        assert 0 < max(shares) <= tokenizer.longest_token_bytes < 64
