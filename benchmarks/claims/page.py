"""The results as lines for the terminal, and as a page of documentation. Measures nothing."""

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims.claim import Claim, Picture, Setting, StudyResult
from quire.bench.machine import NOISE_LIMIT_CORES, Noise, processor

_FIELD = 12


def verdict(claim: Claim) -> str:
    """In one word or three."""
    return "holds" if claim.holds else "does not hold"


def claim_lines(result: StudyResult) -> list[str]:
    """A block of lines for each claim."""
    lines = []
    for claim in result.claims:
        rows = {
            "source": claim.source,
            "quire": claim.ours,
            "baseline": claim.baseline,
            "ratio": f"{claim.ratio:.3g}x",
            "verdict": verdict(claim),
            "command": claim.command,
        }
        lines.append(claim.promise)
        lines += [f"  {name:<{_FIELD}}{text}" for name, text in rows.items()]
        lines.append("")
    return lines


def write_pictures(results: Sequence[StudyResult], folder: Path) -> None:
    """Each into a file of its own."""
    for result in results:
        for picture in result.pictures:
            (folder / _file_name(picture)).write_text(picture.svg, encoding="utf-8")


def noise_line(noise: Noise) -> str:
    """A line about the load of other processes during the run."""
    if noise.other_cores is None:
        return "How busy other processes were is not known on this system."
    line = f"Other processes took {noise.other_cores:.2f} cores meanwhile"
    if noise.is_loud:
        line += f" (above {NOISE_LIMIT_CORES}: figures in wall time are not exact)"
    return f"{line}."


def make_page(
    results: Sequence[StudyResult],
    setting: Setting,
    noise: Noise,
    page: Path,
    pictures: Path | None,
) -> str:
    """Markdown. page: where it will be, from which it links the pictures, if there are any."""
    claims = [claim for result in results for claim in result.claims]
    num_held = sum(claim.holds for claim in claims)
    lines = [
        "# What is promised of paging, measured",
        "",
        "Each line is a promise that the literature makes of paged KV memory, with our figure and a"
        " baseline of the same run. `python -m benchmarks.claims --markdown FILE --pictures FOLDER`"
        f" measures all lines and writes this page. It was written on {processor()}, and figures in"
        " wall or processor time are that machine's. Virtual clocks give the same figures anywhere."
        f" {noise_line(noise)}",
        "",
        f"**{num_held} of {len(claims)} hold.** The ratio is our figure divided by the baseline's.",
        "",
    ]
    if setting.is_quick:
        lines += ["Written with `--quick`: these figures show that it runs, nothing else.", ""]
    lines += _table(claims)
    for result in results:
        lines += ["", f"## {result.title}"]
        if pictures is not None:
            for picture in result.pictures:
                target = os.path.relpath(pictures / _file_name(picture), page.parent)
                lines += ["", f"![{picture.caption}]({Path(target).as_posix()})"]
        for note in result.notes:
            lines += ["", note]
    return "\n".join(lines) + "\n"


def _table(claims: Sequence[Claim]) -> list[str]:
    lines = [
        "| promise | source | quire | baseline | ratio | verdict | command |",
        "|---|---|---|---|---:|---|---|",
    ]
    for claim in claims:
        commands = "; ".join(f"`{command}`" for command in claim.command.split("; "))
        mark = "holds" if claim.holds else "**does not hold**"
        cells = [claim.promise, claim.source, claim.ours, claim.baseline]
        cells += [f"{claim.ratio:.3g}x", mark, commands]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _file_name(picture: Picture) -> str:
    return f"{picture.name}.svg"
