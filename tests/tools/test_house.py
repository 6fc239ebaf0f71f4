"""The figures of tools/house.py are what their names say."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", TOOLS / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def source(house: ModuleType, path: str, text: str) -> object:
    return house.Source(path, text, ast.parse(text))


def test_functions_are_counted_from_def_to_their_last_line(house: ModuleType) -> None:
    text = "@decorator\ndef f():\n    def g():\n        pass\n    return g\n"
    found = dict(house.functions(source(house, "x.py", text)))
    assert found == {"x.py: f": 4, "x.py: g": 2}


def test_init_files_fill_no_folder(house: ModuleType) -> None:
    paths = ("a/__init__.py", "a/b.py", "a/c.py", "a/d/e.py")
    found = house.files_per_folder([source(house, path, "") for path in paths])
    assert found == {"a": 2, "a/d": 1}


def test_folders_that_import_each_other_are_found(
    house: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "text/a.py": "from quire.core.b import f",
        "core/b.py": "def f():\n    from quire.text import a",
        "core/memory/c.py": "import quire.core.b",
        "hub/d.py": "import quire.text.a",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    sources = [source(house, f"src/quire/{name}", text) for name, text in texts.items()]
    assert house.mutual_folders(sources) == [("core", "text")]


def test_names_that_occur_often_are_found(house: ModuleType) -> None:
    paths = ("a/x.py", "b/x.py", "c/x.py", "a/y.py", "b/y.py")
    found = [source(house, path, "class C: ...\nclass _P: ...\n") for path in paths]
    assert house.thrice(found) == ["x.py"]
    assert house.same_classes(found) == ["C"]
    found = [
        source(house, "a.py", "import a\ndef f():\n    import b\n    def g():\n        import c")
    ]
    assert house.function_imports(found) == 2


def test_every_addition_is_counted(house: ModuleType) -> None:
    """From the page's own lists."""
    listed = {heading: house.files_to_touch(heading) for heading in house.KINDS}
    assert all(listed.values()), listed


def test_figures_that_miss_their_target_are_marked(house: ModuleType) -> None:
    figures = [house.Figure("a", 3, 2, "1", "how"), house.Figure("b", 2, 2, "1", "how")]
    lines = house.table(figures).splitlines()
    assert "3 (!)" in lines[1] and "(!)" not in lines[2]
