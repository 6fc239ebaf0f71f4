"""Draws docs/hybrid-pages.svg: the block tables of a hybrid's sequences, and the pool beneath them.

    python tools/hybrid_pages.py            writes the picture
    python tools/hybrid_pages.py --check    says whether it is what would be written

Nothing is drawn by hand: a scheduler serves two requests, without a model, and what its memory
holds at the end is the picture.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.memory_report import BlockState, block_map
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import HOLE_BLOCK, StepResult

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "hybrid-pages.svg"
BLOCK_SIZE, WINDOW, PAGE = 4, 12, 4096
GROUPS = (
    KVGroup((0,), KVKind.FULL, PAGE),
    KVGroup((1,), KVKind.WINDOW, PAGE, WINDOW),
    KVGroup((0,), KVKind.STATE, PAGE, None, 3),
)
NUM_BLOCKS = 100
LABELS = {
    KVKind.FULL: "full: a block for every 4 tokens",
    KVKind.WINDOW: "window of 12 tokens: what it passed is a hole",
    KVKind.STATE: "state: three blocks, rewritten by every step",
}
COLOURS = {KVKind.FULL: "#4878a8", KVKind.WINDOW: "#5a9a68", KVKind.STATE: "#c8792e"}
CELL, GAP, LEFT, TOP, COLUMNS = 26, 3, 20, 34, 20
INK, PAPER, FAINT = "#222222", "#ffffff", "#888888"


def serve() -> tuple[KVCacheManager, list[Sequence]]:
    """Four requests that begin alike: two have ended, two are in the middle of their answers.

    The second left a snapshot where it parted from the first; the others go on from there.
    """
    memory = KVCacheManager(KVCacheConfig(GROUPS, NUM_BLOCKS, BLOCK_SIZE, True, b"picture"))
    scheduler = Scheduler(SchedulerConfig(2, 16), memory)
    root = memory.prefixes.start_chain("")
    shared = list(range(1, 25))
    prompts = [[*shared, *range(100 * at, 100 * at + 9 + 3 * at)] for at in range(1, 5)]
    branches: list[Sequence] = []
    for index, prompt in enumerate(prompts):
        branch = Sequence(
            str(index + 1), prompt, DecodingParams((1, 1, 30, 30)[index]), chain_root=root
        )
        branches.append(branch)
        scheduler.add([branch])
        while branch.num_output_tokens < (1, 1, 5, 9)[index]:
            plan = scheduler.schedule(0.0)
            assert plan is not None
            rows = [other.row for other in scheduler.running if other.num_pending_tokens]
            known = [row for row in rows if row is not None]
            scheduler.apply(StepResult(plan.step_id, known, [(90 + plan.step_id,)] * len(known)))
    return memory, branches[2:]


@dataclass
class Drawing:
    """SVG elements, and how far down they reach."""

    elements: list[str] = field(default_factory=list)
    y: int = TOP

    def text(self, words: str, *, x: int = LEFT, size: int = 13, colour: str = INK) -> None:
        """A line of its own."""
        self.elements.append(
            f'<text x="{x}" y="{self.y}" font-size="{size}" fill="{colour}">{words}</text>'
        )
        self.y += size + 5

    def cell(self, column: int, label: str, fill: str, ink: str, stroke: str) -> None:
        """One block in the present row."""
        x = LEFT + column * (CELL + GAP)
        dashes = "" if label else ' stroke-dasharray="2 2"'
        self.elements.append(
            f'<rect x="{x}" y="{self.y}" width="{CELL}" height="{CELL}" rx="3" fill="{fill}"'
            f' stroke="{stroke}"{dashes}/>'
        )
        if label:
            self.elements.append(
                f'<text x="{x + CELL / 2}" y="{self.y + 17}" font-size="10" text-anchor="middle"'
                f' fill="{ink}">{label}</text>'
            )

    def end_row(self, space: int = GAP) -> None:
        self.y += CELL + space

    def svg(self) -> str:
        width, height = 2 * LEFT + COLUMNS * (CELL + GAP) - GAP, self.y + 6
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="sans-serif">'
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
        )
        return "\n".join([head, *self.elements, "</svg>"]) + "\n"


def draw() -> str:
    memory, branches = serve()
    drawing = Drawing()
    for branch in branches:
        drawing.text(
            f"Request {branch.request_id}: {branch.num_computed_tokens} computed tokens", size=14
        )
        drawing.y += 2
        for group, table in zip(GROUPS, branch.block_tables, strict=True):
            drawing.text(LABELS[group.kind], size=11, colour=FAINT)
            drawing.y -= 8
            for column, block in enumerate(table):
                if block == HOLE_BLOCK:
                    drawing.cell(column, "", PAPER, INK, FAINT)
                else:
                    drawing.cell(column, str(block), COLOURS[group.kind], PAPER, "none")
            drawing.end_row(space=20)
        drawing.y += 10
    drawing.text("The pool: filled blocks are held, outlined ones free but cached", size=14)
    drawing.y -= 4
    pages = block_map(memory, branches).blocks
    for first in range(0, NUM_BLOCKS, COLUMNS):
        for column, page in enumerate(pages[first : first + COLUMNS]):
            if page.kind is None:
                drawing.cell(column, "", PAPER, FAINT, "#cccccc")
            elif page.state is BlockState.HELD:
                drawing.cell(column, str(page.block), COLOURS[page.kind], PAPER, "none")
            else:
                colour = COLOURS[page.kind]
                drawing.cell(column, str(page.block), PAPER, colour, colour)
        drawing.end_row()
    return drawing.svg()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    picture = draw()
    if parser.parse_args().check:
        return int(PICTURE.read_text(encoding="utf-8") != picture)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
