"""Reads Markdown as it is generated, and yields text with its style.

It knows headings, lists, quotes, fenced code, bold and italic text, and code within a line. A mark
counts only with its counterpart in the same line, so `**kwargs` in a sentence stays as it is.
Until the counterpart comes, the text after a mark is held back. Independent of the terminal.
"""

import re
from collections.abc import Generator, Iterator
from enum import StrEnum
from typing import NamedTuple

MAX_HELD = 200
"""Most characters that wait for the counterpart of a mark."""


class Style(StrEnum):
    """How a text is shown; the value is what follows ESC in a terminal."""

    PLAIN = "[0m"
    BOLD = "[1m"
    ITALIC = "[3m"
    DIM = "[2m"
    CODE = "[36m"


class Span(NamedTuple):
    """Text of one style."""

    text: str
    style: Style = Style.PLAIN


_LINE_START = re.compile(r"[ \t]*(#{1,6} ?|[-*+] ?|\d{1,3}[.)]? ?|>|`{1,}[^`\n]*|~{1,}[^~\n]*)?")
"""The beginnings of lines that may become a mark. A line is held back while all of it matches."""
_HEADING = re.compile(r"#{1,6} +")
_BULLET = re.compile(r"([ \t]*)[-*+] +")
_NUMBER = re.compile(r"[ \t]*\d{1,3}[.)] +")
_QUOTE = re.compile(r"> ?")
_FENCE = re.compile(r"[ \t]*(?:(`{3,})[^`]*|(~{3,})[^~]*)")

_SPANS = (
    (re.compile(r"(`++)(.+?)(?<!`)\1(?!`)"), 2, Style.CODE),
    (re.compile(r"\*{3}(?=[^\s*])(.+?)(?<=[^\s*])\*{3}(?!\*)"), 1, Style.BOLD),
    (re.compile(r"\*\*(?=[^\s*])(.+?)(?<=\S)\*\*(?!\*)"), 1, Style.BOLD),
    (re.compile(r"__(?=[^\s_])(.+?)(?<=\S)__(?!\w)"), 1, Style.BOLD),
    (re.compile(r"\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)"), 1, Style.ITALIC),
    (re.compile(r"_(?=[^\s_])(.+?)(?<=[^\s_])_(?!\w)"), 1, Style.ITALIC),
)
"""(pattern, group of the text, style) of each kind of text between two marks."""
_OPENING = re.compile(r"`|\*{1,3}+(?=[^\s*])|_{1,2}+(?=[^\s_])")
_ESCAPED = re.compile(r"\\([\\`*_#>+.!\[\](){}~-])")
_MARKS = re.compile(r"[`*_\\]")


class MarkdownReader:
    """Reads the Markdown of one answer.

    Invariant: joined, the texts of all spans are the text that was pushed, without marks, except
    for what is held back in `_held`.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_at_line_start = True
        #: The mark that ends the fenced code; empty outside of it.
        self._fence = ""
        #: The style of the present line's text.
        self._line_style = Style.PLAIN
        #: The last character of the line that was yielded.
        self._before = ""

    def push(self, text: str) -> Iterator[Span]:
        """The spans that are complete with this text."""
        self._held += text
        yield from self._read(is_end=False)

    def finish(self) -> Iterator[Span]:
        """The spans of the text that was held back."""
        yield from self._read(is_end=True)

    def _read(self, *, is_end: bool) -> Iterator[Span]:
        while self._held:
            line, newline, rest = self._held.partition("\n")
            is_whole = bool(newline) or is_end
            if self._is_at_line_start and not is_whole and _LINE_START.fullmatch(line):
                return
            if self._is_at_line_start and is_whole and _is_fence(line, self._fence):
                self._fence = "" if self._fence else _fence_of(line)
                self._held = rest
                continue
            if self._fence:
                yield Span(line + newline, Style.CODE)
                self._held, self._is_at_line_start = rest, bool(newline)
                continue
            if self._is_at_line_start:
                yield from self._begin_line()
                line = self._held.partition("\n")[0]
            left = yield from self._inline(line, is_whole=is_whole)
            if not newline:
                self._held = left
                return
            yield Span("\n")
            self._held, self._is_at_line_start = rest, True

    def _begin_line(self) -> Iterator[Span]:
        """Read the mark at the line's beginning."""
        self._is_at_line_start, self._line_style, self._before = False, Style.PLAIN, ""
        line = self._held.partition("\n")[0]
        if mark := _HEADING.match(line):
            self._line_style = Style.BOLD
        elif mark := _BULLET.match(line):
            yield Span(f"{mark[1]}• ")
        elif mark := _NUMBER.match(line):
            yield Span(mark[0])
        elif mark := _QUOTE.match(line):
            self._line_style = Style.DIM
            yield Span("│ ", Style.DIM)
        if mark:
            self._held = self._held[mark.end() :]

    def _inline(self, line: str, *, is_whole: bool) -> Generator[Span, None, str]:
        """The spans of a line's text; returns the text that has to wait."""
        while line:
            mark = _MARKS.search(line)
            if mark is None:
                yield self._plain(line)
                return ""
            if mark.start():
                yield self._plain(line[: mark.start()])
                line = line[mark.start() :]
            if not is_whole and len(line) < MAX_HELD and self._may_match(line):
                return line
            if escaped := _ESCAPED.match(line):
                yield self._plain(escaped[1])
                line = line[escaped.end() :]
            elif found := self._span(line):
                end, span = found
                yield span
                self._before, line = line[end - 1], line[end:]
            else:
                run = _run(line)
                yield self._plain(run)
                line = line[len(run) :]
        return ""

    def _plain(self, text: str) -> Span:
        self._before = text[-1]
        return Span(text, self._line_style)

    def _span(self, line: str) -> tuple[int, Span] | None:
        """(end, span) of the marked text at the line's beginning; None if there is none."""
        for pattern, group, style in _SPANS:
            is_in_word = line[0] == "_" and self._before.isalnum()
            if not is_in_word and (match := pattern.match(line)):
                inner = match[group] if style is Style.CODE else _without_marks(match[group])
                return match.end(), Span(inner, style)
        return None

    def _may_match(self, line: str) -> bool:
        """Whether more text may complete the marked text at the line's beginning."""
        if _run(line) == line:  # the next character decides what the mark means
            return True
        if line[0] == "\\" or (line[0] == "_" and self._before.isalnum()):
            return False
        found = self._span(line)
        if found is not None:
            return found[0] == len(line)  # another mark may follow
        return _OPENING.match(line) is not None


def _run(line: str) -> str:
    """The equal characters at a line's beginning; of backslashes, one."""
    return line[0] if line[0] == "\\" else line[: len(line) - len(line.lstrip(line[0]))]


def _fence_of(line: str) -> str:
    """The mark of fenced code that a whole line consists of; empty if it is another line."""
    mark = _FENCE.fullmatch(line)
    return "" if mark is None else mark[1] or mark[2]


def _is_fence(line: str, fence: str) -> bool:
    """Whether a line begins fenced code, or ends the code that `fence` has begun."""
    found = _fence_of(line)
    return bool(found) and (not fence or (found.startswith(fence) and line.strip() == found))


def _without_marks(text: str) -> str:
    """The text within bold or italic text, without the marks of code and of other such text."""
    for pattern, group, _ in _SPANS:
        text = pattern.sub(rf"\{group}", text)
    return text
