"""The scripts on machines that lack something, and the lock that they install from.

Each test has a copy of `scripts/` in a folder of its own (with a space in its name), and a PATH of
nothing but what the test puts there. Nothing is installed or downloaded.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("sh", "cat", "cksum", "date", "dirname", "sed", "uname", "env")
INPUTS = ("pyproject.toml", "requirements.lock", "constraints.txt")
NATIVE = Path("src", "quire", "kernels", "cpu")
NATIVE_INPUTS = (
    *("build.py", "csrc/table.cpp", "csrc/simd.h"),
    *("csrc/threads/pool.cpp", "csrc/attention/quantized/quantized.h"),
)
# Answers `build.py --digest` by the real Python, and prints every other command of Python.
PYTHON = f'case "$*" in *--digest*) exec "{sys.executable}" "$@"; esac; '


class Machine:
    """A copy of the repository's scripts, and the programs that are to be found on PATH."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root.parent / "bin"
        self.environment = {"PATH": str(self.bin), "LC_ALL": "C"}
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", root / "scripts")
        for name in INPUTS:
            shutil.copy(ROOT / name, root / name)
        for name in NATIVE_INPUTS:
            (root / NATIVE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / NATIVE / name, root / NATIVE / name)
        for name in TOOLS:
            found = shutil.which(name)
            assert found, f"this test needs {name}"
            (self.bin / name).symlink_to(found)

    def program(self, path: Path, body: str) -> None:
        """Put a shell script there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def python(self, body: str) -> None:
        """Put a Python there that knows the digest of the sources, and runs `body` otherwise."""
        self.program(self.root / ".venv" / "bin" / "python", PYTHON + body)

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.root / "scripts" / script), *words]
        return subprocess.run(
            command, env=self.environment, cwd=self.bin, capture_output=True, text=True, timeout=30
        )

    def set_up(self, kind: str) -> None:
        """As if `kind` had been installed: the stamps, and a quire that tells its words."""
        self.program(self.root / ".venv" / "bin" / "quire", 'printf "<%s>" "$@"')
        self.python('printf "<%s>" "$@"')
        for stamp, function in (
            (Path(".venv", f".quire-{kind}"), "checksum"),
            (Path("build", "native.sum"), "find_python; native_digest"),
        ):
            script = self.root / "scripts" / "stamp"
            self.program(script, f'. "{self.root}/scripts/lib.sh"; {function}')
            run = subprocess.run([script], check=True, capture_output=True, text=True)
            (self.root / stamp).parent.mkdir(exist_ok=True)
            (self.root / stamp).write_text(run.stdout)
        (self.root / NATIVE / "_native.so").write_text("")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "a copy")


def test_without_python_the_error_says_how_to_install_it(machine: Machine) -> None:
    run = machine.run("demo")
    assert run.returncode == 1
    assert run.stderr == (
        "quire: error: no python3 here; on Debian: apt-get install python3 python3-venv\n"
    )


def test_an_old_python_is_named(machine: Machine) -> None:
    machine.program(
        machine.bin / "python3", 'case "$2" in *platform*) echo 3.9.2;; *) exit 1; esac'
    )
    run = machine.run("setup")
    assert run.returncode == 1
    assert "Python 3.11 or newer is needed, but python3 is 3.9.2" in run.stderr


def test_a_newer_python_of_another_name_is_taken(machine: Machine) -> None:
    machine.program(machine.bin / "python3", "exit 1")
    body = 'case "$*" in *ensurepip*) exit 1; esac'
    machine.program(machine.bin / "python3.12", body)
    assert "can't make a virtual environment" in machine.run("setup").stderr


def test_a_python_without_venv_is_told_what_it_lacks(machine: Machine) -> None:
    machine.program(machine.bin / "python3", 'case "$*" in *ensurepip*) exit 1; esac')
    run = machine.run("test")
    assert run.returncode == 1
    assert "on Debian: apt-get install python3-venv" in run.stderr


@pytest.mark.parametrize("kind", ["runtime", "dev"])
def test_set_up_once_the_demo_starts_at_once_with_its_words(machine: Machine, kind: str) -> None:
    machine.set_up(kind)
    run = machine.run("demo", "generate", "a b", "--max-tokens", "3")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "<generate><a b><--max-tokens><3>"


def test_the_demo_without_words_asks_a_question(machine: Machine) -> None:
    machine.set_up("runtime")
    assert machine.run("demo").stdout == "<chat><--prompt><What does os.path.join do?>"


def test_tests_need_more_than_the_demo(machine: Machine) -> None:
    machine.set_up("dev")
    assert machine.run("test", "-k", "a b").stdout == "<-m><pytest><-k><a b>"
    (machine.root / ".venv" / ".quire-dev").rename(machine.root / ".venv" / ".quire-runtime")
    assert "(dev)" in machine.run("test").stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["-n", "auto", "--durations=20", "--rotate"]),
        (("--all",), ["-n", "auto", "--durations=20"]),
        (("tests/core", "--pdb"), ["tests/core", "--pdb"]),
    ],
)
def test_all_tests_use_all_processors_and_words_are_pytests(
    machine: Machine, words: tuple[str, ...], expected: list[str]
) -> None:
    machine.set_up("dev")
    assert machine.run("test", *words).stdout == "".join(
        f"<{word}>" for word in ("-m", "pytest", *expected)
    )


def test_fast_tests_are_chosen_by_folder_and_the_others_named(machine: Machine) -> None:
    machine.set_up("dev")
    for name in ("core", "engine", "server", "text"):
        (machine.root / "tests" / name).mkdir(parents=True)
    run = machine.run("test", "--fast")
    assert run.stderr == (
        "quire: leaves out the files in tests/ itself, and the folders engine server\n"
    )
    assert "<-n><auto>" in run.stdout and "<tests/core>" in run.stdout
    assert "<tests/engine>" not in run.stdout and "<tests/server>" not in run.stdout
    words = machine.run("test", "--fast", "--without-native", "-x").stdout
    assert words.startswith("<-m><pytest><--without-native><-x><tests/core>")


def test_the_folders_of_the_fast_tests_exist() -> None:
    text = (ROOT / "scripts" / "test").read_text()
    (folders,) = [line for line in text.splitlines() if line.startswith("FAST=")]
    for name in folders.removeprefix("FAST=").strip('"').split():
        assert list((ROOT / "tests" / name).rglob("test_*.py")), name


def test_the_tests_keep_compiled_modules(machine: Machine) -> None:
    machine.set_up("dev")
    machine.python('echo "${PYTHONDONTWRITEBYTECODE-kept}"')
    machine.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    assert machine.run("test").stdout == "kept\n"


@pytest.mark.parametrize("name", INPUTS)
def test_a_change_of_what_is_installed_from_sets_up_anew(machine: Machine, name: str) -> None:
    machine.set_up("runtime")
    with (machine.root / name).open("a") as file:
        file.write("# changed\n")
    assert "installing quire" in machine.run("demo").stderr


@pytest.mark.parametrize("name", NATIVE_INPUTS[1:])
def test_a_change_of_the_native_sources_compiles_them_and_no_more(
    machine: Machine, name: str
) -> None:
    machine.set_up("runtime")
    with (machine.root / NATIVE / name).open("a") as file:
        file.write("\n")
    run = machine.run("demo", "chat")
    build, folder = machine.root / NATIVE / "build.py", machine.root / "build" / "native"
    words = f"<-I><{build}><--objects><{folder}><--own-isa>"
    said = rf"quire: building the native kernels\n{re.escape(words)}quire: built .* in \d+ s\n"
    assert re.fullmatch(said, run.stderr)
    assert run.stdout == "<chat>"
    assert machine.run("demo", "chat").stderr == ""


def test_kernels_of_all_instruction_sets_are_built_where_asked_for_and_from_then_on(
    machine: Machine,
) -> None:
    machine.set_up("dev")
    assert "--own-isa" not in machine.run("setup", "--all-isas", "dev").stderr
    assert "building" not in machine.run("setup", "dev").stderr
    with (machine.root / NATIVE / NATIVE_INPUTS[1]).open("a") as file:
        file.write("\n")
    run = machine.run("test")
    assert "building the native kernels" in run.stderr and "--own-isa" not in run.stderr


def test_kernels_for_tests_are_built_where_asked_for_and_from_then_on(machine: Machine) -> None:
    machine.set_up("dev")
    assert "<--for-tests>" in machine.run("setup", "--for-tests", "dev").stderr
    assert "building" not in machine.run("test").stderr
    with (machine.root / NATIVE / NATIVE_INPUTS[1]).open("a") as file:
        file.write("\n")
    assert "<--for-tests>" in machine.run("test").stderr
    assert "-isa" not in machine.run("setup", "--all-isas", "dev").stderr
    assert "<--for-tests>" in machine.run("build", "--for-tests").stderr


def test_a_missing_library_is_built(machine: Machine) -> None:
    machine.set_up("runtime")
    (machine.root / NATIVE / "_native.so").unlink()
    assert "building the native kernels" in machine.run("demo").stderr


def test_kernels_that_can_not_be_built_are_told_of_each_time(machine: Machine) -> None:
    machine.set_up("runtime")
    (machine.root / NATIVE / "_native.so").unlink()
    machine.python('case "$*" in *build.py*) echo "no compiler" >&2; exit 1; esac')
    for _ in range(2):
        run = machine.run("demo", "chat")
        assert run.stderr.splitlines() == [
            "quire: building the native kernels",
            "no compiler",
            "quire: note: without the native kernels torch computes, which is slower",
        ]
        assert (run.returncode, run.stdout) == (0, "<chat>")


def test_the_tests_end_without_native_kernels_unless_told_to_go_on(machine: Machine) -> None:
    machine.set_up("dev")
    (machine.root / NATIVE / "_native.so").unlink()
    machine.python(
        'case "$*" in *build.py*) echo "no compiler" >&2; exit 1; esac; printf "<%s>" "$@"'
    )
    run = machine.run("test", "tests/core")
    assert (run.returncode, run.stdout) == (1, "")
    assert "no compiler" in run.stderr and "give --without-native" in run.stderr
    run = machine.run("test", "--without-native", "tests/core")
    assert (run.returncode, run.stdout) == (0, "<-m><pytest><--without-native><tests/core>")
    assert "<-n><auto>" in machine.run("test", "--without-native").stdout


@pytest.mark.parametrize(("words", "runs"), [((), True), (("--without-guards",), False)])
def test_the_checks_end_with_the_guards_unless_told_not_to(
    machine: Machine, words: tuple[str, ...], runs: bool
) -> None:
    machine.set_up("dev")
    for name in ("ruff", "mypy"):
        machine.program(machine.root / ".venv" / "bin" / name, f'echo "{name} $*"')
    run = machine.run("check", *words)
    assert run.returncode == 0
    assert "ruff format --check ." in run.stdout and "mypy" in run.stdout
    assert ("<tests/test_tidy.py>" in run.stdout) == runs


def test_build_compiles_with_the_compiler_that_is_named(machine: Machine) -> None:
    machine.set_up("dev")
    machine.environment["CXX"] = "a compiler"
    run = machine.run("build", "--output", "x.so")
    assert "<--compiler><a compiler><--output><x.so>" in run.stderr


def test_a_copied_environment_is_set_up_anew(machine: Machine, tmp_path: Path) -> None:
    machine.set_up("runtime")
    machine.root = machine.root.rename(tmp_path / "moved")
    assert "installing quire" in machine.run("demo").stderr


def test_setup_takes_its_words_in_any_order_and_refuses_others(machine: Machine) -> None:
    machine.set_up("dev")
    assert "ready: " in machine.run("setup").stderr
    assert "--own-isa" not in machine.run("setup", "dev", "--all-isas").stderr
    assert "one of" in machine.run("setup", "dev", "runtime").stderr
    run = machine.run("setup", "all")
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert "takes 'runtime' or 'dev', not 'all'" in run.stderr


def test_a_release_names_the_compiler_that_is_missing(machine: Machine) -> None:
    run = machine.run("release", "riscv64")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "quire: error: release takes 'x86_64' and 'aarch64', not 'riscv64'\n"
    (other,) = {"x86_64", "aarch64"} - {platform.machine()}
    run = machine.run("release", other)
    package = f"g++-{other.replace('_', '-')}-linux-gnu"
    assert run.returncode == 1
    assert run.stderr == (
        f"quire: error: there is no {other}-linux-gnu-g++; on Debian: apt-get install {package}\n"
    )
    assert not (machine.root / "dist").exists()


@pytest.mark.parametrize(
    "path",
    [
        "setup",
        "demo",
        "build",
        "test",
        "check",
        "commit-msg",
        "lock",
        "models",
        "release",
        "../.ci/run",
    ],
)
def test_a_script_can_be_run_and_parses(path: str) -> None:
    script = ROOT / "scripts" / path
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)


# ---- what CI runs ---------------------------------------------------------------------------


@pytest.fixture
def ci_run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `.ci/run` with scripts that print their name and words, and end with the given codes."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")

    def run(**codes: int) -> subprocess.CompletedProcess[str]:
        for name in ("setup", "models", "test", "check"):
            script = tmp_path / "scripts" / name
            script.write_text(
                f'#!/bin/sh\necho "{name} $*" | cut -c1-60\nexit {codes.get(name, 0)}\n'
            )
            script.chmod(0o755)
        command = [str(tmp_path / ".ci" / "run")]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    return run


def test_ci_runs_all_tests_those_on_torch_and_reports_the_checks_last(
    ci_run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    run = ci_run()
    assert run.returncode == 0, run.stderr
    first, *between, third, last = run.stdout.splitlines()
    assert first == "setup --for-tests dev"
    # Models are fetched while tests run that need none.
    models, on_torch = sorted(between)
    assert models.strip() == "models" and "--kernels torch" in on_torch
    assert third.strip() == "test" and last == "check --without-guards"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({"models": 3}, 0),
        ({"models": 1}, 1),
        ({"test": 5}, 5),
        ({"check": 1}, 1),
        ({"setup": 2}, 2),
    ],
)
def test_ci_fails_where_one_of_its_scripts_does(
    ci_run: Callable[..., subprocess.CompletedProcess[str]], codes: dict[str, int], expected: int
) -> None:
    run = ci_run(**codes)
    assert run.returncode == expected
    assert ("check --without-guards" in run.stdout) == (expected == 0 or "check" in codes)


# ---- the lock -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lock_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock_tool", ROOT / "tools" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _locked(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_lock_holds_every_direct_requirement(lock_tool: ModuleType) -> None:
    locked = _locked((ROOT / "requirements.lock").read_text())
    missing = [
        requirement
        for requirement in lock_tool.wanted()
        if lock_tool.requirement_name(requirement) not in locked
    ]
    assert missing == [], "run scripts/lock"


def test_the_lock_and_the_constraints_agree_on_torch() -> None:
    locked = _locked((ROOT / "requirements.lock").read_text())
    assert f"torch=={locked['torch']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_nothing_in_the_lock_tells_where_it_came_from() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert not [
        word for word in ("://", "@", "/", "+", "--") if word in text.replace("scripts/", "")
    ]


def test_the_lock_names_versions_and_who_needs_them(lock_tool: ModuleType) -> None:
    def item(name: str, version: str, *needs: str) -> dict[str, object]:
        return {"metadata": {"name": name, "version": version, "requires_dist": list(needs)}}

    report = {
        "install": [
            item("Torch", "2.13.0+cpu", "typing_extensions>=4", "optional; extra == 'x'"),
            item("typing_extensions", "4.1", "absent>=1; python_version < '3'"),
            item("optional", "1"),
        ]
    }
    text = lock_tool.lock_text(report, ["torch>=2.11"])
    assert text.removeprefix(lock_tool.HEADER) == (
        "optional==1\ntorch==2.13.0\n    # via quire\ntyping-extensions==4.1\n    # via torch\n"
    )


def test_the_lock_tool_explains_itself(lock_tool: ModuleType) -> None:
    tool = str(ROOT / "tools" / "lock.py")
    run = subprocess.run([sys.executable, tool], capture_output=True, text=True)
    assert run.returncode == 2
    assert "tools/lock.py write REPORT" in run.stderr
    run = subprocess.run([sys.executable, tool, "wanted"], capture_output=True, text=True)
    assert run.stdout.splitlines() == lock_tool.wanted()


def test_the_package_takes_a_range_of_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11" in project["dependencies"]
