"""Charts: what is drawn where, and that names don't lie on each other."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from quire.bench.claims.svg_chart import BLUE, RED, Axis, Line, Panel, draw_chart, short, spread

SVG = "{http://www.w3.org/2000/svg}"


def draw(*lines: Line, x: Axis | None = None, y: Axis | None = None) -> ElementTree.Element:
    panel = Panel(x or Axis("time, s"), y or Axis("size, B"), lines, height=100)
    return ElementTree.fromstring(draw_chart("A <title>", "and more", [panel]))


def places(root: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter(f"{SVG}circle")]


def texts(root: ElementTree.Element) -> dict[str, tuple[float, float]]:
    return {
        str(text.text): (float(text.attrib["x"]), float(text.attrib["y"]))
        for text in root.iter(f"{SVG}text")
        if "x" in text.attrib
    }


def test_a_linear_axis_begins_at_zero_and_keeps_distances() -> None:
    dots = places(draw(Line("a", [(0, 0), (1, 10), (2, 20), (4, 40)], BLUE)))
    steps = [(right - left, down - up) for (left, down), (right, up) in pairwise(dots)]
    assert steps[0] == pytest.approx(steps[1], abs=0.2)
    assert steps[2] == pytest.approx((2 * steps[0][0], 2 * steps[0][1]), abs=0.3)
    assert dots[0][1] == max(y for _, y in dots)


def test_a_logarithmic_axis_keeps_ratios() -> None:
    line = Line("a", [(1, 1), (2, 10), (3, 100)], BLUE)
    (_, low), (_, middle), (_, high) = places(draw(line, y=Axis("B", is_log=True)))
    assert low - middle == pytest.approx(middle - high, abs=0.2)


def test_ticks_are_named_and_titles_escaped() -> None:
    root = draw(Line("a", [(0, 1), (8, 50)], BLUE), x=Axis("time, s", ticks=(0, 4, 8, 99)))
    found = texts(root)
    assert {"0", "4", "8", "A <title>", "and more", "a"} <= set(found) and "99" not in found
    assert root.attrib["aria-label"] == "A <title>. and more"


def test_names_of_lines_that_end_together_lie_below_each_other() -> None:
    lines = [Line(f"line {index}\nof five", [(0, 1), (1, 2)], BLUE) for index in range(5)]
    panel = Panel(Axis("x"), Axis("y"), lines, height=280)
    root = ElementTree.fromstring(draw_chart("t", "s", [panel]))
    rows = sorted(
        float(text.attrib["y"])
        for text in root.iter(f"{SVG}text")
        if re.match("line|of five", str(text.text))
    )
    assert len(rows) == 10
    assert all(below - above >= 14.9 for above, below in pairwise(rows))
    height = float(root.attrib["height"])
    assert rows[0] > 0 and rows[-1] < height


def test_steps_dashes_and_panels() -> None:
    line = Line("a", [(0, 1), (1, 3)], RED, is_dashed=True, is_step=True, has_marks=False)
    panel = Panel(Axis("x"), Axis("y"), [line])
    root = ElementTree.fromstring(draw_chart("t", "s", [panel, panel]))
    paths = [path.attrib for path in root.iter(f"{SVG}path")]
    assert len(paths) == 2 and places(root) == []
    assert all("H" in path["d"] and "stroke-dasharray" in path for path in paths)


def test_equal_values_and_no_values() -> None:
    draw(Line("flat", [(1, 0), (1, 0)], BLUE))
    with pytest.raises(ValueError, match="the line 'empty' has no points"):
        draw(Line("empty", [], BLUE))


def test_names_of_ticks() -> None:
    assert [short(value) for value in (0.25, 30, 4000, 0.1 + 0.2)] == ["0.25", "30", "4k", "0.3"]


def test_labels_are_moved_as_little_as_keeps_them_apart() -> None:
    assert spread([50.0, 10.0], [20.0, 20.0]) == [50.0, 10.0]
    assert spread([10.0, 20.0], [20.0, 20.0]) == pytest.approx([5.0, 25.0])
    assert spread([30.0, 30.0, 30.0], [10.0, 10.0, 10.0]) == pytest.approx([20.0, 30.0, 40.0])
    assert spread([], []) == []
