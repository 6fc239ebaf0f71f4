"""Charts are SVG files with the titles, names and points that were given."""

from xml.etree import ElementTree

import pytest
from benchmarks.claims.chart import BLUE, RED, Axis, Line, Panel, draw_chart

SVG = "{http://www.w3.org/2000/svg}"


def texts(chart: str) -> set[str]:
    root = ElementTree.fromstring(chart)
    return {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}


def panel(*lines: Line) -> Panel:
    return Panel(Axis("time, s", ticks=(0, 4, 8)), Axis("size, B", is_log=True), lines)


def test_titles_axes_ticks_and_lines_are_named() -> None:
    lines = Line("a < b", [(0, 1), (8, 50)], BLUE), Line("two\nrows", [(0, 2), (8, 9)], RED)
    found = texts(draw_chart("A <title>", "and more", [panel(*lines)]))
    assert {"0", "4", "8", "time, s", "size, B", "a < b", "two rows"} <= found
    assert {"A <title>", "and more"} <= found


def test_the_same_numbers_give_the_same_file() -> None:
    line = Line("a", [(0, 1), (1, 3)], RED, is_dashed=True, is_step=True, has_marks=False)
    first, second = (draw_chart("t", "s", [panel(line), panel(line)]) for _ in range(2))
    assert first == second


def test_a_line_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="the line 'empty' has no points"):
        draw_chart("t", "s", [panel(Line("empty", [], BLUE))])
