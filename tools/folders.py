"""Write the map of `src/quire` into docs/DESIGN.md: every folder, with its docstring's first line.

    .venv/bin/python tools/folders.py

Folders stand from the ground up: each imports only from those above it. tests/test_docs.py fails
while the page says something else, or an import goes down this list.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quire"
PAGE = ROOT / "docs" / "DESIGN.md"
INDENT = 26
WIDTH = 118

FLOORS = (
    *(
        "observability",
        "traces",
        "hub",
        "numa",
        "compat",
        "core",
        "images",
        "speculation",
        "routing",
        "kernels",
        "tiers",
        "formats",
        "attention",
        "recurrence",
        "options",
        "distributed",
        "layers",
    ),
    *("models", "adapters", "sampling", "runtime", "text", "engine", "engine_client", "cluster"),
    *("assembly", "engine_process", "offline", "server", "simulation", "bench", "planning"),
    *("replay", "cli"),
)
"""The top folders, from the ground up."""


def folders() -> Iterator[Path]:
    """All packages, relative to SOURCE, in the order of the map."""
    packages = [path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")]
    known = [path for path in packages if path.parts]
    unknown = {path.parts[0] for path in known} - set(FLOORS)
    if unknown:
        raise ValueError(f"put {', '.join(sorted(unknown))} into FLOORS, where its imports allow")
    yield from sorted(known, key=lambda path: (FLOORS.index(path.parts[0]), path.parts))


def summary(folder: Path) -> str:
    """The first line of a package's docstring, without its dot."""
    text = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text())) or ""
    return text.partition("\n")[0].removesuffix(".")


def folder_map() -> str:
    """The lines of the map."""
    lines = []
    for folder in folders():
        name = "  " * (len(folder.parts) - 1) + f"{folder.name}/"
        text = textwrap.wrap(summary(folder), WIDTH - INDENT)
        lines += [f"{name:{INDENT}}{text[0] if text else ''}"]
        lines += [" " * INDENT + line for line in text[1:]]
    return "\n".join(lines)


def with_map(page: str) -> str:
    """The page with the map of today: the block that begins with `errors.py`."""
    head = "```\nerrors.py, version.py     the exception tree, each error with its HTTP status\n"
    head += "option_fields.py          how a component declares its options\n"
    head += "ipc.py                    messages between our own processes\n"
    head += "child_process.py          starts Python processes of our own\n"
    head += "deferred_imports.py       defers parts of torch that they do not use\n"
    head += "quick_start.py            makes their starts quick\n"
    new, count = re.subn(
        r"^```\nerrors\.py, version\.py .*?^```",
        lambda _: f"{head}{folder_map()}\n```",
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{PAGE} has {count} maps")
    return new


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text()))
