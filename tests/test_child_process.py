"""How Python processes of our own are started, and what is known of one that does not start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.assembly.build import WORKER_COMMAND
from quire.child_process import (
    MAX_TEXT_BYTES,
    StartText,
    last_line,
    python_command,
    working_folder,
)
from quire.cli import main as cli
from quire.engine_client.process.early_process import ENGINE_COMMAND
from quire.engine_client.process.grammar_compilers import COMMAND as GRAMMAR_COMMAND

PRINT_COMMAND = """
import json
from quire.child_process import python_command
print(json.dumps(python_command("a.module")))
"""

LEAVING = """
import sys
from quire.child_process import redirect_start_text
print("before", file=sys.stderr)
redirect_start_text(1)
print("after", file=sys.stderr)
"""

STARTING = """
import subprocess, sys
from quire.child_process import child_options
code = "import os, sys; print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())"
subprocess.run([sys.executable, "-c", code], check=True, **child_options())
"""

HOSTILE = "import os, sys; print('taken from the working folder', file=sys.stderr); os._exit(7)"


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-I"],
        ["-E", "-s", "-B", "-OO"],
        ["-W", "ignore::ImportWarning", "-X", "utf8", "-X", "pycache_prefix=/a b"],
    ],
)
def test_a_child_has_its_parents_interpreter_and_options(options: list[str]) -> None:
    environment = {name: text for name, text in os.environ.items() if name[:6] != "PYTHON"}
    words = [sys.executable, *options, "-c", PRINT_COMMAND]
    command = json.loads(subprocess.check_output(words, env=environment))
    assert command[:2] == [sys.executable, "-P"] and command[-2:] == ["-m", "a.module"]
    # Asked in the same way, such a child would start its own children like this.
    again = subprocess.check_output([*command[:-2], "-c", PRINT_COMMAND], env=environment)
    assert json.loads(again) == command
    if "-OO" in options:
        assert {"-E", "-s", "-B", "-OO"} < set(command)
    if "-X" in options:
        assert command[2:-2] == [
            *("-Wignore::ImportWarning", "-X", "utf8", "-X", "pycache_prefix=/a b")
        ]


def test_a_child_prints_to_its_parents_standard_error_and_reads_no_input() -> None:
    words = [sys.executable, "-c", STARTING]
    ended = subprocess.run(words, input="for the parent", capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "'' True\n")


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    """Modules of names that our processes import, and that end the process that imports them."""
    for name in ("queue", "random", "torch", "msgspec", "numpy", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire" / "__init__.py").write_text(HOSTILE)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        *(ENGINE_COMMAND, WORKER_COMMAND, GRAMMAR_COMMAND),
        python_command("quire.cluster.machines.agent_main"),
    ],
    ids=lambda command: command[-1].rpartition(".")[2],
)
def test_no_process_imports_from_the_working_folder(
    command: tuple[str, ...], hostile_folder: Path
) -> None:
    """They import all that they need at their start before they read their arguments."""
    words = [*command, "--help"]
    ended = subprocess.run(words, cwd=hostile_folder, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: {command[-1]}")
    without = [word for word in words if word != "-P"]
    ended = subprocess.run(without, cwd=hostile_folder, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (7, "taken from the working folder\n")


def test_output_before_the_start_is_kept_and_then_passed_on() -> None:
    text = StartText()
    words = [sys.executable, "-c", LEAVING]
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=text.descriptor, text=True)
    assert (ended.returncode, ended.stdout, text.read()) == (0, "before\nafter\n", "")
    text.close()


def test_the_end_of_what_a_process_said_names_its_failure() -> None:
    text = StartText()
    code = f"print('x' * {MAX_TEXT_BYTES}); import no_such_module"
    subprocess.run([sys.executable, "-c", code], stdout=text.descriptor, stderr=text.descriptor)
    assert len(text.read()) <= MAX_TEXT_BYTES
    assert last_line(text.read()) == ": ModuleNotFoundError: No module named 'no_such_module'"
    text.close()
    text.close()  # an engine's start may be cancelled while its end is looked into
    assert text.read() == ""
    assert last_line("") == ""


def test_a_process_is_started_elsewhere_once_the_working_folder_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert working_folder() is None
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert working_folder() == "/"
    for words in (["generate", "x"], ["bench", "throughput"]):
        assert cli.main(words) == 1
        assert "has been deleted" in capsys.readouterr().err
