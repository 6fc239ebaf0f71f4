"""Turns generated tokens into text incrementally, and finds stop strings.

`IncrementalDetokenizer` and `StopStrings` each hold the state of one generated sequence. The state
depends only on the tokens or the text added so far, so adding a sequence's tokens again restores
it. The API server and the offline API use one object of each class per generated sequence.
"""

import codecs
from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Turns generated tokens into text, and returns each character as soon as all its bytes are
    generated.

    Invariant: the prompt's text plus all results of `append` and `finish` equals `Tokenizer.decode`
    of all tokens (`TokenBytes` describes an exception in malformed text). A character whose first
    bytes are in the prompt belongs to the output if the output completes it, and otherwise to the
    prompt.

    Method: each token stands for fixed bytes, and an incremental UTF-8 decoder joins them. It holds
    at most three bytes, and a token costs one table look-up. The usual method of TGI, vLLM and
    tokenizers' DecodeStream decodes a window of tokens twice and emits the difference, unless it
    ends in U+FFFD. That method has three flaws. In a run of bytes that never completes a character,
    the window grows, so the cost is quadratic and the text is withheld. A U+FFFD that the model
    generated is withheld like an incomplete character. And the window can begin inside a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        kept_special_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """With `skip_special_tokens`, all special tokens but `kept_special_token_ids` give no
        text."""
        self._tokenizer = tokenizer
        self._whole_text = tokenizer.whole_text
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = skipped - kept_special_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._last_bytes(prompt_token_ids)
        self._at_start = not tail
        self._decoder.decode(tail)
        self._prompt_is_cut = bool(self._decoder.getstate()[0])
        # True if the last token ended with a complete character. Then a token of whole characters
        # always has the same text, which costs one look-up. Nearly all tokens take this path.
        self._is_between = not (self._at_start or self._prompt_is_cut)

    def append(self, token_id: int) -> str:
        """Append a token, and return the text that it completes; empty if its character is
        incomplete."""
        if token_id in self._skipped:
            return ""
        if self._is_between:
            text = self._whole_text(token_id)
            if text is not None:
                return text
        return self._append_bytes(token_id)

    def _append_bytes(self, token_id: int) -> str:
        share = self._tokenizer.token_bytes(token_id)
        if self._at_start and share:
            share = self._tokenizer.first_token_bytes(token_id)
            self._at_start = False
        text = self._own(self._decoder.decode(share))
        is_cut = self._prompt_is_cut or bool(self._decoder.getstate()[0])
        self._is_between = not (self._at_start or is_cut)
        return text

    def finish(self) -> str:
        """The rest of the text: U+FFFD if the last character is incomplete, otherwise empty."""
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """`text` without the U+FFFD for a character that the prompt left incomplete."""
        if self._prompt_is_cut and text:
            self._prompt_is_cut = False
            return text.removeprefix("\ufffd")
        return text

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough for any character; empty if the prompt has no
        text."""
        tail = b""
        for token_id in reversed(token_ids):
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
        return tail


class StopStrings:
    """Finds the first stop string in a text, and holds back text only while it may begin a stop
    string.

    The text ends at the first character that completes a stop string. If this character completes
    several, the longest one counts (of "b" and "ab": "ab"). The result depends only on the text,
    not on how it is split into tokens, and never on text after the stop string.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._matchers = [_StopMatcher(string) for string in stop]
        self._first_characters = frozenset(string[0] for string in stop)
        self._include_in_output = include_in_output
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add text. Returns the text that may be emitted, and the stop string if one is complete,
        else None.

        Text after the stop string is dropped, and `push` may not be called again. Callers set armed
        to False until min_tokens is reached: such text is emitted at once, and neither it nor
        earlier text can be part of a stop string.
        """
        assert not self._stopped, "text was pushed after the stop string"
        if not armed:
            emitted, self._held = self._held + text, ""
            for matcher in self._matchers:
                matcher.num_matched = 0
            return emitted, None
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None  # true for most tokens
        text, num_held = self._held + text, len(self._held)
        for position in range(num_held, len(text)):
            stop = self._advance(text[position])
            if stop is not None:
                self._held, self._stopped = "", True
                return text[: position + 1 - self._num_cut(stop)], stop
        longest = max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest], None

    def finish(self) -> str:
        """Call at the end of a text without a stop string. Returns the text that was held back."""
        emitted, self._held = self._held, ""
        return emitted

    def _advance(self, character: str) -> str | None:
        """The longest stop string that `character` completes, or None."""
        completed = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
        return max(completed, key=len, default=None)

    def _num_cut(self, stop: str) -> int:
        return 0 if self._include_in_output else len(stop)


class _StopMatcher:
    """Knuth-Morris-Pratt search for one stop string, one character at a time.

    Invariant: `num_matched` is the length of the longest suffix of the text so far that is a prefix
    of the stop string.
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # _borders[i] is the length of the longest proper prefix of stop[: i + 1] that is also its
        # suffix. It is computed only as far as a match has reached, so a long stop string costs
        # nothing at the start.
        self._borders = [0]

    def advance(self, character: str) -> bool:
        """Add the next character; True if it completes the stop string."""
        self.num_matched = self._longest_border(self.num_matched, character)
        num_known = len(self._borders)
        if num_known < self.num_matched:
            border = self._longest_border(self._borders[-1], self.stop[num_known])
            self._borders.append(border)
        return self.num_matched == len(self.stop)

    def _longest_border(self, length: int, character: str) -> int:
        """The length of the match after `character`, if `length` characters matched before it."""
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        return length + 1 if self.stop[length] == character else 0
