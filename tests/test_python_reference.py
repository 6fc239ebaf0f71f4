"""docs/python.md is what tools/python_reference.py makes of the docstrings as they are now."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import quire

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "python_reference.py"
    spec = importlib.util.spec_from_file_location("python_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_not_stale(tool: ModuleType) -> None:
    is_current = tool.PAGE.read_text(encoding="utf-8") == tool.reference()
    assert is_current, "write it anew: .venv/bin/python tools/python_reference.py"


def test_every_exported_class_has_a_section_with_its_methods_and_fields(tool: ModuleType) -> None:
    page = tool.reference()
    for name in set(quire.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in page
    for part in (
        "### LLM.generate",
        "### BranchHandle.fork",
        "`max_itl_ratio` (`--max-itl-ratio`): ",
        "QuireError ",
    ):
        assert part in page


def test_names_with_a_colon_become_a_list_where_they_are_names(tool: ModuleType) -> None:
    text = """What it does: much.

    `a`, `b`: two of them, where c: is none. d: one more
        over two lines. Raises ValueError for d: so it is.

        an(example)
    """
    assert tool.prose(text, ["a", "b", "d"]).split("\n") == [
        "What it does: much.",
        "",
        "- `a, b`: two of them, where c: is none.",
        "- `d`: one more over two lines.",
        "",
        "Raises ValueError for d: so it is.",
        "",
        "```python",
        "an(example)",
        "```",
    ]


def test_long_signatures_have_a_parameter_a_line(tool: ModuleType) -> None:
    def short(a: int, *, b: str = "x", **options: int) -> None: ...

    def long(
        parameter_with_a_long_name: dict[str, int],
        another_with_a_long_name: list[str] | None = None,
    ) -> int: ...

    assert tool.signature("short", tool.inspect.signature(short)) == (
        "short(a: int, *, b: str = 'x', **options)"
    )
    assert tool.signature("long", tool.inspect.signature(long)).splitlines() == [
        "long(",
        "    parameter_with_a_long_name: dict[str, int],",
        "    another_with_a_long_name: list[str] | None = None,",
        ") -> int",
    ]


def test_comments_above_fields_become_their_entries(tool: ModuleType) -> None:
    entries = tool.field_entries(quire.SamplingParams)
    assert "- `logit_bias`: Token id -> number added to its logit." in entries
    assert not tool.field_entries(quire.RequestOutputKind)
