"""Outside the runner, one file interprets plans."""

import ast
from pathlib import Path

import quire

PACKAGES = ("simulation", "engine", "planning", "replay", "bench", "cluster")
CHANGES = {
    *("release", "admit", "forks", "token_edits", "table_edits"),
    *("chunks", "copies", "adapter_loads", "content_loads"),
}
OTHERS = {"planning/measuring.py"}  # it hides releases from a runner that lacks their rows


def reads_changes(path: Path) -> bool:
    """Whether a file reads a field of a `plan` that says what the plan changes or computes."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in CHANGES
        and ast.unparse(node.value).rpartition(".")[2] == "plan"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_plan_rows_alone_reads_what_a_plan_changes() -> None:
    root = Path(quire.__file__).parent
    files = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    readers = {path.relative_to(root).as_posix() for path in files if reads_changes(path)}
    assert readers == {"simulation/plan_rows.py"} | OTHERS
