"""Prepares a tokenizer's vocabulary for the grammar engine: the bytes of each token.

A token is represented by the bytes that it adds to the text (`Tokenizer.token_bytes`), not by its
text in the file. So byte-level, byte-fallback and plain-text vocabularies are treated alike. Called
by `compiler`.
"""

from collections.abc import Sequence
from functools import cached_property
from threading import Lock

import llguidance

from quire.text.tokenizer import Tokenizer

_BYTES_OF_TEXTS = (*range(0xC0), *range(0xC2, 0xF5))
"""All bytes that may occur in UTF-8."""


class GrammarVocabulary:
    """The vocabulary of one model, built when the first grammar needs it. Thread-safe.

    A special token is not text: a grammar allows it only by its name `<|name|>` or its id
    `<[123]>`. An added token that is not special (Qwen's `<tool_call>`) is text: a grammar that
    allows its characters allows this token and also shorter tokens. If the model has more ids than
    the tokenizer, the additional ids are never allowed, except for end tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int] = ()
    ) -> None:
        """`vocab_size` is the size of the model's vocabulary. Any of end_token_ids may follow a
        complete answer."""
        wrong = [token_id for token_id in end_token_ids if not 0 <= token_id < vocab_size]
        if wrong:
            raise ValueError(f"end token {wrong[0]} is not in a vocabulary of {vocab_size} tokens")
        self.vocab_size = vocab_size
        self.end_token_ids = tuple(sorted(set(end_token_ids)))
        #: Number of bytes of a mask: one bit per token, padded to a multiple of 32 bits.
        self.mask_bytes = (vocab_size + 31) // 32 * 4
        self._tokenizer = tokenizer
        self._lock = Lock()

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """llguidance's tokenizer for all grammars. The first call builds it, which takes 1 s per
        250,000 tokens."""
        with self._lock:
            return self._built

    @property
    def writes_all_bytes(self) -> bool:
        """True if each byte that occurs in UTF-8 has a token of its own that is not special."""
        with self._lock:
            return self._text_tokens.has_all_bytes

    def make(self) -> None:
        """Build `tokenizer` now. Building holds the GIL, so all other threads of the process
        wait."""
        _ = self.tokenizer

    @cached_property
    def _text_tokens(self) -> "_Tokens":
        known = min(self._tokenizer.vocab_size, self.vocab_size)
        tokens = [self._tokenizer.token_bytes(token_id) for token_id in range(known)]
        tokens += [b""] * (self.vocab_size - known)
        special = set(self.end_token_ids)
        special.update(i for i in self._tokenizer.special_token_ids if i < self.vocab_size)
        ends = list(self.end_token_ids)
        if not ends:
            # llguidance requires an end token. Add one after the vocabulary, outside of the
            # returned masks.
            ends = [self.vocab_size]
            tokens.append(b"")
            special.add(self.vocab_size)
        return _Tokens(tokens, sorted(special), ends, self._tokenizer)

    @cached_property
    def _built(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            self._text_tokens,  # type: ignore[arg-type]  # duck-typed TokenizerWrapper
            eos_token=self._text_tokens.end_token_ids,
            slices=llguidance.LLTokenizer.json_slices(),
        )


class _Tokens:
    """The interface that llguidance uses to read the tokens and to tokenize forced texts."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special_token_ids: list[int],
        end_token_ids: list[int],
        tokenizer: Tokenizer,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.end_token_ids = end_token_ids
        self.eos_token_id = end_token_ids[0]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_inside(text) or self._split_by_length(text.encode())

    def _split_by_length(self, text: bytes) -> list[int]:
        """Tokenize by repeatedly taking the longest matching token.

        Used for a text that the tokenizer would change or encode as a special token. Every byte
        must be a token: `compiler` lets llguidance force texts only if `writes_all_bytes`.
        """
        found: list[int] = []
        while text:
            sizes = range(min(len(text), self._longest), 0, -1)
            size = next(size for size in sizes if text[:size] in self._ids)
            found.append(self._ids[text[:size]])
            text = text[size:]
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {
            token: token_id for token_id, token in enumerate(self.tokens) if token_id not in special
        }

    @cached_property
    def has_all_bytes(self) -> bool:
        special = set(self.special_token_ids)
        single = {
            token[0]
            for token_id, token in enumerate(self.tokens)
            if len(token) == 1 and token_id not in special
        }
        return single.issuperset(_BYTES_OF_TEXTS)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))
