"""Turns generated tokens into text incrementally, and finds stop strings.

`IncrementalDetokenizer` and `StopStrings` each hold the state of one generated sequence. The state
depends only on the tokens or text pushed, so replaying a sequence's tokens restores it. The API
server and the offline API have one object of each class per generated sequence.
"""

import codecs
from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Turns generated tokens into text, and returns each character as soon as it is complete.

    Law: the prompt's text joined with all results of `append` and `finish` is the UTF-8 decoding of
    the bytes of all tokens, which equals `Tokenizer.decode` of them (`TokenBytes` describes the one
    exception, in malformed text). A character that the prompt begins and the output completes
    belongs to the output; if the output does not complete it, it belongs to the prompt.

    Method: each token has a fixed share of bytes, and an incremental UTF-8 decoder joins them. It
    holds at most three bytes, and a token costs one table look-up. The usual method decodes a
    window of tokens twice and emits the difference, unless it ends in U+FFFD (the prefix and read
    offsets of TGI and vLLM; tokenizers' DecodeStream works alike). It has three flaws. The window
    grows with a run of bytes that never becomes a character, so its cost is quadratic and its text
    is withheld. A U+FFFD that the model generated is withheld as if it were an incomplete
    character. And the window's edge can lie inside a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        kept_special_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`kept_special_token_ids` are never skipped."""
        self._tokenizer = tokenizer
        self._whole_text = tokenizer.whole_text
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = skipped - kept_special_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._last_bytes(prompt_token_ids)
        self._at_start = not tail
        self._decoder.decode(tail)
        self._prompt_is_cut = bool(self._decoder.getstate()[0])
        # True between two characters. There, a token of whole characters has the same text whatever
        # came before. Nearly all tokens take this path, which costs one look-up.
        self._is_between = not (self._at_start or self._prompt_is_cut)

    def append(self, token_id: int) -> str:
        """Append a token, and return the text that it completes; empty inside a character."""
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
        """The text still held back: U+FFFD for an incomplete character, otherwise nothing."""
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """`text` without the U+FFFD for a character that the prompt left incomplete."""
        if self._prompt_is_cut and text:
            self._prompt_is_cut = False
            return text.removeprefix("\ufffd")
        return text

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough for a whole character; empty if it has no text."""
        tail = b""
        for token_id in reversed(token_ids):
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
        return tail


class StopStrings:
    """Finds the first stop string in a text, and holds back text only while it may be part of one.

    The text ends at the first character that completes a stop string. If several are completed
    there, the longest counts (of "b" and "ab": "ab"). This depends on the text alone, not on its
    tokens, and never needs text after the stop string.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._matchers = [_StopMatcher(string) for string in stop]
        self._first_characters = frozenset(string[0] for string in stop)
        self._include_in_output = include_in_output
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add text; return the text that may be emitted, and the stop string once it is complete.

        Text after the stop string is dropped, and nothing may be pushed after it.
        Callers set armed to False before min_tokens is reached: such text is emitted at once, and
        neither it nor earlier text is ever part of a stop string.
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
        """The text that was held back, if the text ends without a stop string."""
        emitted, self._held = self._held, ""
        return emitted

    def _advance(self, character: str) -> str | None:
        """The longest stop string that `character` completes, if it completes one."""
        completed = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
        return max(completed, key=len, default=None)

    def _num_cut(self, stop: str) -> int:
        return 0 if self._include_in_output else len(stop)


class _StopMatcher:
    """Knuth-Morris-Pratt search for one stop string, one character at a time.

    Invariant: the last num_matched characters pushed are the longest suffix of the text that is a
    prefix of the stop string.
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # _borders[i] is the length of the longest proper prefix of stop[: i + 1] that is also its
        # suffix. It is computed only as far as matches reach, so a long stop string costs nothing.
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
        """Extend a match of `length` by `character`, falling back to shorter matches."""
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        return length + 1 if self.stop[length] == character else 0
