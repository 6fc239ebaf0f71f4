"""Line charts as SVG: panels one below the other, each line labelled at its end.

No library: what a page of documentation needs of a chart is little, and a text file that is the
same for the same numbers can be compared. Colours are those of Okabe and Ito, which people with any
common colour blindness can tell apart; every line also carries its name. Knows no benchmark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 760
BLUE, GREEN, RED, ORANGE = "#0072B2", "#009E73", "#D55E00", "#B8860B"
GREY = "#7A7A7A"

_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 72, 168, 64, 64, 52
_INK, _SOFT, _GRID = "#222222", "#555555", "#E3E3E3"
_LINE_HEIGHT, _LABEL_GAP = 15, 5
_MOST_TICKS = 7
_MOST_LOG_TICKS = 7


@dataclass(frozen=True, slots=True)
class Axis:
    """title: with the unit. ticks: values that are named; None chooses. low, high: None follows the
    data (a linear axis then begins at 0)."""

    title: str
    is_log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """points: (x, y), by x. is_dashed: for a floor or a reference. is_step: y holds until the next
    x. has_marks: a dot on each point."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    is_dashed: bool = False
    is_step: bool = False
    has_marks: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. height: of the plot itself, in pixels."""

    x: Axis
    y: Axis
    lines: Sequence[Line]
    height: int = 280


@dataclass(slots=True)
class _Scale:
    """Maps an axis' values to pixels from..to."""

    axis: Axis
    values: Sequence[float]
    start: float
    stop: float
    low: float = field(init=False)
    high: float = field(init=False)

    def __post_init__(self) -> None:
        given = self.axis
        low, high = min(self.values), max(self.values)
        if given.is_log:
            margin = (high / low) ** 0.06 if high > low else 2.0
            self.low, self.high = low / margin, high * margin
        else:
            self.low = min(0.0, low)
            self.high = self.low + ((high - self.low) * 1.06 or 1.0)
        self.low = self.low if given.low is None else given.low
        self.high = self.high if given.high is None else given.high

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.axis.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.axis.ticks is not None:
            return [value for value in self.axis.ticks if self.low <= value <= self.high]
        return self._log_ticks() if self.axis.is_log else self._linear_ticks()

    def _linear_ticks(self) -> list[float]:
        span = self.high - self.low
        power: float = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
        step = next(power * by for by in (1, 2, 5, 10) if span / (power * by) <= _MOST_TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _log_ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [10.0**power * by for power in powers for by in steps]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) <= _MOST_LOG_TICKS:
                break
        return found


def draw_chart(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """A whole SVG file. Raises ValueError for a line without points."""
    top, parts = float(_TOP), []
    for panel in panels:
        parts += _panel(panel, top)
        top += panel.height + _GAP
    height = top - _GAP + _BOTTOM
    described = escape(f"{title}. {subtitle}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
            f' width="{WIDTH}" height="{height:g}" role="img" aria-label="{described}"'
            ' font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height:g}" fill="#FFFFFF"/>',
            _text(16, 26, title, size=16, weight="bold"),
            _text(16, 45, subtitle, colour=_SOFT),
            *parts,
            "</svg>",
            "",
        ]
    )


def short(value: float) -> str:
    """A tick's name, as 0.25, 30 or 4k."""
    if value >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:.12g}"


def _panel(panel: Panel, top: float) -> list[str]:
    for line in panel.lines:
        if not line.points:
            raise ValueError(f"the line {line.name!r} has no points")
    right, bottom = float(WIDTH - _RIGHT), top + panel.height
    pairs = [pair for line in panel.lines for pair in line.points]
    x = _Scale(panel.x, [pair[0] for pair in pairs], _LEFT, right)
    y = _Scale(panel.y, [pair[1] for pair in pairs], bottom, top)
    parts = []
    for value in y.ticks():
        at = y.place(value)
        parts.append(_rule(_LEFT, at, right, at))
        parts.append(_text(_LEFT - 8, at + 4, short(value), anchor="end", colour=_SOFT))
    for value in x.ticks():
        at = x.place(value)
        parts.append(_rule(at, bottom, at, bottom + 5, colour=_SOFT))
        parts.append(_text(at, bottom + 19, short(value), anchor="middle", colour=_SOFT))
    parts.append(_rule(_LEFT, bottom, right, bottom, colour=_SOFT))
    middle = (_LEFT + right) / 2
    parts.append(_text(middle, bottom + 38, panel.x.title, anchor="middle"))
    parts.append(_upright(18, (top + bottom) / 2, panel.y.title))
    for line in panel.lines:
        parts += _line(line, x, y)
    return parts + _labels(panel, x, y)


def _line(line: Line, x: _Scale, y: _Scale) -> list[str]:
    places = [(x.place(at), y.place(value)) for at, value in line.points]
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for at, value in places[1:]:
        path += f"H{at:.1f}V{value:.1f}" if line.is_step else f"L{at:.1f} {value:.1f}"
    dashes = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    parts = [f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>']
    if line.has_marks:
        parts += [
            f'<circle cx="{at:.1f}" cy="{value:.1f}" r="3" fill="{line.colour}"/>'
            for at, value in places
        ]
    return parts


def _labels(panel: Panel, x: _Scale, y: _Scale) -> list[str]:
    """Each line's name beside its last point, apart from the others."""
    texts = [line.name.split("\n") for line in panel.lines]
    wanted = [y.place(line.points[-1][1]) + 4 for line in panel.lines]
    tops = spread(wanted, [_LINE_HEIGHT * len(rows) + _LABEL_GAP for rows in texts])
    parts = []
    for line, rows, top in zip(panel.lines, texts, tops, strict=True):
        left = x.place(line.points[-1][0]) + 10
        parts += [
            _text(left, top + _LINE_HEIGHT * index, row, colour=line.colour, weight="bold")
            for index, row in enumerate(rows)
        ]
    return parts


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Tops for labels of these heights, none over another, as near to those wanted as possible.

    Labels that would overlap become a group, which lies where its members want to be on average
    (pool adjacent violators: the least sum of squares that keeps the order).
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[tuple[float, float, list[int]]] = []  # (top, height, members)
    for index in order:
        top, height, members = wanted[index], heights[index], [index]
        while groups and groups[-1][0] + groups[-1][1] > top:
            above_top, above_height, above = groups.pop()
            total = above_top * len(above) + (top - above_height) * len(members)
            top = total / (len(above) + len(members))
            height, members = above_height + height, above + members
        groups.append((top, height, members))
    tops = [0.0] * len(wanted)
    for top, _, members in groups:
        for index in members:
            tops[index] = top
            top += heights[index]
    return tops


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = _INK,
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
        f' font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )


def _upright(x: float, y: float, text: str) -> str:
    return (
        f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="middle"'
        f' fill="{_INK}">{escape(text)}</text>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str = _GRID) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        ' stroke-width="1"/>'
    )
