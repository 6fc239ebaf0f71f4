"""Provides streamed text to parsers, which read it as if it were complete.

A reader is a parser written as a generator. Each `yield` waits for more text, so the result does
not depend on how the text was split. Used by all readers in this folder.
"""

import re
from collections.abc import Callable, Generator, Iterable
from itertools import pairwise
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reader: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], None]

SPACE = " \t\r\n"
CUT_CHARACTER = "\ufffd"
"""U+FFFD, which a detokenizer writes if a text ends inside a character."""

_SPACES = re.compile(r"[ \t\r\n]*")


class TextSource:
    """Holds the text that has been pushed and not yet read.

    Invariant: the text read so far plus the unread text equals the text pushed. While a reader
    waits, the unread text is at most as long as the mark that the reader looks for, so `push` takes
    time proportional to the new text.
    """

    __slots__ = ("_kept", "at", "is_ended", "text")

    def __init__(self) -> None:
        #: The unread text is `text[at:]`.
        self.text = ""
        self.at = 0
        #: True if no more text will be pushed.
        self.is_ended = False
        #: The pieces read since `start_capture`; None outside of a capture.
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        """Append text to the unread text."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def start_capture(self, already_read: Iterable[str] = ()) -> None:
        """Begin a capture: keep the text that is read until `end_capture`, after the pieces
        `already_read`."""
        self._kept = list(already_read)

    def end_capture(self) -> str:
        """End a capture and return its text; "" outside of a capture."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def unread(self, text: str) -> None:
        """Put back the text that was read last. Not allowed during a capture."""
        assert self._kept is None, "unread() was called during a capture"
        self.text = text + self.text[self.at :]
        self.at = 0

    def read_to(self, end: int) -> str:
        """Read up to the position `end` in `text`; returns the text read."""
        piece = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def next_character(self) -> Reader[str]:
        """Returns the next character without reading it; "" at the end."""
        while self.at >= len(self.text):
            if self.is_ended:
                return ""
            yield
        return self.text[self.at]

    def skip_space(self) -> Reader[str]:
        """Read white space. Returns the next character without reading it; "" at the end."""
        while True:
            found = _SPACES.match(self.text, self.at)
            assert found is not None
            self.read_to(found.end())
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_ended:
                return ""
            yield

    def read_literal(self, literal: str) -> Reader[bool]:
        """Read `literal` if it comes next. Returns False, and reads nothing, if it does not."""
        while not self.text.startswith(literal, self.at):
            if self.is_ended or not literal.startswith(self._next(len(literal))):
                return False
            yield
        self.read_to(self.at + len(literal))
        return True

    def next_literal(self, literals: Iterable[str]) -> Reader[str]:
        """Returns the first of `literals` that comes next, without reading it; "" if none does."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    return literal
            if self.is_ended or not any(
                literal.startswith(self._next(len(literal))) for literal in literals
            ):
                return ""
            yield

    def ends_inside(self, literals: Iterable[str]) -> bool:
        """True if the text has ended and the unread text is an incomplete beginning of one of
        `literals`."""
        if not self.is_ended or self.at == len(self.text):
            return False
        rest = self.text[self.at :].removesuffix(CUT_CHARACTER)
        return any(literal.startswith(rest) for literal in literals)

    def _next(self, num_characters: int) -> str:
        return self.text[self.at : self.at + num_characters]

    def read_words(self, words: Iterable[str]) -> Reader[bool]:
        """Read the words, with any white space before each. Stops and returns False at a missing
        word."""
        for word in words:
            yield from self.skip_space()
            if not (yield from self.read_literal(word)):
                return False
        return True

    def read_match(self, pattern: re.Pattern[str], max_length: int) -> Reader[str]:
        """Read and return the longest match of `pattern`; "" if there is none or it is longer than
        `max_length`.

        `pattern` must also match each prefix of a match, as a repeated character class does.
        """
        while True:
            yield from self.next_character()
            found = pattern.match(self.text, self.at)
            if found is None:
                return ""
            is_open = found.end() == len(self.text) and not self.is_ended
            if not is_open or found.end() - self.at > max_length:
                break
            yield
        return self.read_to(found.end()) if found.end() - self.at <= max_length else ""

    def read_until(self, markers: "Markers", sink: Sink) -> Reader[str]:
        """Pass the text before the next marker to `sink`, read the marker and return it.

        Returns "" if the text ends without a marker. Text is held back only while it may begin a
        marker.
        """
        while True:
            if self.at == 0 and self._kept is None and markers.are_absent(self.text):
                if self.text:  # true for nearly all pieces
                    sink(self.text)
                    self.text = ""
                if self.is_ended:
                    return ""
                yield
                continue
            found = markers.pattern.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    sink(self.read_to(found.start()))
                return self.read_to(found.end())
            end = len(self.text) if self.is_ended else markers.safe_end(self.text, self.at)
            if end > self.at:
                sink(self.read_to(end))
            if self.is_ended:
                return ""
            yield


class Markers:
    """Literals to search for together. No literal may be a prefix of another."""

    __slots__ = ("_characters", "_longest", "_partial", "are_absent", "pattern")

    def __init__(self, literals: Iterable[str]) -> None:
        ordered = sorted(set(literals))
        for first, second in pairwise(ordered):
            if second.startswith(first):
                raise ValueError(f"the mark {first!r} is the beginning of {second!r}")
        self.pattern = re.compile("|".join(re.escape(literal) for literal in ordered) or r"(?!)")
        starts = {literal[:end] for literal in ordered for end in range(1, len(literal))}
        self._partial = re.compile(
            "(?:" + "|".join(re.escape(start) for start in sorted(starts)) + r")\Z"
            if starts
            else r"(?!)"
        )
        self._characters = frozenset(start[0] for start in starts)
        #: Function of a text; True if the text contains no marker's first character.
        self.are_absent = frozenset(literal[0] for literal in ordered).isdisjoint
        self._longest = max((len(start) for start in starts), default=0)

    def safe_end(self, text: str, begin: int) -> int:
        """The position up to which `text[begin:]` can't be part of a marker that is still
        incomplete."""
        begin = max(begin, len(text) - self._longest)
        if self._characters.isdisjoint(text[begin:]):
            return len(text)
        found = self._partial.search(text, begin)
        return len(text) if found is None else found.start()
