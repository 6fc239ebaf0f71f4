"""Tokens of two vocabularies are paired by their bytes."""

import tokenizers
from tokenizers import decoders, models

from quire.assembly.draft_vocabularies import Vocabulary, has_same_ids, pair_tokens
from quire.text.tokenizer import Tokenizer


def byte_level(*tokens: str, special: str = "<s>") -> Vocabulary:
    """A vocabulary that writes bytes as characters, as GPT-2's."""
    return make(decoders.ByteLevel(), special, tokens)


def with_fallback(*tokens: str, special: str = "<s>") -> Vocabulary:
    """A vocabulary of characters, with tokens for single bytes, as Llama 2's."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return make(decoders.Sequence(steps), special, tokens)


def make(decoder: object, special: str, tokens: tuple[str, ...]) -> Vocabulary:
    ids = {token: token_id for token_id, token in enumerate((special, *tokens))}
    backend = tokenizers.Tokenizer(models.BPE(ids, []))
    backend.decoder = decoder
    backend.add_special_tokens([special])
    return Vocabulary(Tokenizer(backend), len(ids))


def paired(mine: Vocabulary, theirs: Vocabulary) -> dict[int, int]:
    pairs = pair_tokens(mine, theirs)
    return dict(zip(pairs.target_ids.tolist(), pairs.own_ids.tolist(), strict=True))


def test_equal_tokens_in_another_order() -> None:
    mine, theirs = byte_level("a", "b", "\u0120a"), byte_level("\u0120a", "a", "b")
    assert has_same_ids(mine, mine) and not has_same_ids(mine, theirs)
    assert paired(mine, theirs) == {0: 0, 1: 2, 2: 3, 3: 1}


def test_a_vocabulary_that_ends_earlier_has_the_same_ids() -> None:
    assert has_same_ids(byte_level("a", "b"), byte_level("a"))
    longer = byte_level("a", "b", "c")
    assert has_same_ids(byte_level("a", "b"), longer)
    assert not has_same_ids(byte_level("b", "a", "c"), longer)
    assert has_same_ids(byte_level("a", "b", "x"), longer._replace(size=3))


def test_other_spellings_of_the_same_bytes() -> None:
    """If two tokens have the same bytes, the token of the character is paired."""
    mine = byte_level("\u0120a", "A", "\u00c3\u00a9", "\u00e9")
    theirs = with_fallback("<0x41>", "\u00e9", "\u2581a", "A", "<0xE9>")
    assert paired(mine, theirs) == {0: 0, 1: 3, 2: 4, 3: 2, 4: 5}


def test_special_tokens_are_paired_by_name() -> None:
    mine, theirs = byte_level("a", "<e>"), byte_level("a", "<s>", special="<e>")
    assert paired(mine, theirs) == {1: 1}
    assert pair_tokens(mine, theirs).stand_ins.tolist()[1] == 1


def test_ids_that_a_model_lacks_are_in_no_pair() -> None:
    mine, theirs = byte_level("a", "b", "c"), byte_level("c", "b", "a")
    assert paired(mine._replace(size=3), theirs) == {0: 0, 1: 3, 2: 2}
    assert paired(mine, theirs._replace(size=3)) == {0: 0, 2: 2, 3: 1}
