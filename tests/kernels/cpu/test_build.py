"""What is compiled, when it is compiled again, and what is said where it can't be.

The real sources are compiled by whoever installs quire; here the compiler is a script that notes
what it is called with.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.cpu import build
from quire.kernels.options import NATIVE_KERNELS

COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
for word in "$@"; do
    case "$word" in *fails.cpp) echo "fails.cpp:1: error: no such thing" >&2; exit 1;; esac
done
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
"""


class Workshop:
    """Sources, objects and a compiler of our own in a folder."""

    def __init__(self, root: Path) -> None:
        self.sources, self.objects = root / "csrc", root / "objects"
        self.output, self.log = root / "out.so", root / "log"
        self.sources.mkdir()
        self.compiler = root / "compiler"
        self.compiler.write_text(COMPILER.format(log=self.log))
        self.compiler.chmod(0o755)
        for name, text in {
            "library/api.cpp": '#include "library/api.h"\n',
            "threads/pool.cpp": "",
            "packing/pack_rows.cpp": "",
            "linear/linear.cpp": '#include "linear/tile.h"\n',
            "library/api.h": "",
            "linear/tile.h": '#include "deep.h"\n',
            "deep.h": "",
        }.items():
            path = self.sources / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    def calls(self) -> list[str]:
        """Runs the build. Returns the compiler's arguments, the last call's being the linker's."""
        self.log.unlink(missing_ok=True)
        build.build(self.output, self.objects, str(self.compiler))
        return self.log.read_text().splitlines()

    def compiled(self) -> set[str]:
        """The names of the files that a build compiles."""
        return {Path(call.split(" -c ")[1].split()[0]).name for call in self.calls()[:-1]}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path)
    monkeypatch.setattr(build, "SOURCES", made.sources)
    return made


def test_kernels_are_compiled_for_each_instruction_set_and_the_rest_once(
    workshop: Workshop,
) -> None:
    *compiled, link = workshop.calls()
    isas = build.isa_flags()
    assert len(compiled) == 3 + len(isas)
    for isa, flags in isas.items():
        (call,) = [call for call in compiled if f"-DQUIRE_ISA={isa} " in f"{call} "]
        assert "linear.cpp" in call
        assert set(flags) <= set(call.split())
    assert "-shared" in link
    assert link.count(".o") == len(compiled)
    assert workshop.output.read_text() == "made\n"


def test_the_library_carries_the_digest_of_its_sources(workshop: Workshop) -> None:
    (call,) = [call for call in workshop.calls() if "api.cpp" in call]
    assert f'-DQUIRE_SOURCE_DIGEST="{build.source_digest(workshop.sources)}"' in call


def test_only_what_changed_is_compiled_again(workshop: Workshop) -> None:
    assert workshop.compiled() == {"api.cpp", "pool.cpp", "pack_rows.cpp", "linear.cpp"}
    assert workshop.compiled() == set()
    (workshop.sources / "threads" / "pool.cpp").write_text("// changed\n")
    changed_anyway = {"api.cpp"}  # the digest is in it
    assert workshop.compiled() == {"pool.cpp"} | changed_anyway


def test_a_header_recompiles_what_includes_it_at_any_depth(workshop: Workshop) -> None:
    workshop.calls()
    (workshop.sources / "deep.h").write_text("// changed\n")
    assert workshop.compiled() == {"linear.cpp", "api.cpp"}


def test_without_a_folder_for_objects_nothing_is_left_behind(
    workshop: Workshop, tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir())
    build.build(workshop.output, None, str(workshop.compiler))
    assert set(tmp_path.iterdir()) - before == {workshop.output, workshop.log}


@pytest.mark.parametrize("name", ["library/api.cpp", "linear/tile.h"])
def test_the_digest_changes_with_every_file(workshop: Workshop, name: str) -> None:
    before = build.source_digest(workshop.sources)
    (workshop.sources / "notes.txt").write_text("not compiled")
    assert build.source_digest(workshop.sources) == before
    (workshop.sources / name).write_text("// changed\n")
    assert build.source_digest(workshop.sources) != before


def test_the_digest_changes_with_the_flags(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.source_digest(workshop.sources)
    monkeypatch.setattr(build, "COMMON_FLAGS", (*build.COMMON_FLAGS, "-g"))
    assert build.source_digest(workshop.sources) != before


def test_the_command_prints_the_digest_of_the_sources_and_builds_nothing(tmp_path: Path) -> None:
    library = tmp_path / "out.so"
    command = [sys.executable, "-I", build.__file__, "--digest", "--output", str(library)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout == f"{build.source_digest()}\n"
    assert not library.exists()


def test_a_failed_build_shows_the_compilers_error(workshop: Workshop) -> None:
    (workshop.sources / "fails.cpp").write_text("")
    with pytest.raises(build.BuildError, match=r"fails\.cpp:1: error: no such thing"):
        workshop.calls()
    assert not workshop.output.exists()


def test_the_first_compiler_that_is_there_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)  # not our business
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found.*apt-get install g"):
        build.find_compiler()
    for name in ("c++", "clang++"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
        assert build.find_compiler() == str(tmp_path / name)
    assert build.find_compiler("c++") == str(tmp_path / "c++")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler 'icpx'"):
        build.find_compiler("icpx")


def test_the_command_says_why_it_failed(tmp_path: Path) -> None:
    command = [sys.executable, build.__file__, "--output", str(tmp_path / "x.so")]
    run = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=False
    )
    assert run.returncode == 1
    assert run.stderr.startswith("quire: error: no C++ compiler was found")
    assert list(tmp_path.iterdir()) == []


def test_other_processors_get_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert tuple(build.isa_flags()) == ("portable", "avx2", "avx512", "avx512_bf16")
    assert sorted(NATIVE_KERNELS) == sorted(build.isa_flags())
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert build.isa_flags() == {"portable": ()}


def test_every_source_is_compiled_where_it_belongs() -> None:
    """A file that declares nothing of an instruction set's namespace is compiled once."""
    units = {(unit.source.name, unit.isa) for unit in build._units()}
    assert len(units) == len(build._units())
    for path in build.SOURCES.rglob("*.cpp"):
        is_per_isa = "QUIRE_ISA" in path.read_text()
        isas = set(build.isa_flags()) if is_per_isa else {None}
        assert {isa for name, isa in units if name == path.name} == isas, path.name


def test_the_real_compiler_accepts_the_flags(tmp_path: Path) -> None:
    """Of every instruction set; the newest need g++ 10 or clang++ 9."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    source = tmp_path / "empty.cpp"
    source.write_text("")
    for flags in build.isa_flags().values():
        command = ["g++", *build.COMMON_FLAGS, *flags, "-c", str(source), "-o", os.devnull]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""
