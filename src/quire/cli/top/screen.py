"""Makes the picture of `quire top`, a rich renderable of the terminal's height.

Pure: it depends on the watched server, the size and the choices alone. Drawn by `loop`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.cells import set_cell_size
from rich.color import Color
from rich.console import Group
from rich.style import Style
from rich.text import Text

from quire.cli.top.block_picture import CACHED, FREE, block_picture, owner_colour
from quire.cli.top.watched import WINDOW_S, WatchedEngine, WatchedServer
from quire.core.memory.memory_report import format_bytes

BARS = " ▁▂▃▄▅▆▇█"

LEDGER = (
    ("useful", (0, 158, 115)),
    ("unfilled", (240, 228, 66)),
    ("unused", (230, 159, 0)),
    ("reserved", (213, 94, 0)),
    ("in_flight", (86, 180, 233)),
    ("moving", (204, 121, 167)),
    ("cached", CACHED),
    ("free", FREE),
)
"""The parts of the pool's bytes (`core.memory.memory_report`), with their colours."""

_STATE_STYLES = {"decoding": "green", "prefilling": "cyan", "preempted": "red", "queued": "yellow"}
_STATES = tuple(_STATE_STYLES)

ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "state": lambda each: (_STATES.index(each["state"]), each["arrival_s"]),
    "age": lambda each: each["arrival_s"],
    "blocks": lambda each: -each["num_blocks"],
    "output": lambda each: -each["num_output_tokens"],
}
"""The orders of the table of requests."""


_GAP = "   "
_LATENCIES = (("first token", "time_to_first_token_s"), ("between tokens", "inter_token_s"))
_DIM, _BOLD = Style(dim=True), Style(bold=True)

MAX_MAP_LINES = 8
MIN_REQUEST_LINES = 6


@dataclass
class Choices:
    """The reader's choices, made by keys."""

    #: Name of an order in ORDERS.
    order: str = "state"
    #: Position of the engine that is shown, modulo their number.
    engine: int = 0
    is_paused: bool = False


@dataclass
class Page:
    """The place for a picture."""

    width: int
    #: Number of lines; None if the picture may have any number.
    height: int | None
    #: Whether colours are shown; without them there is no block map.
    has_colours: bool = True


def render(server: WatchedServer, url: str, choices: Choices, page: Page) -> Group:
    """The screen: as many lines as the page has, the last of them with the keys."""
    names, width = list(server.engines), page.width
    lines = [_title(server, url, choices)]
    lines += _models(server, width)
    if not names:
        return Group(*_padded([*lines, Text("no engine", _DIM)], page))
    engine = server.engines[names[choices.engine % len(names)]]
    # First the parts of fixed size.
    lines += _rates(server, engine, width)
    lines.append(_spark(engine, width))
    lines += _ledger(engine, width)
    if len(names) > 1:
        lines += _replicas(server, engine, width)
    if tiers := engine.memory.get("tiers", {}).get("by_tier"):
        lines += _tiers(tiers)
    # Then the block map, if enough lines are left for the requests.
    room = MAX_MAP_LINES
    if page.height is not None:
        room = min(room, page.height - len(lines) - 4 - MIN_REQUEST_LINES)
    if page.has_colours and room >= 1 and engine.blocks.num_blocks:
        map_lines, per_place = block_picture(engine.blocks, width, room)
        each = "one a square" if per_place == 1 else f"{per_place:,} a square"
        lines += [_heading(f"blocks: {engine.blocks.num_blocks:,}, {each}", width), *map_lines]
    # Last, the requests, as many as fit.
    room = len(engine.requests) + 3
    if page.height is not None:
        room = min(room, page.height - len(lines) - 1)
    lines += _requests(engine, choices, width, room)
    return Group(*_padded(lines, page))


def _title(server: WatchedServer, url: str, choices: Choices) -> Text:
    numbers = server.numbers
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"quire {numbers['version']}", _BOLD)
    line.append(f"  {numbers['model']}  {url}  ")
    line.append(numbers["state"], "green" if numbers["state"] == "ready" else "bold red")
    if numbers["is_draining"]:
        line.append("  draining", "bold yellow")
    if choices.is_paused:
        line.append("  paused", "bold yellow")
    return line


