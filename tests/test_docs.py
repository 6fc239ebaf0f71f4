"""Every page: its links lead somewhere, its flags exist, its Python runs or compiles."""

import ast
import re
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forking import Forks
from tests.test_readme import code_blocks
from tools.folders import FLOORS, SOURCE, with_map
from tools.syntax import parsed, walk

from quire.bench import throughput
from quire.bench.quality import perplexity
from quire.cli.parser import build_parser
from quire.compat.flags import KNOWN
from quire.replay import bench_serve
from quire.simulation.workload import SimulationConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
BENCHMARKS = {
    "serve": bench_serve.add_arguments,
    "throughput": throughput.add_arguments,
    "perplexity": perplexity.add_arguments,
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What links may name in a page, as GitHub makes it of its headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in words}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def flags_of(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, _SubParsersAction):
            for inner in action.choices.values():
                yield from flags_of(inner)


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Of quire's commands, and of every script, as their sources spell them."""
    found = {*KNOWN, *flags_of(build_parser(BENCHMARKS))}
    found |= {f"--{name.replace('_', '-')}" for name in SimulationConfig.__dataclass_fields__}
    scripts = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "src").rglob("*.py")]
    scripts += [*(ROOT / "tests" / "kernels").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    for script in scripts:
        found |= set(re.findall(r"[\"'](--[a-z][\w-]+)[\"']", script.read_text()))
    shell = (ROOT / "scripts" / "test").read_text()
    return found | set(re.findall(r"^ +(--[a-z][a-z-]+)\)", shell, re.MULTILINE))


@each_page
def test_flags_exist(page: Path, known_flags: set[str]) -> None:
    """Of other programs' command lines only what stands in fenced blocks is left out."""
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", prose(page)))
    assert named - known_flags - NOT_OURS == set()


NOT_OURS = {
    *("--membind", "--all-isas", "--build-arg", "--gpus", "--time", "--index", "--pip-args"),
    *("--extra-index-url", "--set", "--set-string", "--format"),
}
"""numactl's, that of the scripts which compile the kernels, docker's, uv's, pipx's, helm's."""


@each_page
def test_python_is_python(page: Path) -> None:
    for block in code_blocks(page.read_text(), "python"):
        if page.name != "python.md":  # whose blocks are signatures
            ast.parse(block)


def test_the_memory_page_s_example_runs(forks: Forks) -> None:
    (block,) = code_blocks((ROOT / "docs" / "memory.md").read_text(), "python")
    status, printed = forks.run("-c", block)
    assert status == 0, printed
    assert "---" in printed


def test_the_map_of_the_design_is_the_tree() -> None:
    """`python tools/folders.py` writes it."""
    page = (ROOT / "docs" / "DESIGN.md").read_text()
    assert with_map(page) == page


def test_imports_go_up_the_map() -> None:
    """To the own folder, or to one above it in the map: what the page says of its order. All that
    declares options may import `option_fields.py`."""
    against = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in SOURCE.rglob("*/*.py")
        for name in imported_folders(path)
        if FLOORS.index(name) > FLOORS.index(path.relative_to(SOURCE).parts[0])
    ]
    assert against == []


def imported_folders(path: Path) -> set[str]:
    """The top folders of ours that a file imports from, anywhere in it."""
    names = set()
    for node in walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = [name for name in names if name.startswith("quire.")]
    found = {name.split(".")[1] for name in ours if not name.startswith("quire.option_fields")}
    return found & set(FLOORS)
