"""What is compiled, when it is compiled again, and what is said where it can't be.

The real sources are compiled by whoever installs quire; here the compiler is a script that notes
what it is called with.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.kernels.cpu import build
from quire.kernels.cpu.library import NativeLibrary
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
            "precompiled.h": "",
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

    def calls(self, isas: Sequence[str] | None = None) -> list[str]:
        """Runs the build. Returns the compiler's arguments, the last call's being the linker's."""
        self.log.unlink(missing_ok=True)
        build.build(self.output, self.objects, str(self.compiler), isas)
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


def test_one_instruction_set_can_be_compiled_and_the_library_lists_no_other(
    workshop: Workshop,
) -> None:
    *compiled, link = workshop.calls(["portable"])
    assert len(compiled) == 4 and link.count(".o") == 4
    (linear,) = [call for call in compiled if "linear.cpp" in call]
    assert "-DQUIRE_ISA=portable " in linear
    (api,) = [call for call in compiled if "api.cpp" in call]
    assert "-DQUIRE_ISAS=ISA(portable,1) " in api
    # The others are compiled when they are asked for, and named in the library.
    *compiled, link = workshop.calls()
    others = len(build.isa_flags()) - 1
    assert len(compiled) == (others + 1 if others else 0) and link.count(".o") == 4 + others


