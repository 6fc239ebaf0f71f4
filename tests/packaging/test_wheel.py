"""The sdist contains every file of the repository, and a wheel the library that it is given."""

import importlib.util
import platform
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from quire.kernels.cpu import build
from quire.kernels.cpu.library import NativeLibrary
from quire.server.routes.admin.page import FOLDER

ROOT = Path(__file__).parents[2]
READ_BY_HATCHLING = {".gitignore", "LICENSE", "pyproject.toml"}
"""Files that hatchling puts into each sdist."""


@pytest.fixture(scope="module")
def packaging() -> ModuleType:
    """The module of the packaging hook."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_hook(packaging: ModuleType, version: str = "standard") -> dict[str, Any]:
    """The hook's data for a wheel; `version` is "standard" or "editable"."""
    app = SimpleNamespace(display_warning=print)
    hook = packaging.NativeKernelsHook(str(ROOT), {}, None, None, "", "wheel", app)
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    hook.initialize(version, data)
    hook.finalize(version, data, "")
    return data


def compile_library(path: Path, digest: str) -> None:
    source = path.with_suffix(".cpp")
    source.write_text(f'extern "C" const char* quire_source_digest() {{ return "{digest}"; }}\n')
    command = [build.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True)


def top_level_names() -> set[str]:
    """Names of what git tracks; in an unpacked sdist, of all that hatchling did not add."""
    if not (ROOT / ".git").exists():
        return {path.name for path in ROOT.iterdir()} - {"PKG-INFO"}
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.partition("/")[0] for name in listed.split("\0") if name}


def test_the_sdist_has_every_file_of_the_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = {
        name.removeprefix("/")
        for name in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    }
    assert top_level_names() == included | READ_BY_HATCHLING


def test_a_wheel_has_the_files_of_the_page() -> None:
    found = {each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    files = {f"quire/server/static/{path.name}" for path in FOLDER.iterdir()}
    assert "quire/server/static/app.js" in files <= found


def test_a_wheel_gets_the_library_that_was_compiled_for_it_and_its_tag(
    packaging: ModuleType,
    native_library: NativeLibrary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = tmp_path / "library.so"
    compile_library(library, build.source_digest())
    monkeypatch.setenv(packaging.LIBRARY, str(library))
    data = run_hook(packaging)
    assert data["force_include"] == {str(library): "quire/kernels/cpu/_native.so"}
    assert not data["pure_python"]
    assert data["tag"] == f"py3-none-manylinux_2_28_{platform.machine()}"


def test_a_wheel_gets_no_library_of_other_sources(
    packaging: ModuleType,
    native_library: NativeLibrary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = tmp_path / "library.so"
    compile_library(library, "another digest")
    monkeypatch.setenv(packaging.LIBRARY, str(library))
    with pytest.raises(ValueError, match=f"QUIRE_WHEEL_LIBRARY is {library}, which was not comp"):
        run_hook(packaging)


def test_the_library_of_this_machine_has_a_tag(
    packaging: ModuleType, native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(packaging.LIBRARY, str(native_library.path))
    tag = run_hook(packaging)["tag"]
    assert re.fullmatch(rf"py3-none-manylinux_2_\d\d_{platform.machine()}", tag)


def test_without_a_compiler_the_wheel_is_pure_python(
    packaging: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(packaging.LIBRARY, raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run_hook(packaging) == {"force_include": {}, "pure_python": True}
    assert "torch will compute" in capsys.readouterr().out


def test_an_editable_install_takes_the_current_library(
    packaging: ModuleType, native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run_hook(packaging, "editable") == {"force_include": {}, "pure_python": True}
