"""Pairs the tokens of a model with those of a model that drafts for it.

Two vocabularies may have the same tokens in another order, and each may have tokens of its own. A
token is found in the other vocabulary by its bytes. Called by `draft_model_build`.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

from quire.runtime.token_pairs import TokenPairs
from quire.text.tokenizer import Tokenizer


class Vocabulary(NamedTuple):
    """The tokens of a model."""

    tokenizer: Tokenizer
    #: Number of the model's token ids; the tokenizer may have more or less.
    size: int

    def entries(self) -> dict[int, str]:
        """The entries of the tokenizer by token id, in ascending order, as far as the model has
        them."""
        found = sorted((token_id, token) for token, token_id in self.tokenizer.token_ids.items())
        return {token_id: token for token_id, token in found if token_id < self.size}


def has_same_ids(mine: Vocabulary, theirs: Vocabulary) -> bool:
    """Whether both models have the same token at every id that is in both vocabularies."""
    own_ids, size = mine.tokenizer.token_ids, min(mine.size, theirs.size)
    return all(
        own_ids.get(token) == token_id
        for token, token_id in theirs.tokenizer.token_ids.items()
        if token_id < size
    )


def pair_tokens(mine: Vocabulary, theirs: Vocabulary) -> TokenPairs:
    """The pairs of a model's tokens and those of the model that drafts.

    A special token is paired with a special one of the same name only.
    """
    own, other = mine.entries(), theirs.entries()
    pairs: dict[int, int] = {}
    # First, pair equal entries with equal bytes. An entry alone means other bytes where the one
    # tokenizer writes bytes as characters, and the other does not. Then pair what is left by bytes.
    for has_entry in (True, False):
        taken = set(pairs.values())
        left = (token_id for token_id in other if token_id not in taken)
        # Where tokens have the same bytes, the last one is no fallback for single bytes.
        ids = {_key(theirs.tokenizer, other, each, has_entry=has_entry): each for each in left}
        for token_id in reversed(own):
            if token_id not in pairs:
                found = ids.pop(_key(mine.tokenizer, own, token_id, has_entry=has_entry), None)
                if found is not None:
                    pairs[token_id] = found
    stand_ins = np.zeros(mine.size, np.int32)
    unpaired = [token_id for token_id in own if token_id not in pairs]
    stand_ins[unpaired] = _last_tokens(mine.tokenizer, unpaired, theirs)
    target_ids = np.array(list(pairs), np.int64)
    own_ids = np.array(list(pairs.values()), np.int64)
    stand_ins[target_ids] = own_ids
    return TokenPairs(target_ids, own_ids, stand_ins)


def _key(
    tokenizer: Tokenizer, entries: dict[int, str], token_id: int, *, has_entry: bool
) -> Hashable:
    """Returns a key that is equal for two tokens with the same text."""
    is_special = token_id in tokenizer.special_token_ids
    entry = entries[token_id] if has_entry or is_special else ""
    return is_special, entry, tokenizer.token_bytes(token_id)


def _last_tokens(tokenizer: Tokenizer, token_ids: Iterable[int], other: Vocabulary) -> list[int]:
    """Encodes each token's text with the other tokenizer, and returns the last id of each text; 0
    for an empty text."""
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    encoded = other.tokenizer.encode_batch(texts, add_special_tokens=False)
    last = [token_ids[-1] if token_ids else 0 for token_ids in encoded]
    return [token_id if token_id < other.size else 0 for token_id in last]