def test_for_tests_only_some_instruction_sets_are_optimized_fully(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for index in range(build.MAX_PARSED):  # enough files for a precompiled header
        (workshop.sources / "linear" / f"{index}.cpp").write_text("")
    build.build(workshop.output, workshop.objects, str(workshop.compiler), optimized=["avx2"])
    *compiled, _ = workshop.log.read_text().splitlines()
    for call in compiled:
        is_reduced = "-DQUIRE_ISA=" in call and "-DQUIRE_ISA=avx2 " not in call
        levels = [word for word in call.split() if word.startswith("-O")]
        assert levels == ["-O3", "-O1"] if is_reduced else levels == ["-O3"], call
    (api,) = [call for call in compiled if "api.cpp" in call]
    assert "ISA(avx512,0) ISA(avx_vnni,0) ISA(avx2,1) ISA(portable,0) " in api
    num_others = len(build.isa_flags()) - 1
    assert sum("-O1" in call for call in compiled) == num_others * (1 + 1 + build.MAX_PARSED)
    # Object files of the two levels differ in name, so neither is taken for the other.
    fully = workshop.calls()
    assert sum("linear.cpp" in call for call in fully) == num_others


def test_another_family_has_its_own_instruction_sets_and_digest(workshop: Workshop) -> None:
    for machine in build.MACHINES:
        workshop.log.unlink(missing_ok=True)
        build.build(workshop.output, workshop.objects, str(workshop.compiler), machine=machine)
        *compiled, _ = workshop.log.read_text().splitlines()
        (api,) = [call for call in compiled if "api.cpp" in call]
        digest = build.source_digest(workshop.sources, machine)
        assert f'-DQUIRE_SOURCE_DIGEST="{digest}"' in api
        isas = " ".join(f"ISA({isa},1)" for isa in reversed(build.isa_flags(machine)))
        assert f"-DQUIRE_ISAS={isas} " in api
    assert len({build.source_digest(workshop.sources, machine) for machine in build.MACHINES}) == 2


def test_headers_are_precompiled_once_where_many_files_include_them(workshop: Workshop) -> None:
    for index in range(build.MAX_PARSED + 1):
        (workshop.sources / "linear" / f"{index}.cpp").write_text("")
    *compiled, link = workshop.calls()
    for isa in build.isa_flags():
        of_isa = [call for call in compiled if f"-DQUIRE_ISA={isa} " in call]
        (header,) = [call for call in of_isa if "-x c++-header" in call]
        copy = header.split("-o ")[1].removesuffix(".gch")
        assert len(of_isa) == 1 + 1 + build.MAX_PARSED + 1
        assert all(f"-include {copy} " in call for call in of_isa if call != header)
        assert not Path(copy).exists() and copy not in link
    assert not any("-include" in call for call in compiled if "pool.cpp" in call)
    (workshop.sources / "linear" / "0.cpp").write_text("// changed\n")
    assert workshop.compiled() == {"0.cpp", "api.cpp"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2", "portable"),
        ("fpu sse2 avx2", "portable"),
        ("sse2 fma avx2", "avx2"),
        ("sse2 avx_vnni", "portable"),
        ("sse2 fma avx2 avx_vnni", "avx_vnni"),
        ("fma avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512"),
        ("fma avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16", "avx512_bf16"),
        (
            "fma avx2 avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16",
            "avx512_bf16",
        ),
        (
            "fma avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8",
            "avx512_bf16",
        ),
    ],
)
def test_the_own_instruction_set_is_the_best_that_the_system_lists(
    flags: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    assert build.own_isas() == tuple(build.isa_flags()), "where nothing is listed"
    assert build.supported_isas() is None
    build.CPUINFO.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\n")
    assert build.own_isas() == (expected,)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert build.own_isas() == ("portable",)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("fp asimd crc32", "neon"),
        ("fp asimd asimddp", "neon"),
        ("fp asimd crc32 atomics asimddp", "neon_dotprod"),
        ("fp asimd atomics asimddp sve i8mm", "neon_i8mm"),
        ("fp asimd atomics asimddp sve i8mm bf16", "neon_bf16"),
    ],
)
def test_the_own_instruction_set_of_arm_is_the_best_that_the_system_lists(
    features: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    build.CPUINFO.write_text(f"processor\t: 0\nFeatures\t: {features}\n\n")
    assert build.own_isas() == (expected,)


def test_the_instruction_sets_of_tests_are_those_that_the_system_lists(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    build.CPUINFO.write_text("processor\t: 0\nflags\t\t: sse2 fma avx2\n\n")
    words = ["--for-tests", "--output", workshop.output, "--compiler", workshop.compiler]
    monkeypatch.setattr(sys, "argv", ["build.py", *map(str, words)])
    assert build.main() == 0
    (api,) = [call for call in workshop.log.read_text().splitlines() if "api.cpp" in call]
    assert "-DQUIRE_ISAS=ISA(avx2,1) ISA(portable,0) " in api


def test_the_own_instruction_set_is_the_one_that_the_library_takes(
    native_library: NativeLibrary,
) -> None:
    best, *_ = native_library.isas()
    assert best in build.own_isas()


def test_a_library_is_current_until_its_sources_change(
    native_library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.is_current(native_library.path)
    assert not build.is_current(tmp_path / "none.so")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert not build.is_current(native_library.path)


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


def test_the_command_knows_other_families(tmp_path: Path) -> None:
    command = [sys.executable, "-I", build.__file__, "--digest", "--machine", "aarch64"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout == f"{build.source_digest(machine='aarch64')}\n"
    for words in (["--machine", "riscv64"], ["--machine", "x86_64", "--own-isa"]):
        command = [sys.executable, "-I", build.__file__, "--output", str(tmp_path / "x"), *words]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2 and "--machine" in run.stderr


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


def test_each_processor_family_gets_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x86, arm = build.isa_flags("x86_64"), build.isa_flags("aarch64")
    assert tuple(x86) == ("portable", "avx2", "avx_vnni", "avx512", "avx512_amx", "avx512_bf16")
    assert tuple(arm) == ("neon", "neon_dotprod", "neon_i8mm", "neon_bf16")
    assert sorted(NATIVE_KERNELS) == sorted(x86 | arm)
    for name, expected in [("AMD64", x86), ("arm64", arm), ("riscv64", {"portable": ()})]:
        monkeypatch.setattr(platform, "machine", lambda name=name: name)
        assert build.isa_flags() == expected


def test_every_source_is_compiled_where_it_belongs() -> None:
    """A file that declares nothing of an instruction set's namespace is compiled once."""
    every = build._units(tuple(build.isa_flags()))
    units = {(unit.source.name, unit.isa) for unit in every}
    assert len(units) == len(every)
    for path in build.SOURCES.rglob("*.cpp"):
        is_per_isa = re.search(r"QUIRE_ISA\b", path.read_text()) is not None
        isas = set(build.isa_flags()) if is_per_isa else {None}
        assert {isa for name, isa in units if name == path.name} == isas, path.name


@pytest.fixture
def compiler() -> str:
    """The real g++."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ here")
    return found


def test_the_real_compiler_accepts_the_flags(compiler: str, tmp_path: Path) -> None:
    """The newest instruction sets need g++ 11 or clang++ 12."""
    source = tmp_path / "empty.cpp"
    source.write_text("")
    for flags in build.isa_flags().values():
        command = [compiler, *build.COMMON_FLAGS, *flags, "-c", str(source), "-o", os.devnull]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_the_compiler_keeps_prefetches_of_adapters(compiler: str) -> None:
    """g++ 12 treats a function that only prefetches as one without effects, and removes calls."""
    source = build.SOURCES / "adapters" / "adapters.cpp"
    options = [*build.COMMON_FLAGS, "-DQUIRE_ISA=portable", f"-I{build.SOURCES}", "-S", "-o-"]
    command = [compiler, *options, str(source)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    body = re.search(r"^\S*panel_deltas\S*:$(.*?)\.cfi_endproc", assembly, re.MULTILINE | re.DOTALL)
    assert body is not None
    # The compiler may inline the prefetches of the linear's own panels, or call their function.
    calls = [line for line in body[1].splitlines() if "prefetch_panel" in line]
    prefetches = re.findall(r"\b(?:prefetch\w*|prfm)\s", body[1])
    assert len(prefetches) + len(calls) > 1 and prefetches
