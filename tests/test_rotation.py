"""Long tests take turns: each case runs at one commit of four, and all others at each."""

import re
import subprocess
from pathlib import Path

import pytest
from tests import rotation
from tests.rotation import NUM_PARTS, current_commit, function_of, left_out, listed_functions


def test_each_long_case_runs_in_one_turn_and_all_other_cases_in_each() -> None:
    nodeids = [f"tests/a.py::test_long[{number}]" for number in range(120)]
    nodeids += ["tests/a.py::TestClass::test_long", "tests/a.py::test_short[0]"]
    functions = ("a.py::test_long", "a.py::TestClass::test_long")
    turns = [left_out(nodeids, functions, f"{turn:08x}ffff") for turn in range(NUM_PARTS)]
    assert turns == [left_out(nodeids, functions, f"{turn + 4:08x}0000") for turn in range(4)]
    for nodeid in nodeids:
        is_long = function_of(nodeid) in functions
        assert sum(nodeid in turn for turn in turns) == (NUM_PARTS - 1 if is_long else 0), nodeid
    assert all(len(turn) > 40 for turn in turns)


def test_the_list_names_functions_that_are_there() -> None:
    for function in listed_functions():
        path, name = function.split("::")[:2]
        source = (Path(__file__).parent / path).read_text()
        assert re.search(rf"^(def |class )?{name}\b", source, re.MULTILINE), function


def test_the_list_has_long_functions_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "LIST", tmp_path / "list.txt")
    rotation.write_list({"a.py::test_b": 1.49, "a.py::test_c": 1.5, "d.py::E::test_f": 20.04})
    assert rotation.LIST.read_text() == "  20.0 d.py::E::test_f\n   1.5 a.py::test_c\n"
    assert listed_functions() == {"d.py::E::test_f": 20.0, "a.py::test_c": 1.5}


def test_the_commit_is_that_of_the_repository_if_there_is_one(tmp_path: Path) -> None:
    assert current_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "Begin"], check=True)
    commit = current_commit(tmp_path)
    assert commit is not None and len(commit) == 40
