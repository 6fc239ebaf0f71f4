"""Draws the block map in a terminal: two blocks in each character, one above the other.

A block has the colour of the request that owns it, cached contents are grey, and free blocks are
dark. Where blocks outnumber the places, a place stands for several neighbours. Used by `screen`.
"""

from collections import Counter
from collections.abc import Iterator

from rich.color import Color
from rich.style import Style
from rich.text import Text

from quire.cli.top.watched import RECORD_BYTES, WatchedBlocks

OWNERS = (
    *((0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0)),
    *((86, 180, 233), (204, 121, 167), (240, 228, 66), (148, 103, 189)),
)
"""Okabe and Ito's colours (Color Universal Design, 2008), which differ for readers with any colour
vision, as red, green and blue; the page in the browser has them too."""

FREE, CACHED, HELD = (48, 52, 58), (128, 132, 140), (176, 184, 194)
"""Colours of free blocks, of cached contents, and of held blocks whose owner has no slot."""

_UPPER_HALF = "▀"
_HAS_CONTENT, _IS_HELD = 1, 2

_RGB = tuple[int, int, int]


def block_picture(blocks: WatchedBlocks, width: int, height: int) -> tuple[list[Text], int]:
    """The lines of the map, of at most `height`, and how many blocks a place stands for."""
    num_places = max(1, width * 2 * height)
    per_place = -(-blocks.num_blocks // num_places) or 1
    colours = list(_places(blocks, per_place))
    lines = []
    for top in range(0, len(colours), 2 * width):
        upper, lower = colours[top : top + width], colours[top + width : top + 2 * width]
        line = Text(no_wrap=True)
        for at, colour in enumerate(upper):
            below = lower[at] if at < len(lower) else None
            line.append(_UPPER_HALF, _style(colour, below))
        lines.append(line)
    return lines, per_place


def owner_colour(slot: int) -> _RGB:
    """The colour of a request's slot, as red, green and blue."""
    return OWNERS[(slot - 1) % len(OWNERS)] if slot else HELD


def _places(blocks: WatchedBlocks, per_place: int) -> Iterator[_RGB]:
    """Yield the colour of each place: the most frequent one among its held and cached blocks."""
    colours = [_colour(blocks.records, block) for block in range(blocks.num_blocks)]
    for start in range(0, len(colours), per_place):
        counts = Counter(colours[start : start + per_place])
        num_free = counts.pop(FREE, 0)
        if not counts:
            yield FREE
            continue
        (colour, _), *_ = counts.most_common(1)
        # The more of the blocks are free, the darker the place.
        share = max(0.35, 1 - num_free / per_place)
        yield _mixed(FREE, colour, share)


def _colour(records: bytearray, block: int) -> _RGB:
    at = block * RECORD_BYTES
    bits = records[at]
    if bits & _IS_HELD:
        return owner_colour(records[at + 4] | records[at + 5] << 8)
    return CACHED if bits & _HAS_CONTENT else FREE


def _mixed(back: _RGB, front: _RGB, share: float) -> _RGB:
    red, green, blue = (
        round(low + (high - low) * share) for low, high in zip(back, front, strict=True)
    )
    return red, green, blue


def _style(upper: _RGB, lower: _RGB | None) -> Style:
    back = None if lower is None else Color.from_rgb(*lower)
    return Style(color=Color.from_rgb(*upper), bgcolor=back)
