"""The table of `gpu.py`: a line for each result, section by section, failures first."""

from collections.abc import Mapping, Sequence
from typing import Any

VERDICTS = {True: "yes", False: "**no**", None: ""}


def markdown(results: Mapping[str, Any]) -> str:
    """results: as `gpu.py` writes them."""
    machine = results["machine"]
    where = "; ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "transformers"))
    lines = [
        f"{where}. Python {machine['python']}, {versions}. {results['seconds']:.0f} s.",
        "",
    ]
    if results["small"]:
        lines += ["A miniature on the CPU: numbers mean nothing.", ""]
    lines += _failures(results)
    lines += ["| | | goal | reached | |", "| --- | ---: | --- | --- | --- |"]
    for section in results["sections"]:
        name, status = section["section"], section["status"]
        lines.append(f"| **{name}** | {section['seconds']:.0f} s | | | {_told(status)} |")
        lines += [_line(row) for row in results["rows"] if row["section"] == name]
    return "\n".join(lines) + "\n"


def _failures(results: Mapping[str, Any]) -> list[str]:
    """Sections that did not end well, and what was not reached."""
    lines = [
        f"- **{one['section']} {one['status']}**: {one['error']}"
        for one in results["sections"]
        if one["status"] != "done"
    ]
    missed: Sequence[Mapping[str, Any]] = [row for row in results["rows"] if row["ok"] is False]
    lines += [f"- **not reached**: {row['section']}: {row['name']}" for row in missed]
    return [*lines, ""] if lines else []


def _told(status: str) -> str:
    return "" if status == "done" else f"**{status}**"


def _line(row: Mapping[str, Any]) -> str:
    value = "" if row["value"] is None else f"{_number(row['value'])} {row['unit']}".strip()
    note = row["note"].replace("|", "\\|").replace("\n", " ")
    return f"| {row['name']} | {value} | {row['goal']} | {VERDICTS[row['ok']]} | {note} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