def _rates(server: WatchedServer, engine: WatchedEngine, width: int) -> list[Text]:
    """Tokens per second, steps, requests by state, and latencies, in as many lines as needed."""
    steps, stats = list(engine.recent_steps()), engine.stats
    pairs = []
    # First what the last steps did.
    span_s = max(WINDOW_S / 4, engine.now_s - steps[-1]["ended_s"]) if steps else WINDOW_S
    for title, name in (("output", "num_decode_tokens"), ("prompt", "num_prompt_tokens")):
        rate = sum(each[name] for each in steps) / span_s
        pairs.append(_pair(f"{title} tokens/s", f"{rate:,.0f}"))
    if steps:
        elapsed_s = sum(each["elapsed_s"] for each in steps)
        pairs.append(_pair("step", _seconds(elapsed_s / len(steps))))
        if floor_s := sum(each["floor_s"] for each in steps):
            share = floor_s / max(elapsed_s, 1e-9)
            pairs.append(_pair("of the machine's bound", f"{share:.0%}"))
    if drafts := sum(each["num_drafts"] for each in steps):
        accepted = sum(each["num_accepted_drafts"] for each in steps)
        pairs.append(_pair("drafts accepted", f"{accepted / drafts:.0%}"))
    # Then the requests, and what the engine has counted since it began.
    limit = engine.facts.get("max_num_seqs", "?")
    pairs.append(_pair("running", f"{stats.get('num_running', 0)} of {limit}"))
    pairs.append(_pair("waiting", f"{stats.get('num_waiting', 0)}"))
    pairs.append(_pair("preemptions", f"{stats.get('num_preemptions', 0):,}"))
    if queries := stats.get("num_query_tokens"):
        pairs.append(_pair("prompt tokens from cache", f"{stats['num_hit_tokens'] / queries:.0%}"))
    # Last, the latencies that clients see.
    for title, name in _LATENCIES:
        median, late = server.percentile(name, 0.5), server.percentile(name, 0.99)
        shown = "-" if median is None or late is None else f"{_seconds(median)}, {_seconds(late)}"
        pairs.append(_pair(f"{title} p50, p99", shown))
    ended = ", ".join(f"{count:,} {why}" for why, count in server.numbers["finished"].items())
    pairs.append(_pair("ended", ended or "none"))
    return _flow(pairs, width)


def _spark(engine: WatchedEngine, width: int) -> Text:
    """The tokens of the last steps, a bar each, on a logarithmic scale."""
    steps = list(islice(reversed(engine.steps), max(0, width - 8)))[::-1]
    line = Text("steps ", _DIM, no_wrap=True, overflow="crop")
    for each in steps:
        tokens = each["num_prompt_tokens"] + each["num_decode_tokens"]
        style = "cyan" if each["num_prompt_tokens"] else "green"
        if each["num_preemptions"]:
            style = "red"
        line.append(BARS[min(len(BARS) - 1, tokens.bit_length())], style)
    if not steps:
        line.append("none yet", _DIM)
    return line


def _ledger(engine: WatchedEngine, width: int) -> list[Text]:
    """The pool's bytes by use: a bar, and the sizes."""
    memory = engine.memory
    if not memory or not memory["total_bytes"]:
        return []
    bar, sizes = Text(no_wrap=True), []
    filled, below = 0, 0
    for name, rgb in LEDGER:
        if not (num_bytes := memory[f"{name}_bytes"]):
            continue
        below += num_bytes
        end = round(width * below / memory["total_bytes"])
        bar.append("█" * (end - filled), _colour(rgb))
        filled = end
        size = f"{name.replace('_', ' ')} {format_bytes(num_bytes)}"
        sizes.append(Text.assemble(("■ ", _colour(rgb)), size))
    if memory["saved_bytes"]:
        sizes.append(Text(f"saved by sharing {format_bytes(memory['saved_bytes'])}"))
    total = format_bytes(memory["total_bytes"])
    return [_heading(f"KV cache: {total}", width), bar, *_flow(sizes, width)]


def _replicas(server: WatchedServer, shown: WatchedEngine, width: int) -> list[Text]:
    line = Text(no_wrap=True, overflow="ellipsis")
    for name, each in server.engines.items():
        style = _BOLD if each is shown else _DIM
        running = each.stats.get("num_running", 0)
        line.append(f"{name}: {each.state}, {running} running   ", style)
    return [_heading("replicas", width), line]


def _models(server: WatchedServer, width: int) -> list[Text]:
    """The models of a server that has several, with their states and memory."""
    parts = []
    for each in server.numbers.get("models", ()):  # older servers have none
        style = _BOLD if each["name"] == server.numbers["model"] else _DIM
        size = f", {format_bytes(each['memory_bytes'])}" if each["memory_bytes"] else ""
        parts.append(Text(f"{each['name']}: {each['state']}{size}", style))
    return [_heading("models", width), *_flow(parts, width)] if parts else []


