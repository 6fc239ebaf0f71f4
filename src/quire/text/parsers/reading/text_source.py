"""Text that arrives piece by piece, read as if it were all there.

A reader is a generator. Each `yield` in it waits for more text, so that what it reads does not
depend on how the text was cut. Knows nothing of messages. Used by all readers of this folder.
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
"""What a detokenizer writes at the end of a text for a character that is not whole."""

_SPACES = re.compile(r"[ \t\r\n]*")


class TextSource:
    """The text that was pushed and not yet read.

    Invariant: what was read, and what is unread, joined, are all that was pushed. What is unread
    when a reader waits is never longer than what that reader looks for, so that pushing costs time
    in proportion to what is pushed.
    """

    __slots__ = ("_kept", "at", "is_ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        """Add text behind what is unread."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def keep(self, already_read: Iterable[str] = ()) -> None:
        """From here on remember what is read, until `forget`."""
        self._kept = list(already_read)

    def forget(self) -> str:
        """What was read since `keep`; "" if nothing was remembered."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def unread(self, text: str) -> None:
        """Put back what was read last, which is not kept any more."""
        assert self._kept is None, "what is kept was read once"
        self.text = text + self.text[self.at :]
        self.at = 0

    def take_to(self, end: int) -> str:
        """Read up to a position in `text`."""
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
        """Read white space; return the character behind it, unread, or "" at the end."""
        while True:
            found = _SPACES.match(self.text, self.at)
            assert found is not None
            self.take_to(found.end())
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_ended:
                return ""
            yield

    def read_literal(self, literal: str) -> Reader[bool]:
        """Read `literal` if it comes next; else read nothing."""
        while not self.text.startswith(literal, self.at):
            if self.is_ended or not literal.startswith(self._next(len(literal))):
                return False
            yield
        self.take_to(self.at + len(literal))
        return True

    def next_literal(self, literals: Iterable[str]) -> Reader[str]:
        """The one of `literals` that comes next, unread; "" if none does."""
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
        """Whether all that is left at the end of the text is the beginning of one of `literals`,
        of which the end cut the rest off."""
        if not self.is_ended or self.at == len(self.text):
            return False
        rest = self.text[self.at :].removesuffix(CUT_CHARACTER)
        return any(literal.startswith(rest) for literal in literals)

    def _next(self, num_characters: int) -> str:
        return self.text[self.at : self.at + num_characters]

    def read_words(self, words: Iterable[str]) -> Reader[bool]:
        """Read words with any white space before each; False at the first that does not come."""
        for word in words:
            yield from self.skip_space()
            if not (yield from self.read_literal(word)):
                return False
        return True

    def read_match(self, pattern: re.Pattern[str], max_length: int) -> Reader[str]:
        """Read the longest text that `pattern` matches here, at most about `max_length`; or "".

        `pattern` must match every beginning of what it matches, as a repeated class does.
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
        return self.take_to(found.end()) if found.end() - self.at <= max_length else ""

    def read_until(self, markers: "Markers", sink: Sink) -> Reader[str]:
        """Give the text up to the first marker to `sink`, read the marker and return it.

        At the end: "", when all has been given. No more is held back than may be a marker's start.
        """
        while True:
            if self.at == 0 and self._kept is None and markers.are_absent(self.text):
                if self.text:  # as nearly all pieces are
                    sink(self.text)
                    self.text = ""
                if self.is_ended:
                    return ""
                yield
                continue
            found = markers.pattern.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    sink(self.take_to(found.start()))
                return self.take_to(found.end())
            end = len(self.text) if self.is_ended else markers.safe_end(self.text, self.at)
            if end > self.at:
                sink(self.take_to(end))
            if self.is_ended:
                return ""
            yield


class Markers:
    """Literals to look for together. None is the beginning of another."""

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
        self.are_absent = frozenset(literal[0] for literal in ordered).isdisjoint
        """Whether a text has not even the first character of a marker."""
        self._longest = max((len(start) for start in starts), default=0)

    def safe_end(self, text: str, begin: int) -> int:
        """Where in `text[begin:]` the longest end lies that may be the start of a marker."""
        begin = max(begin, len(text) - self._longest)
        if self._characters.isdisjoint(text[begin:]):
            return len(text)
        found = self._partial.search(text, begin)
        return len(text) if found is None else found.start()
