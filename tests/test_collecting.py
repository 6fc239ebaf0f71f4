"""Processes collect the tests in different orders, and end with the same one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.collecting import begin_elsewhere, put_first, put_in_one_order

NAMES = ["adapters", "core", "server", "test_tidy.py", "text"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (*NAMES, "__pycache__", "conftest.py", "README.md"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if "." not in name else path.touch()
    return tmp_path


def config_in(checkout: Path, *words: str) -> SimpleNamespace:
    return SimpleNamespace(
        args=list(words),
        rootpath=checkout,
        stash=pytest.Stash(),
        getini=lambda name: ["tests"] if name == "testpaths" else None,
    )


def begin(config: SimpleNamespace, number: int, count: int = 2) -> list[str]:
    environment = {
        "PYTEST_XDIST_WORKER": f"gw{number}",
        "PYTEST_XDIST_WORKER_COUNT": str(count),
    }
    begin_elsewhere(config, environment)  # type: ignore[arg-type]
    return [Path(path).name for path in config.args]


def test_each_process_begins_at_another_place_and_collects_all(checkout: Path) -> None:
    found = [begin(config_in(checkout, "tests"), number, count=3) for number in range(3)]
    assert found[0] == NAMES
    assert [names[0] for names in found] == ["adapters", "core", "test_tidy.py"]
    assert all(sorted(names) == NAMES for names in found)


def test_the_tests_are_in_one_order_again(checkout: Path) -> None:
    config = config_in(checkout, "tests")
    items = [
        SimpleNamespace(path=checkout / "tests" / name / file, name=file)
        for name in begin(config, 1)
        for file in ("test_b.py", "test_a.py")
    ]
    put_in_one_order(config, items)  # type: ignore[arg-type]
    assert [(item.path.parent.name, item.name) for item in items] == [
        (name, file) for name in NAMES for file in ("test_b.py", "test_a.py")
    ]


def test_the_order_that_was_asked_for_is_left_alone(checkout: Path) -> None:
    config = config_in(checkout, "tests/text", "tests/core")
    assert begin(config, 1) == ["text", "core"]
    items = [SimpleNamespace(path=checkout / "tests" / name) for name in ("text", "core")]
    put_in_one_order(config, items)  # type: ignore[arg-type]
    assert [item.path.name for item in items] == ["text", "core"]
    alone = config_in(checkout, "tests")
    begin_elsewhere(alone, {})  # type: ignore[arg-type]
    assert alone.args == ["tests"]


def test_tests_that_run_alone_are_the_first_and_then_the_long_ones_in_their_own_order() -> None:
    marks: dict[str, dict[str, int]] = {
        **{"a": {}, "b": {"long": 1}, "c": {"alone": 1}},
        **{"d": {"other": 1}, "e": {"alone": 1}, "f": {"long": 1}},
    }
    items = [
        SimpleNamespace(name=name, get_closest_marker=found.get) for name, found in marks.items()
    ]
    put_first(items)  # type: ignore[arg-type]
    assert [item.name for item in items] == ["c", "e", "b", "f", "a", "d"]
