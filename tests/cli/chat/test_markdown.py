"""Markdown while it is generated: its styles, and that its pieces do not matter."""

import random

import pytest

from quire.cli.chat.markdown import MAX_HELD, MarkdownReader, Span, Style

BOLD, ITALIC, CODE, DIM = Style.BOLD, Style.ITALIC, Style.CODE, Style.DIM


def read(*pieces: str) -> list[Span]:
    """The spans, of which neighbours of one style are joined."""
    reader = MarkdownReader()
    found = [span for piece in pieces for span in reader.push(piece)]
    joined: list[Span] = []
    for span in [*found, *reader.finish()]:
        if joined and joined[-1].style is span.style:
            joined[-1] = Span(joined[-1].text + span.text, span.style)
        else:
            joined.append(span)
    return joined


CASES = [
    ("plain text.", [Span("plain text.")]),
    ("a **b** c", [Span("a "), Span("b", BOLD), Span(" c")]),
    ("**b**", [Span("b", BOLD)]),
    ("__b__ ***c***", [Span("b", BOLD), Span(" "), Span("c", BOLD)]),
    ("*i* and _j_", [Span("i", ITALIC), Span(" and "), Span("j", ITALIC)]),
    ("`a*b*` ``c`d``", [Span("a*b*", CODE), Span(" "), Span("c`d", CODE)]),
    ("**see `x` now**", [Span("see x now", BOLD)]),
    ("# Title\ntext", [Span("Title", BOLD), Span("\ntext")]),
    ("#hashtag", [Span("#hashtag")]),
    ("- one\n  * two\n+ three", [Span("• one\n  • two\n• three")]),
    ("1. one\n12) two", [Span("1. one\n12) two")]),
    ("> said", [Span("│ said", DIM)]),
    ("```py\nx = **1**\n\n# c\n```\nend", [Span("x = **1**\n\n# c\n", CODE), Span("end")]),
    ("~~~\n```\n~~~\n", [Span("```\n", CODE)]),
    ("```\nunclosed", [Span("unclosed", CODE)]),
    # Characters that only look like a mark stay.
    ("f(*args, **kwargs)", [Span("f(*args, **kwargs)")]),
    ("2 * 3 * 4", [Span("2 * 3 * 4")]),
    ("snake_case_name", [Span("snake_case_name")]),
    ("a ` b", [Span("a ` b")]),
    ("**never\nclosed**", [Span("**never\nclosed**")]),
    (r"\*a\* \x", [Span(r"*a* \x")]),
    ("-5 degrees\n--flag", [Span("-5 degrees\n--flag")]),
    ("", []),
    ("*", [Span("*")]),
]


@pytest.mark.parametrize(("text", "spans"), CASES)
def test_marks_become_styles(text: str, spans: list[Span]) -> None:
    assert read(text) == spans
    assert read(*text) == spans


def test_the_pieces_do_not_matter() -> None:
    chance = random.Random(1)
    for _ in range(300):
        text = "".join(
            chance.choices(["a", " ", "*", "**", "_", "`", "```", "\n", "#", "- "], k=14)
        )
        cut = chance.randrange(len(text))
        assert read(text) == read(text[:cut], text[cut:]) == read(*text), text


def test_text_comes_at_once_where_no_mark_is_open() -> None:
    reader = MarkdownReader()
    assert [span.text for span in reader.push("Hello ")] == ["Hello "]
    assert not list(reader.push("**wor"))
    assert list(reader.push("ld** ")) == [Span("world", BOLD), Span(" ")]


def test_a_mark_without_an_end_holds_only_so_much_back() -> None:
    reader = MarkdownReader()
    text = "*" + "a" * (MAX_HELD + 5)
    assert "".join(span.text for span in reader.push(text)) == text
