"""docs/serving.md says what there is: its commands, its files, its flags and their defaults."""

import re
from pathlib import Path

import pytest
from tests.test_readme import code_blocks, commands

from quire.cli_foreign import KNOWN
from quire.cli_parser import build_parser

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "docs" / "serving.md").read_text()


def test_its_commands_are_understood(text: str) -> None:
    lines = commands(text)
    assert lines
    for words in lines:
        assert words[0] == "quire"
        build_parser().parse_args(words[1:])


def test_its_file_is_one_that_serve_reads(text: str, tmp_path: Path) -> None:
    (file,) = [block for block in code_blocks(text, "yaml") if "# server.yaml" in block]
    path = tmp_path / "server.yaml"
    path.write_text(file)
    args = build_parser().parse_args(["serve", "--config", str(path)])
    assert (args.model, args.port, args.max_tenant_requests) == ("Qwen/Qwen3-0.6B", 8000, 32)


def test_its_flags_exist(text: str) -> None:
    parser = build_parser()
    (choice,) = [action for action in parser._actions if action.dest == "command"]
    assert isinstance(choice.choices, dict)
    serve = choice.choices["serve"]
    known = {*KNOWN, *parser._option_string_actions, *serve._option_string_actions}
    named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    assert len(named) > 20
    assert named - known == set()


def test_its_links_lead_somewhere(text: str) -> None:
    targets = re.findall(r"\]\(([\w./-]+)\)", text)
    assert targets
    assert [name for name in targets if not (ROOT / "docs" / name).exists()] == []
