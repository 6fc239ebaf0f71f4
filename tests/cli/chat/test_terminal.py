"""What is written to a terminal, read back from a screen of our own."""

import io
import re

import pytest

from quire.cli.chat.terminal import AnswerWriter, Piece, Spinner

DIM, PLAIN, BOLD, CODE = "\x1b[2m", "\x1b[0m", "\x1b[1m", "\x1b[36m"


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def screen(written: str) -> str:
    """The lines that a terminal shows: only what the writer uses is known."""
    lines, column = [""], 0
    text = iter(re.sub(r"\x1b\[\d+m", "", written))
    for character in text:
        if character == "\n":
            lines.append("")
            column = 0
        elif character == "\b":
            column -= 1
        elif character == "\x1b":
            assert next(text) + next(text) == "[K"
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + character
            column += 1
    return "\n".join(lines)


def written(text: str, width: int, size: int) -> str:
    out = Terminal()
    writer = AnswerWriter(out, width)
    for first in range(0, len(text), size):
        writer.write(Piece(text[first : first + size]))
    writer.end()
    return screen(out.getvalue())


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two", "three four"]),
        ("one two  three", ["one two ", "three"]),
        ("1234567890 12", ["1234567890", "12"]),
        ("abcdefghijklmno pq", ["abcdefghij", "klmno pq"]),
        ("a\n\n  b", ["a", "", "  b"]),
        ("", [""]),
    ],
)
def test_words_stay_whole(text: str, lines: list[str], size: int) -> None:
    found = written(text, 11, size)
    assert [line.rstrip() for line in found.split("\n")] == [
        *(line.rstrip() for line in lines),
        "",
    ]


def test_a_character_of_two_columns_counts_twice() -> None:
    out = Terminal()
    AnswerWriter(out, 7).write(Piece("你好你好"))
    assert out.getvalue() == "你好你\n好"


def test_reasoning_is_dimmed() -> None:
    out = Terminal()
    writer = AnswerWriter(out, 80)
    for piece in (Piece("hm", True), Piece(" so", True), Piece("yes")):
        writer.write(piece)
    writer.end()
    assert out.getvalue() == f"{DIM}hm so{PLAIN}\n\nyes\n"


def shown(*texts: str, is_plain: bool = False, width: int = 80) -> str:
    out = Terminal()
    writer = AnswerWriter(out, width, is_plain=is_plain)
    for text in texts:
        writer.write(Piece(text))
    writer.end()
    return out.getvalue()


def test_markdown_is_shown_by_styles() -> None:
    assert shown("a **b** `c`\n# D\ne") == (f"a {BOLD}b{PLAIN} {CODE}c{PLAIN}\n{BOLD}D{PLAIN}\ne\n")
    assert shown("```py\nx = 1\n```\n") == f"{CODE}x = 1{PLAIN}\n\n"


def test_a_word_keeps_its_style_in_the_next_line() -> None:
    written = shown("one **two**", width=7)
    assert screen(written) == "one \ntwo\n"
    assert written.endswith(f"\ntwo{PLAIN}\n") and written.count(BOLD) == 1


def test_plain_answers_have_no_styles() -> None:
    text = "a **b** `c`\n# D\n```\ne\n```"
    assert shown(text, is_plain=True) == f"{text}\n"
    out = Terminal()
    writer = AnswerWriter(out, 80, is_plain=True)
    for piece in (Piece("hm", True), Piece("yes")):
        writer.write(piece)
    writer.end()
    assert out.getvalue() == "hm\n\nyes\n"


def test_a_pipe_gets_the_text_alone() -> None:
    out = io.StringIO()
    writer = AnswerWriter(out, 5)
    writer.write(Piece("hm", True))
    writer.write(Piece("one two three"))
    writer.end()
    Spinner(out).stop()
    assert out.getvalue() == "hmone two three\n"


def test_the_spinner_is_erased() -> None:
    out = Terminal()
    spinner = Spinner(out)
    spinner.stop()
    spinner.stop()
    assert out.getvalue().endswith("\r\x1b[K")
