"""Plots the memory benchmark's results. Needs matplotlib, an extra.

Colours are those of Okabe and Ito, which people with any common colour blindness can tell apart;
each part of a bar is also named in the legend in the order of the bars, and carries its figure.
"""

from pathlib import Path
from typing import Any

from benchmarks.memory.meter import PARTS
from benchmarks.memory.results import MemoryResults, setting_lines
from benchmarks.memory.sharing import BEAMS, PARALLEL
from quire.errors import ConfigurationError

_NAMES = {
    "contiguous_max": "contiguous,\nmax length",
    "contiguous_pow2": "contiguous,\npower of two",
    "contiguous_oracle": "contiguous,\ntrue length",
    "paged": "paged",
}
_PART_NAMES = {
    "useful": "useful tokens",
    "reserved": "reserved for later",
    "unfilled": "unfilled last blocks",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
    "cached": "cached prefixes",
    "free": "free",
}
_COLOURS = {
    "useful": "#009E73",
    "reserved": "#56B4E9",
    "unfilled": "#0072B2",
    "internal": "#D55E00",
    "external": "#E69F00",
    "cached": "#CC79A7",
    "free": "#E4E4E4",
}
_LIGHT_TEXT = ("useful", "unfilled", "internal")
_BAR, _LIGHT_BAR, _TEXT = "#0072B2", "#A6CEE3", "#222222"
_NARROWEST_LABEL = 0.035
# White around black, so that it shows on any bar.
_PUBLISHED_MARK: dict[str, Any] = {
    "marker": "D",
    "markersize": 6,
    "markerfacecolor": "white",
    "markeredgecolor": "#222222",
}


def check_matplotlib() -> None:
    """Raises ConfigurationError where it is not installed."""
    try:
        import matplotlib  # noqa: F401  # an extra
    except ImportError as error:
        raise ConfigurationError(
            "a plot needs matplotlib, which is not installed; run `pip install matplotlib`"
        ) from error


def draw(results: MemoryResults, path: Path) -> None:
    """Write a PNG. Raises ConfigurationError where that is not possible."""
    check_matplotlib()
    from matplotlib.figure import Figure  # an extra, and slow to load

    num_rows = bool(results.allocators) + bool(results.sharing or results.allocators)
    figure = Figure(figsize=(12, 4 * num_rows), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    figure.suptitle("\n".join(setting_lines(results.setting)), fontsize=10, color=_TEXT)
    grid = figure.add_gridspec(num_rows, 3)
    if results.allocators:
        _draw_shares(figure.add_subplot(grid[0, :]), results)
        _draw_running(figure.add_subplot(grid[1, 0]), results)
        _draw_throughput(figure.add_subplot(grid[1, 1]), results)
    if results.sharing:
        place = grid[1, 2] if results.allocators else grid[0, :]
        _draw_sharing(figure.add_subplot(place), results)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigurationError(
            f"the plot can't be written to {str(path)!r} ({error.strerror})"
        ) from error


def _draw_shares(axes: Any, results: MemoryResults) -> None:
    names = list(results.allocators)
    left = dict.fromkeys(names, 0.0)
    for part in PARTS:
        shares = {name: outcome.use.shares[part] for name, outcome in results.allocators.items()}
        axes.barh(
            [_NAMES[name] for name in names],
            list(shares.values()),
            left=list(left.values()),
            color=_COLOURS[part],
            edgecolor="white",
            label=_PART_NAMES[part],
        )
        for row, (name, share) in enumerate(shares.items()):
            if share >= _NARROWEST_LABEL:
                colour = "white" if part in _LIGHT_TEXT else _TEXT
                middle = left[name] + share / 2
                axes.text(middle, row, f"{share:.0%}", ha="center", va="center", color=colour)
            left[name] += share
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.set_title("What the slots of the KV cache hold, averaged over time", loc="left")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=len(PARTS),
        fontsize=9,
        columnspacing=1.4,
        handlelength=1.0,
        frameon=False,
    )
    _tidy(axes)
    axes.xaxis.set_visible(False)


def _draw_running(axes: Any, results: MemoryResults) -> None:
    values = {name: outcome.use.mean_running for name, outcome in results.allocators.items()}
    published = results.published_running
    _draw_bars(axes, values, ".1f", published)
    title = "Requests running at once"
    axes.set_title(f"{title} (◇ published)" if published else title, loc="left")


def _draw_throughput(axes: Any, results: MemoryResults) -> None:
    values = {name: outcome.use.output_tokens_per_s for name, outcome in results.allocators.items()}
    _draw_bars(axes, values, ".0f", {})
    axes.set_title("Output tokens per second", loc="left")


def _draw_bars(axes: Any, values: dict[str, float], form: str, published: dict[str, float]) -> None:
    axes.barh([_NAMES[name] for name in values], list(values.values()), color=_BAR, height=0.6)
    ends = {name: max(value, published.get(name, 0.0)) for name, value in values.items()}
    largest = max(ends.values())
    for row, (name, value) in enumerate(values.items()):
        axes.text(ends[name] + largest * 0.05, row, format(value, form), va="center", color=_TEXT)
        if name in published:
            axes.plot(published[name], row, **_PUBLISHED_MARK)
    axes.set_xlim(0, largest * 1.25)
    axes.invert_yaxis()
    _tidy(axes)
    axes.xaxis.set_visible(False)


def _draw_sharing(axes: Any, results: MemoryResults) -> None:
    widths = sorted({case.width for case in results.sharing})
    kinds = {PARALLEL: ("parallel samples", _LIGHT_BAR), BEAMS: ("beams", _BAR)}
    for index, (kind, (name, colour)) in enumerate(kinds.items()):
        shares = {case.width: case.share for case in results.sharing if case.kind == kind}
        for width, share in shares.items():
            at = widths.index(width) + (index - 0.5) * 0.4
            axes.bar(at, share, width=0.38, color=colour, label=name if width == widths[0] else "")
            published = results.published_saved.get((kind, width))
            if published is not None:
                axes.plot(at, published, **_PUBLISHED_MARK)
            top = max(share, published or 0.0) + 0.03
            axes.text(at, top, f"{share:.0%}", ha="center", color=_TEXT)
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_xlim(-0.5, len(widths) - 0.5)
    axes.set_xlabel("branches of a request")
    title = "KV blocks saved"
    axes.set_title(f"{title} (◇ published)" if results.published_saved else title, loc="left")
    axes.set_ylim(0, 0.95)
    axes.legend(frameon=False, loc="upper left")
    _tidy(axes)
    axes.yaxis.set_visible(False)


def _tidy(axes: Any) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
