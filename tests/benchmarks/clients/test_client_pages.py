"""Every client that a driver runs has a page, and every page names its driver and its output."""

import re
from pathlib import Path

import pytest
from benchmarks.clients.coding_agents import AGENTS

ROOT = Path(__file__).parents[3]
INDEX = ROOT / "docs" / "clients.md"
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "clients").glob("*.md"))}
DRIVERS = ROOT / "benchmarks" / "clients"
NOT_DRIVERS = {"__init__.py", "all_clients.py", "cases.py", "open_webui.mjs"}
"""Files that drive no client by themselves."""

PACKAGES = {
    "huggingface_hub": "hugging-face",
    "haystack-ai": "haystack",
    "langchain-openai": "langchain-python",
    "llama-index-llms-openai-like": "llamaindex",
    "lm_eval": "lm-evaluation-harness",
    "mistralai": "mistral",
    "ollama": "ollama-python",
    "openai": "openai-python",
}
"""Pages whose names differ from those of their clients' packages."""


def named_drivers(page: str) -> set[str]:
    """The files in benchmarks/clients that a page names."""
    return set(re.findall(r"`benchmarks/clients/([\w.]+)`", page))


def test_every_driver_is_named_by_a_page() -> None:
    files = {path.name for path in DRIVERS.iterdir() if path.suffix in (".py", ".mjs")}
    assert files - NOT_DRIVERS == set().union(*map(named_drivers, PAGES.values()))


def test_every_client_of_a_driver_has_a_page() -> None:
    for driver in DRIVERS.glob("*.py"):
        for package in set(re.findall(r'^@case\("([^"]+)"', driver.read_text(), re.MULTILINE)):
            assert driver.name in named_drivers(PAGES[PACKAGES.get(package, package)]), package
    for agent in AGENTS:
        assert "coding_agents.py" in named_drivers(PAGES[agent.partition(",")[0].lower()]), agent


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_settings_then_output_then_differences(name: str) -> None:
    page = PAGES[name]
    assert named_drivers(page), "it names no driver"
    settings, _, rest = page.partition("quire serve ")
    assert re.search(r"^```sh\n(pip|npm) install ", settings, re.MULTILINE)
    printed, _, differences = rest.partition("\n## What differs\n")
    assert "printed" in printed and "```text\n" in printed
    assert re.search(r"^- \S", differences, re.MULTILINE)


def test_the_index_links_to_every_page() -> None:
    assert set(re.findall(r"\]\(clients/([\w-]+)\.md\)", INDEX.read_text())) == PAGES.keys()
