"""What is written to a terminal, read back from a screen of our own."""

import io

import pytest

from quire.cli.chat.answers import Piece
from quire.cli.chat.terminal import DIM, PLAIN, AnswerWriter, Spinner


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def screen(written: str) -> str:
    """The lines that a terminal shows: only what the writer uses is known."""
    lines, column = [""], 0
    text = iter(written.replace(DIM, "").replace(PLAIN, ""))
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
