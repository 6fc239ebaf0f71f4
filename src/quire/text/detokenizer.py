"""Turns generated tokens into text piece by piece; finds stop strings.

Both classes hold the state of one generated sequence; both are pure functions of what was pushed
into them, so replaying a sequence's tokens restores them. They know nothing of requests. Called by
the server's front and the offline API, one of each per generated sequence.
"""

import codecs
from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Turns generated tokens into text as they come, each character as soon as it is whole.

    Law: the prompt's text and all that `append` and `finish` return, joined, are the UTF-8 decoding
    of the bytes of all tokens, which is `Tokenizer.decode` of them (`TokenBytes` has the one
    exception, in malformed text). A character that the prompt began and the output completes
    belongs to the output; if the output does not complete it, it belongs to the prompt.

    How: each token has a fixed share of bytes, and an incremental UTF-8 decoder joins them. The
    usual way, decoding a window of tokens twice and emitting the difference unless it ends in
    U+FFFD (the prefix and read offsets of TGI and vLLM; tokenizers' DecodeStream is the same
    inside), has three flaws: the window grows with a run of bytes that never becomes a character,
    so its cost is quadratic and its text is withheld; a U+FFFD that the model really wrote is
    withheld as if it were cut; and the window's edge can lie inside a character. Here the decoder
    holds at most three bytes, and a token costs a table look-up.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        kept_special_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """kept_special_token_ids: these are never skipped."""
        self._tokenizer = tokenizer
        self._whole_text = tokenizer.whole_text
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = skipped - kept_special_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._last_bytes(prompt_token_ids)
        self._at_start = not tail
        self._decoder.decode(tail)
        self._prompt_is_cut = bool(self._decoder.getstate()[0])
        # Between two characters, with nothing pending: a token that is whole characters is its own
        # text, whatever came before. So it is with nearly all tokens, for the price of a look-up.
        self._is_between = not (self._at_start or self._prompt_is_cut)

    def append(self, token_id: int) -> str:
        """The text that is complete with this token; empty inside a character."""
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
        """The text still held back: U+FFFD for a character that remains cut, or nothing."""
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """`text` without the replacement of a character that the prompt left cut."""
        if self._prompt_is_cut and text:
            self._prompt_is_cut = False
            return text.removeprefix("\ufffd")
        return text

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The end of the prompt, enough to hold a whole character; empty if it has no text."""
        tail = b""
        for token_id in reversed(token_ids):
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
        return tail


class StopStrings:
    """Finds the stop string that ends a text, and holds back text only while it may be part of one.

    The text stops where a reader who takes it in character by character first sees any stop string
    complete; if several complete there, that which began first counts (of "b" and "ab": "ab").
    This depends on the text alone, never on how it was cut into tokens, and it never has to look
    further ahead than the stop string itself.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._matchers = [_StopMatcher(string) for string in stop]
        self._first_characters = frozenset(string[0] for string in stop)
        self._include_in_output = include_in_output
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take in more text; return what is safe to emit, and the stop string once it is complete.

        After a stop string nothing more may be pushed; text behind it is dropped.
        armed: False before min_tokens. Such text is emitted at once and is never part of a stop
            string, nor is any text before it.
        """
        assert not self._stopped, "text was pushed after the stop string"
        if not armed:
            emitted, self._held = self._held + text, ""
            for matcher in self._matchers:
                matcher.num_matched = 0
            return emitted, None
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None  # most tokens
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
        """The text that was held back; it ends without a stop string."""
        emitted, self._held = self._held, ""
        return emitted

    def _advance(self, character: str) -> str | None:
        """The longest stop string that `character` completes, if it completes one."""
        completed = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
        return max(completed, key=len, default=None)

    def _num_cut(self, stop: str) -> int:
        return 0 if self._include_in_output else len(stop)


class _StopMatcher:
    """Knuth, Morris and Pratt's search for one stop string, a character at a time.

    Invariant: the last num_matched characters pushed are the longest end of the text that begins
    the stop string. borders[i] is the length of the longest proper beginning of stop[: i + 1] that
    is also its end; it is worked out only as far as the text ever got, so that a very long stop
    string costs nothing.
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = [0]

    def advance(self, character: str) -> bool:
        """Take in the next character; True if it completes the stop string."""
        self.num_matched = self._longest_border(self.num_matched, character)
        num_known = len(self._borders)
        if num_known < self.num_matched:
            border = self._longest_border(self._borders[-1], self.stop[num_known])
            self._borders.append(border)
        return self.num_matched == len(self.stop)

    def _longest_border(self, length: int, character: str) -> int:
        """Extend a match of `length` by `character`, falling back to ever shorter matches."""
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        return length + 1 if self.stop[length] == character else 0