def _tiers(tiers: dict[str, dict[str, Any]]) -> list[Text]:
    line = Text("tiers  ", _DIM, no_wrap=True, overflow="ellipsis")
    for name, numbers in tiers.items():
        sizes = {
            key.removesuffix("_bytes").replace("_", " "): format_bytes(value)
            for key, value in numbers.items()
            if key.endswith("_bytes") and isinstance(value, int | float)
        }
        line.append(f"{name}: " + ", ".join(f"{what} {size}" for what, size in sizes.items()))
        line.append("   ")
    return [line]


_COLUMNS = (
    *(("state", 10), ("output", 8), ("prompt", 8), ("cached", 8), ("blocks", 7)),
    *(("age", 8), ("first", 8), ("tenant", 12)),
)
"""The table's columns: titles and widths. The identifier of the request follows them."""


def _requests(engine: WatchedEngine, choices: Choices, width: int, room: int) -> list[Text]:
    """The heading, the table's head, and a line for each request that fits in `room` lines."""
    requests = sorted(engine.requests, key=ORDERS[choices.order])
    lines = [_heading(f"requests: {len(requests):,}, by {choices.order}", width)]
    lines.append(
        _row(Text("  "), [(title, _DIM) for title, _ in _COLUMNS], ("request", _DIM), width)
    )
    if not requests:
        lines.append(Text("  none", _DIM))
    num_shown = room - 2 if len(requests) <= room - 2 else room - 3
    for each in requests[: max(0, num_shown)]:
        lines.append(_request(engine, each, width))
    if 0 <= num_shown < len(requests):
        lines.append(Text(f"  and {len(requests) - num_shown:,} more", _DIM))
    return lines[: max(0, room)]


def _request(engine: WatchedEngine, each: dict[str, Any], width: int) -> Text:
    first_s = each["first_token_s"]
    cells: list[tuple[str, str | Style]] = [
        (each["state"], _STATE_STYLES[each["state"]]),
        (f"{each['num_output_tokens']:,}", _BOLD),
        (f"{each['num_prompt_tokens']:,}", ""),
        (f"{each['num_cached_tokens']:,}", ""),
        (f"{each['num_blocks']:,}", ""),
        (_seconds(engine.now_s - each["arrival_s"]), ""),
        ("-" if first_s is None else _seconds(first_s - each["arrival_s"]), ""),
        (each["tenant"] or "-", ""),
    ]
    name = f"#{each['branch']} " * bool(each["branch"]) + each["request_id"]
    mark = Text.assemble(("■ ", _colour(owner_colour(each["slot"]))))
    return _row(mark, cells, (name, _DIM), width)


def _row(
    line: Text, cells: list[tuple[str, str | Style]], last: tuple[str, str | Style], width: int
) -> Text:
    """A line of the table: as many whole columns as fit, numbers at their right."""
    line.no_wrap, line.overflow = True, "crop"
    for (text, style), (title, size) in zip(cells, _COLUMNS, strict=True):
        if line.cell_len + size + 1 > width:
            return line
        is_text = title in ("state", "tenant")
        shown = set_cell_size(text, size) if is_text else f"{text:>{size}}"
        line.append(shown, style)
        line.append(" ")
    line.append(*last)
    return line


def _colour(rgb: tuple[int, int, int]) -> Style:
    return Style(color=Color.from_rgb(*rgb))


def _heading(title: str, width: int) -> Text:
    return Text(f"── {title} ".ljust(width, "─")[:width], _DIM, no_wrap=True)


def _padded(lines: Sequence[Text], page: Page) -> list[Text]:
    """The lines, then empty lines, and the keys in the last line. A server's names can't send
    commands to the terminal."""
    for line in lines:
        if not line.plain.isprintable():
            line.plain = "".join(each if each.isprintable() else "?" for each in line.plain)
    if page.height is None:
        return list(lines)
    keys = "q quit   space pause   s order   tab next replica"
    shown = list(lines[: page.height - 1])
    num_empty = page.height - 1 - len(shown)
    return [*shown, *[Text("")] * num_empty, Text(keys, _DIM, no_wrap=True)]


def _pair(title: str, value: str) -> Text:
    return Text.assemble((f"{title} ", _DIM), (value, _BOLD))


def _flow(parts: Iterable[Text], width: int) -> list[Text]:
    """The parts one after the other, in lines of at most `width` columns; a part is not broken."""
    lines = [Text(no_wrap=True, overflow="ellipsis")]
    for part in parts:
        if lines[-1] and lines[-1].cell_len + len(_GAP) + part.cell_len > width:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        elif lines[-1]:
            lines[-1].append(_GAP)
        lines[-1].append_text(part)
    return lines


def _seconds(seconds: float) -> str:
    """A duration with three digits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
