"""What benchmarks, examples, records, tests and tools import of quire and of each other is there.

The type checker reads `src` alone, and an import within a program that no test starts would fail at
its user's. Reads the files as text.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tools.syntax import parsed, walk

ROOT = Path(__file__).parent.parent
ROOTS = {"quire": ROOT / "src", "benchmarks": ROOT, "tests": ROOT}
"""Of each package: the folder in which it lies."""


def missing_names(source: str) -> list[str]:
    """What a file imports from our packages that they have not."""
    return [
        f"line {node.lineno}: {node.module} has no {alias.name}"
        for node in walk(parsed(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOTS
        for alias in node.names
        if alias.name != "*" and not _is_there(node.module or "", alias.name)
    ]


def _is_there(module: str, name: str) -> bool:
    return name in _names_of(module) or _path_of(f"{module}.{name}") is not None


@cache
def _names_of(module: str) -> frozenset[str]:
    path = _path_of(module)
    source = path.read_text() if path is not None and path.is_file() else ""
    return frozenset(_bound(parsed(source)))


def _path_of(module: str) -> Path | None:
    place = ROOTS[module.split(".")[0]].joinpath(*module.split("."))
    known = (place / "__init__.py", place.with_suffix(".py"), place)
    return next((path for path in known if path.exists()), None)


def _bound(tree: ast.Module) -> Iterator[str]:
    """All names that a module binds, anywhere in it, and its strings: names that it loads late."""
    for node in walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Constant(value=str(text)) if text.isidentifier():
                yield text


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "records", "tests", "tools"])
def test_every_imported_name_is_there(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {str(path.relative_to(ROOT)): missing_names(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_missing_name_is_found() -> None:
    source = "from quire import LLM, Nothing\nfrom quire.numa.planning import plan\n"
    assert missing_names(source) == ["line 1: quire has no Nothing"]
    assert missing_names("from benchmarks.absent import x") == [
        "line 1: benchmarks.absent has no x"
    ]
