"""Measure the shape of the source: sizes, folders, and how many files a change or a request needs.

    .venv/bin/python tools/house.py                 # a table: today, the target, what was before
    .venv/bin/python tools/house.py --json
    .venv/bin/python tools/house.py --no-trace      # without the traced chat, which takes 5 s

Everything is read from the source, by AST; how each figure is counted stands beside it. What is to
be touched for a family, a policy, ... is what the lists "Files to touch" of `docs/extending.md`
name, whose examples the tests run; C++ files are not counted.
"""

import argparse
import ast
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quire"
SCRIPTS = (SOURCE, ROOT / "benchmarks", ROOT / "records", ROOT / "tools")
EXTENDING = ROOT / "docs" / "extending.md"

KINDS = {
    "A model family": ("files to add a model family", 3, "2; about 16 for the first other one"),
    "A scheduling policy": ("files to add a scheduling policy", 1, "1"),
    "An attention backend": ("files to add an attention backend", 2, "4"),
    "A weight format": ("files to add a weight format", 4, "about 17"),
    "An endpoint": ("files to add an endpoint", 2, "4 to 6"),
    "An engine option": ("files to add an engine option", 1, "3, in 7 places"),
}
"""Heading in docs/extending.md -> figure, target, and what it was before the folders were made."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table."""

    name: str
    today: float
    #: The largest value that is accepted; None without a target.
    target: float | None
    #: The value that an earlier review found.
    before: str
    how: str

    @property
    def is_met(self) -> bool:
        return self.target is None or self.today <= self.target


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file."""

    #: The path relative to the repository.
    path: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())


def read(folder: Path) -> list[Source]:
    return [
        Source(path.relative_to(ROOT).as_posix(), text := path.read_text(), ast.parse(text))
        for path in sorted(folder.rglob("*.py"))
    ]


def functions(source: Source) -> Iterator[tuple[str, int]]:
    """`file: name` and the lines of every function, from `def` to its last line."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{source.path}: {node.name}", (node.end_lineno or 0) - node.lineno + 1


def files_per_folder(sources: list[Source]) -> Counter[str]:
    """Without `__init__.py`."""
    names = (Path(source.path) for source in sources)
    return Counter(path.parent.as_posix() for path in names if path.name != "__init__.py")


