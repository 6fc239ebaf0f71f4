"""Writes answers to the terminal: whole words in each line, dimmed reasoning, and a spinner."""

import shutil
import sys
import threading
from typing import TextIO
from unicodedata import east_asian_width

from quire.cli.chat.answers import Piece

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME_S = 0.1
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
ERASE_LINE = "\r\x1b[K"


class AnswerWriter:
    """Writes the pieces of one answer.

    On a terminal, a word that would be broken at the last column is moved to the next line.
    Elsewhere the text is written as it comes.

    Invariant: on a terminal, `_word` are the characters since the line's last space.
    """

    def __init__(self, out: TextIO | None = None, width: int | None = None) -> None:
        """out: None means standard output. width: columns; None means those of the terminal."""
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        # The last column stays empty: a cursor behind it goes back differently on each terminal.
        self._width = (width or shutil.get_terminal_size().columns) - 1
        self._is_dim = False
        self._column = 0
        self._word = ""

    def write(self, piece: Piece) -> None:
        """Write a piece."""
        text = piece.text
        if self._is_terminal:
            text = self._marks(piece.is_reasoning) + "".join(map(self._placed, text))
        self._out.write(text)
        self._out.flush()

    def end(self) -> None:
        """End the answer's last line."""
        self._out.write(PLAIN + "\n" if self._is_dim else "\n")
        self._out.flush()

    def _marks(self, is_reasoning: bool) -> str:
        """The text that is written where reasoning begins or ends."""
        if is_reasoning == self._is_dim:
            return ""
        self._is_dim = is_reasoning
        self._column, self._word = 0, ""
        return DIM if is_reasoning else f"{PLAIN}\n\n"

    def _placed(self, character: str) -> str:
        """The text that is written for a character, with a line break before it if needed."""
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        before, columns = "", _columns(character)
        if self._column + columns > self._width:
            moved = _columns(self._word)
            if character.isspace() or not moved or moved + columns > self._width:
                before, self._column = "\n", 0  # a word that fills a line is broken
            else:
                before, self._column = "\b" * moved + f"\x1b[K\n{self._word}", moved
            if character.isspace():
                self._word = ""
                return before
        self._column += columns
        self._word = "" if character.isspace() else self._word + character
        return before + character


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
