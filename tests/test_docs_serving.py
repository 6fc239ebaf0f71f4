"""docs/serving.md says what there is: its commands, its files, its flags and their defaults."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
from tests.test_readme import code_blocks, commands

from quire.cli.parser import build_parser
from quire.compat.flags import KNOWN
from quire.server.config import ServerConfig
from quire.server.launch import IDLE_CONNECTION_S

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


def test_its_unit_starts_the_server_and_lets_it_drain(text: str) -> None:
    (block,) = code_blocks(text, "ini")
    unit = configparser.ConfigParser(strict=False)  # a name may stand twice
    unit.read_string(block)
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    assert words == ["/opt/quire/bin/quire", "serve", "--config", "/etc/quire/server.yaml"]
    assert f"venv {words[0].removesuffix('/bin/quire')}\n" in text
    assert int(service["TimeoutStopSec"]) >= ServerConfig().drain_timeout_s + 10


def test_its_proxy_agrees_with_the_server(text: str) -> None:
    (block,) = code_blocks(text, "nginx")
    found = dict(re.findall(r"^ *(\w+) (\d+)[sm]?;", block, flags=re.MULTILINE))
    assert int(found["client_max_body_size"]) << 20 == ServerConfig().max_body_bytes
    assert int(found["keepalive_timeout"]) < IDLE_CONNECTION_S
    deadline = re.search(r"^default-deadline-s: (\d+)$", text, flags=re.MULTILINE)
    assert deadline is not None
    assert int(found["proxy_read_timeout"]) > int(deadline[1])


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
