"""Writes answers to the terminal: whole words, Markdown's styles, dimmed reasoning; a spinner."""

import shutil
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple, TextIO
from unicodedata import east_asian_width

from quire.cli.chat.markdown import MarkdownReader, Span, Style

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME_S = 0.1
ERASE_LINE = "\r\x1b[K"


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    #: Whether the text is part of the reasoning before the answer.
    is_reasoning: bool = False


class AnswerWriter:
    """Writes the pieces of one answer.

    On a terminal, a word that would be broken at the last column is moved to the next line, and
    Markdown is shown by styles. Elsewhere, or if `is_plain`, the text is written as it comes.

    Invariant: on a terminal, `_word` are the characters since the line's last space, with their
    styles.
    """

    def __init__(
        self, out: TextIO | None = None, width: int | None = None, *, is_plain: bool = False
    ) -> None:
        """out: None means standard output. width: columns; None means those of the terminal."""
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._has_styles = self._is_terminal and not is_plain
        # The last column stays empty: a cursor after it goes back differently on each terminal.
        self._width = (width or shutil.get_terminal_size().columns) - 1
        self._is_reasoning = False
        self._markdown = MarkdownReader()
        self._style = Style.PLAIN  # of the character that was written last
        self._column = 0
        self._word: list[tuple[str, Style]] = []

    def write(self, piece: Piece) -> None:
        """Write a piece."""
        text = piece.text
        if self._is_terminal:
            text = self._turned(piece.is_reasoning) + "".join(self._shown(piece))
        self._out.write(text)
        self._out.flush()

    def end(self) -> None:
        """End the answer's last line."""
        rest = "".join(map(self._spread, self._markdown.finish())) if self._has_styles else ""
        self._out.write(rest + self._styled(Style.PLAIN) + "\n")
        self._out.flush()

    def _turned(self, is_reasoning: bool) -> str:
        """The text that is written where reasoning begins or ends."""
        if is_reasoning == self._is_reasoning:
            return ""
        self._is_reasoning = is_reasoning
        self._column, self._word = 0, []
        return "" if is_reasoning else f"{self._styled(Style.PLAIN)}\n\n"

    def _shown(self, piece: Piece) -> Iterator[str]:
        """The text that is written for a piece, with its styles."""
        if not self._has_styles:
            yield self._spread(Span(piece.text))
        elif piece.is_reasoning:
            yield self._spread(Span(piece.text, Style.DIM))
        else:
            yield from map(self._spread, self._markdown.push(piece.text))

    def _spread(self, span: Span) -> str:
        """The text of a span over the lines of the terminal."""
        return "".join(self._placed(character, span.style) for character in span.text)

    def _styled(self, style: Style) -> str:
        """The codes that change the style of what is written next."""
        if style is self._style:
            return ""
        before, self._style = self._style, style
        reset = "" if before is Style.PLAIN else f"\x1b{Style.PLAIN}"
        return reset if style is Style.PLAIN else f"{reset}\x1b{style}"

    def _placed(self, character: str, style: Style) -> str:
        """The text that is written for a character, with a line break before it if needed."""
        if character == "\n":
            self._column, self._word = 0, []
            return self._styled(Style.PLAIN) + character
        before, columns = "", _columns(character)
        if self._column + columns > self._width:
            moved = sum(_columns(each) for each, _ in self._word)
            if character.isspace() or not moved or moved + columns > self._width:
                before, self._column = "\n", 0  # a word that fills a line is broken
            else:
                word = "".join(self._styled(each_style) + each for each, each_style in self._word)
                before, self._column = "\b" * moved + f"\x1b[K\n{word}", moved
            if character.isspace():
                self._word = []
                return before
        self._column += columns
        self._word = [] if character.isspace() else [*self._word, (character, style)]
        return before + self._styled(style) + character


def _columns(text: str) -> int:
    """The columns that a text takes; a character of East Asia takes two."""
    return sum(1 + (east_asian_width(character) in "WF") for character in text)


class Spinner:
    """Shows that work is under way, until `stop`. Writes nothing if this is no terminal."""

    def __init__(self, out: TextIO | None = None, text: str = "") -> None:
        """out: None means standard output. text: what is done, in words."""
        self._out = out or sys.stdout
        self._text = text
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if self._out.isatty():
            self._thread = threading.Thread(target=self._turn, name="quire-spinner", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Erase it. Further calls have no effect."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._out.write(ERASE_LINE)
            self._out.flush()

    def _turn(self) -> None:
        at = 0
        while not self._stopped.wait(FRAME_S):
            self._out.write(f"\r{FRAMES[at % len(FRAMES)]} {self._text}")
            self._out.flush()
            at += 1
