"""Commands of documentation and messages that install: each can work, and names what there is."""

import re
import tomllib
from pathlib import Path

import pytest

from quire.cli.doctor.machine import EXTRAS
from quire.models.fallback.hf_classes import INSTALL

ROOT = Path(__file__).parents[2]
SPOKEN = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.*"),
    *(ROOT / "benchmarks").rglob("*.*"),
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "deploy").rglob("*.*"),
]
BY_NAME = re.compile(
    r"quire\[[a-z,]+\]|\b(?:pip|pipx|uv)[a-z ]* install +(?:-\S+ +)*'?quire\b(?!-)"
)
"""The package asked for by its name, which no index has under that name."""


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'quire[ray]'",
        "pip install quire",
        "uv tool install quire",
        "pip install -U quire",
    ],
)
def test_commands_that_name_the_package_are_found(text: str) -> None:
    assert BY_NAME.search(text)


@pytest.mark.parametrize(
    "text", ["pip install '.[ray]'", "uv tool install quire-0.1.0.whl", "it needs the extra `ray`"]
)
def test_commands_that_name_a_folder_or_a_file_are_not(text: str) -> None:
    assert BY_NAME.search(text) is None


def test_nothing_tells_to_install_the_package_by_its_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SPOKEN
        if path.suffix in (".md", ".py", ".txt", ".toml", ".yaml", "")
        for match in BY_NAME.finditer(path.read_text())
    ]
    assert found == []


def test_messages_name_the_packages_of_the_extras() -> None:
    assert f"pip install '{extras()['transformers'][0]}'" == INSTALL
    ray = (ROOT / "src/quire/cluster/machines/ray_agents.py").read_text()
    assert f"pip install '{extras()['ray'][0]}'" in ray
    spans = (ROOT / "src/quire/observability/spans.py").read_text()
    names = [re.split(r"[>=<]", requirement)[0] for requirement in extras()["otel"]]
    assert f"pip install {' '.join(names)}" in spans


def test_the_doctor_knows_extras_that_exist() -> None:
    assert set(EXTRAS) <= set(extras())


def test_extras_that_the_documentation_names_exist() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    named = {name for group in re.findall(r"\[([a-z,]+)\]'", text) for name in group.split(",")}
    assert {"fast", "ray", "transformers"} <= named <= set(extras())
