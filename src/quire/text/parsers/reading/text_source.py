"""Lets readers process text that arrives in pieces as if it were complete.

A reader is a generator. Each `yield` in it waits for more text, so its result does not depend on
how the text was split. Knows no messages. Used by all readers of this folder.
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
"""The character that a detokenizer writes at the end of a text for an incomplete character."""

_SPACES = re.compile(r"[ \t\r\n]*")


class TextSource:
    """The text that was pushed and not yet read.

    Invariant: the text read and the unread text together are the text pushed. While a reader waits,
    the unread text is never longer than the text that the reader looks for, so pushing takes time
    proportional to the text pushed.
    """

    __slots__ = ("_kept", "at", "is_ended", "text")

    def __init__(self) -> None:
        #: The unread text begins at `at`.
        self.text = ""
        self.at = 0
        #: Whether no more text will be pushed.
        self.is_ended = False
        #: The pieces read since `start_capture`; None if they are not kept.
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        """Append text to the unread text."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def start_capture(self, already_read: Iterable[str] = ()) -> None:
        """Keep the text that is read from here on, until `end_capture`."""
        self._kept = list(already_read)

    def end_capture(self) -> str:
        """Return the text read since `start_capture`, and stop keeping it; "" if none was kept."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def unread(self, text: str) -> None:
        """Put back the text that was read last. Not allowed while text is kept."""
        assert self._kept is None, "what is kept was read once"
        self.text = text + self.text[self.at :]
        self.at = 0

    def read_to(self, end: int) -> str:
        """Read up to the position `end` in `text`."""
        piece = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def next_character(self) -> Reader[str]:
        """The next character, unread; "" at the end."""
        while self.at >= len(self.text):
            if self.is_ended:
                return ""
            yield
        return self.text[self.at]

    def skip_space(self) -> Reader[str]:
        """Read white space; return the character after it, unread, or "" at the end."""
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
        """Read `literal` if it comes next; otherwise read nothing."""
        while not self.text.startswith(literal, self.at):
            if self.is_ended or not literal.startswith(self._next(len(literal))):
                return False
            yield
        self.read_to(self.at + len(literal))
        return True

    def next_literal(self, literals: Iterable[str]) -> Reader[str]:
        """The first of `literals` that comes next, unread; "" if none does."""
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
        """Whether the whole unread text, at the end, is the beginning of one of `literals`, whose
        rest was cut off."""
        if not self.is_ended or self.at == len(self.text):
            return False
        rest = self.text[self.at :].removesuffix(CUT_CHARACTER)
        return any(literal.startswith(rest) for literal in literals)

    def _next(self, num_characters: int) -> str:
        return self.text[self.at : self.at + num_characters]

    def read_words(self, words: Iterable[str]) -> Reader[bool]:
        """Read words with any white space before each. Returns False at the first missing word."""
        for word in words:
            yield from self.skip_space()
            if not (yield from self.read_literal(word)):
                return False
        return True

    def read_match(self, pattern: re.Pattern[str], max_length: int) -> Reader[str]:
        """Read the longest match of `pattern`, if it is at most `max_length` long; otherwise "".

        `pattern` must match each prefix of its matches, as a repeated class does.
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
        """Pass the text before the first marker to `sink`, read the marker and return it.

        At the end of the text, returns "". It holds back only text that may begin a marker.
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
                raise ValueError(f"the marker {first!r} is the beginning of {second!r}")
        self.pattern = re.compile("|".join(re.escape(literal) for literal in ordered) or r"(?!)")
        starts = {literal[:end] for literal in ordered for end in range(1, len(literal))}
        self._partial = re.compile(
            "(?:" + "|".join(re.escape(start) for start in sorted(starts)) + r")\Z"
            if starts
            else r"(?!)"
        )
        self._characters = frozenset(start[0] for start in starts)
        #: Whether a text lacks even the first characters of all markers.
        self.are_absent = frozenset(literal[0] for literal in ordered).isdisjoint
        self._longest = max((len(start) for start in starts), default=0)

    def safe_end(self, text: str, begin: int) -> int:
        """The end of the part of `text[begin:]` that can't be the beginning of a marker."""
        begin = max(begin, len(text) - self._longest)
        if self._characters.isdisjoint(text[begin:]):
            return len(text)
        found = self._partial.search(text, begin)
        return len(text) if found is None else found.start()
