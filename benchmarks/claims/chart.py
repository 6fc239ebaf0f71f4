"""Line charts as SVG files, by matplotlib: panels one below the other, with shared settings.

Colours are those of Okabe and Ito, which people with any common colour blindness can tell apart;
the legend has the lines' names as well. Knows no benchmark.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

BLUE, GREEN, RED, ORANGE = "#0072B2", "#009E73", "#D55E00", "#B8860B"
GREY = "#7A7A7A"

_WIDTH_PIXELS, _HEAD_PIXELS, _AXIS_PIXELS, _DPI = 760, 64, 64, 72

#: A fixed salt and no date: the same numbers give the same file.
_REPRODUCIBLE = {"svg.hashsalt": "quire", "svg.fonttype": "none"}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a panel. Without `low` a linear axis begins at 0."""

    #: Name and unit.
    title: str
    is_log: bool = False
    #: Bounds of the axis; None takes that of the data.
    low: float | None = None
    high: float | None = None
    #: Values that are marked; None leaves them to matplotlib.
    ticks: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel."""

    name: str
    #: Pairs (x, y), sorted by x.
    points: Sequence[tuple[float, float]]
    colour: str
    #: Floors and references are dashed.
    is_dashed: bool = False
    #: y holds until the next x.
    is_step: bool = False
    #: Each point has a dot.
    has_marks: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes and its lines."""

    x: Axis
    y: Axis
    lines: Sequence[Line]
    #: Height of the plotted area, in pixels.
    height: int = 280


def draw_chart(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """A whole SVG file.

    Raises ValueError for a line without points.
    """
    import matplotlib  # an extra, which --help does without
    from matplotlib.figure import Figure

    height = _HEAD_PIXELS + sum(panel.height + _AXIS_PIXELS for panel in panels)
    with matplotlib.rc_context(_REPRODUCIBLE):
        figure = Figure((_WIDTH_PIXELS / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
        figure.suptitle(f"{title}\n{subtitle}")
        ratios = [panel.height for panel in panels]
        grid = figure.subplots(len(panels), squeeze=False, height_ratios=ratios)
        for panel, axes in zip(panels, grid[:, 0], strict=True):
            _draw_panel(panel, axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": f"{title}. {subtitle}"})
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def _draw_panel(panel: Panel, axes: "matplotlib.axes.Axes") -> None:  # noqa: F821
    for line in panel.lines:
        if not line.points:
            raise ValueError(f"the line {line.name!r} has no points")
        axes.plot(
            *zip(*line.points, strict=True),
            label=line.name.replace("\n", " "),
            color=line.colour,
            linestyle="--" if line.is_dashed else "-",
            drawstyle="steps-post" if line.is_step else "default",
            marker="o" if line.has_marks else "",
            markersize=4,
        )
    for axis, place in ((panel.x, axes.xaxis), (panel.y, axes.yaxis)):
        name = place.axis_name
        axes.set(**{f"{name}label": axis.title, f"{name}scale": "log" if axis.is_log else "linear"})
        if not axis.is_log and axis.low is None:
            axes.set(**{f"{name}lim": (0, None)})
        if (axis.low, axis.high) != (None, None):
            axes.set(**{f"{name}lim": (axis.low, axis.high)})
        if axis.ticks is not None:
            place.set_ticks(axis.ticks, [f"{tick:g}" for tick in axis.ticks])
    axes.grid(axis="y", color="#E3E3E3")
    axes.legend(frameon=False)