def imports(source: Source) -> Iterator[str]:
    """The modules of ours that a file imports anywhere in it, as paths relative to SOURCE."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        for name in names:
            path = name.removeprefix("quire.").replace(".", "/") + ".py"
            if name.startswith("quire.") and (SOURCE / path).exists():
                yield path


def mutual_folders(sources: list[Source]) -> list[tuple[str, str]]:
    """Pairs of separate folders with imports in both directions."""
    edges: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        home = Path(source.path).relative_to("src/quire").parent.as_posix()
        for path in imports(source):
            edges[home].add(Path(path).parent.as_posix())
    return [
        (left, right)
        for left in sorted(edges)
        for right in sorted(edges[left])
        if left < right and left in edges[right] and not f"{right}/".startswith(f"{left}/")
        if "." not in (left, right)
    ]


def thrice(sources: list[Source]) -> list[str]:
    """Basenames that occur three times or more, `__init__.py` and `__main__.py` aside."""
    counts = Counter(Path(source.path).name for source in sources)
    return sorted(name for name, count in counts.items() if count > 2 and name[:2] != "__")


def same_classes(sources: list[Source]) -> list[str]:
    """Names that two or more public top-level classes have."""
    counts = Counter(
        node.name
        for source in sources
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    return sorted(name for name, count in counts.items() if count > 1)


def function_imports(sources: list[Source]) -> int:
    """Import statements inside a function."""
    inner: set[int] = set()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                statements = (ast.Import, ast.ImportFrom)
                inner |= {id(found) for found in ast.walk(node) if isinstance(found, statements)}
    return len(inner)


def files_to_touch(heading: str) -> list[str]:
    """The Python files in the list "Files to touch" under a heading of docs/extending.md."""
    page = EXTENDING.read_text()
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    listed = found and re.search(r"^Files to touch:\n\n((?:[-*] .*\n(?:  .*\n)*)+)", found[1], re.M)
    if not listed:
        return []
    names = re.findall(r"^[-*] `([^`]+)`", listed[1], flags=re.MULTILINE)
    return [name for name in names if name.endswith(".py")]


def sizes(sources: list[Source]) -> Iterator[Figure]:
    scripts = [source for folder in SCRIPTS for source in read(folder)]
    lengths = [length for source in sources for _, length in functions(source)]
    longest, length = max(
        (entry for source in scripts for entry in functions(source)), key=lambda entry: entry[1]
    )
    largest = max(scripts, key=lambda source: source.num_lines)
    tests = sum(source.num_lines for source in read(ROOT / "tests"))
    code = sum(source.num_lines for source in sources)
    cpp = sum(
        len(path.read_text().splitlines())
        for path in SOURCE.rglob("*")
        if path.suffix in (".cpp", ".h")
    )
    mean = round(statistics.mean(lengths), 1)
    yield Figure("mean function, lines", mean, 12, "9.8", f"{len(lengths):,} in src")
    yield Figure("longest function, lines", length, 70, "70 (259 in records)", longest)
    yield Figure("largest file, lines", largest.num_lines, 500, "490", largest.path)
    how = f"{tests:,} lines of tests, {code:,} of Python and {cpp:,} of C++ in src"
    yield Figure("code per line of tests", round(code / tests, 2), 1, "0.84", how)


def order(sources: list[Source]) -> Iterator[Figure]:
    scripts = [source for folder in SCRIPTS for source in read(folder)]
    folder, count = max(files_per_folder(scripts).items(), key=lambda entry: entry[1])
    yield Figure("files in the fullest folder", count, 15, "40", f"{folder}, __init__.py aside")
    pairs = mutual_folders(sources)
    yield Figure("pairs of folders that import each other", len(pairs), 0, "0", str(pairs or ""))
    names = thrice(sources)
    how = ", ".join(names) or "in src"
    yield Figure("basenames that occur three times", len(names), 0, "2", how)
    names = same_classes(sources)
    how = ", ".join(names) or "public top-level classes in src"
    yield Figure("names of two classes", len(names), 0, "5", how)


def surface(sources: list[Source]) -> Iterator[Figure]:
    listed = json.loads((ROOT / "tests" / "data" / "public_surface.json").read_text())
    flags = {flag for names in listed["flags"].values() for flag in names if flag[:2] == "--"}
    variables = listed["environment_variables"]
    how = "tests/data/public_surface.json, which a test compares with the commands"
    yield Figure("flags", len(flags), None, "104", how)
    yield Figure("environment variables", len(variables), None, "4", ", ".join(variables))
    ignores = sum(source.text.count("# type: ignore") for source in sources)
    triton = sum(
        source.text.count("# type: ignore") for source in sources if "triton" in source.path
    )
    yield Figure("type: ignore", ignores, None, "115", f"{triton} of them in Triton's files")
    yield Figure("imports inside functions", function_imports(sources), None, "55", "src")


def additions() -> Iterator[Figure]:
    for heading, (name, target, before) in KINDS.items():
        files = files_to_touch(heading)
        if files:
            yield Figure(name, len(files), target, before, ", ".join(files))


def passed() -> Iterator[Figure]:
    from request_path import trace_chat

    trace = trace_chat()
    how = "files of src/quire that run during a streamed chat, in the API server and in the engine"
    yield Figure("files that run in a chat", len(trace.files), None, "about 70; 96 traced", how)
    how = "those of them that call another file of ours (tools/request_path.py prints them)"
    yield Figure("files that hand a chat on", len(trace.stops), 35, "about 56; 61 traced", how)
    how = f"a prompt's {len(trace.way_in)} stops from the socket to the link, by package"
    yield Figure("package changes on the way in", trace.num_package_changes, 6, "11", how)


def measure(*, with_trace: bool) -> list[Figure]:
    sources = read(SOURCE)
    found = [*passed()] if with_trace else []
    return [*found, *additions(), *sizes(sources), *order(sources), *surface(sources)]


def table(figures: list[Figure]) -> str:
    rows = [("", "today", "target", "before", "how it is counted")]
    for figure in figures:
        target = "-" if figure.target is None else f"{figure.target:g}"
        today = f"{figure.today:g}" + ("" if figure.is_met else " (!)")
        rows.append((figure.name, today, target, figure.before, figure.how))
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    lines = [
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[4]])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-trace", action="store_true")
    args = parser.parse_args()
    figures = measure(with_trace=not args.no_trace)
    if args.json:
        print(
            json.dumps([asdict(figure) | {"is_met": figure.is_met} for figure in figures], indent=1)
        )
    else:
        print(table(figures))
    sys.exit(0 if all(figure.is_met for figure in figures) else 1)


if __name__ == "__main__":
    main()
