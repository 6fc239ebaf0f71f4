"""Compiles `csrc/` into the native library; needs only a C++ compiler.

Neither torch nor headers of other packages are needed.

    python -m quire.kernels.cpu.build [--output FILE] [--objects FOLDER] [--compiler NAME]
    python -m quire.kernels.cpu.build --digest

Files with kernels are compiled once for each instruction set of the processor family. All variants
are linked into one library, which selects an instruction set when it is loaded. The packaging hook
runs this file by its path, so the file imports only the standard library, and reads no environment
variables.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "csrc"
LIBRARY = FOLDER / "_native.so"
COMPILERS = ("g++", "clang++", "c++")

COMMON_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    # Vectors pass between functions of one file only, so the ABI of such calls doesn't matter.
    "-Wno-psabi",
    # GCC 12 warns about an undefined operand in its own AVX-512 intrinsics. Clang does not know
    # that warning.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"),
    # Results must not depend on which multiplications and additions the compiler fuses.
    *("-ffp-contract=off", "-fno-math-errno"),
)
# Compiled once for all instruction sets; the files of every other folder are compiled for each.
COMMON_FOLDERS = ("library", "packing", "threads")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"))
_X86_ISAS = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": (*_AVX512, "-mprefer-vector-width=512"),
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mprefer-vector-width=512"),
}


class BuildError(Exception):
    """The library can't be built on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One object file: a source and the instruction set that it is compiled for, if any."""

    source: Path
    isa: str | None

    def flags(self) -> list[str]:
        if self.isa is None:
            return []
        return [f"-DQUIRE_ISA={self.isa}", *isa_flags()[self.isa]]


def isa_flags() -> dict[str, Sequence[str]]:
    """The instruction sets of a library for this machine's processor family, with their flags."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return dict(_X86_ISAS) if is_x86 else {"portable": ()}


def source_digest(folder: Path = SOURCES) -> str:
    """The digest of the sources and flags. A library with another digest is not loaded."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".cpp", ".h"):
            name = path.relative_to(folder).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((COMMON_FLAGS, sorted(isa_flags().items()))).encode())
    return digest.hexdigest()[:16]


def find_compiler(name: str | None = None) -> str:
    """The path of the named compiler, by default of the first of COMPILERS that is installed.

    Raises BuildError if there is none.
    """
    for candidate in (name,) if name else COMPILERS:
        found = shutil.which(candidate)
        if found is not None:
            return found
    if name:
        raise BuildError(f"there is no C++ compiler {name!r}")
    raise BuildError("no C++ compiler was found (g++ or clang++; on Debian: apt-get install g++)")


def build(
    output: Path = LIBRARY, objects: Path | None = None, compiler_name: str | None = None
) -> None:
    """Compile and link the library.

    `objects` is a folder that keeps object files, which are reused while their sources and flags
    don't change. If it is None, they are deleted. `compiler_name` is as for `find_compiler`.
    Raises BuildError with the compiler's messages.
    """
    compiler = find_compiler(compiler_name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = objects or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            paths = list(pool.map(lambda unit: _compile(compiler, unit, folder), _units()))
        linked = output.with_name(f"{output.name}.{os.getpid()}")
        _run([compiler, "-shared", "-pthread", "-Wl,-z,defs", "-o", str(linked), *map(str, paths)])
        linked.replace(output)  # processes that have the old file open keep it


def _units() -> list[_Unit]:
    units = []
    for path in sorted(SOURCES.rglob("*.cpp")):
        is_common = path.parent.name in COMMON_FOLDERS
        units += [_Unit(path, isa) for isa in ([None] if is_common else isa_flags())]
    return units


def _compile(compiler: str, unit: _Unit, folder: Path) -> Path:
    flags = [*COMMON_FLAGS, *unit.flags()]
    if unit.source.name == "api.cpp":
        flags.append(f'-DQUIRE_SOURCE_DIGEST="{source_digest(SOURCES)}"')
    key = hashlib.sha256(repr((compiler, flags)).encode())
    for path in _with_headers(unit.source):
        key.update(path.read_bytes())
    target = folder / f"{unit.source.stem}-{unit.isa or 'all'}-{key.hexdigest()[:16]}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        _run([compiler, *flags, f"-I{SOURCES}", "-c", str(unit.source), "-o", str(partial)])
        partial.replace(target)
    return target


def _with_headers(source: Path) -> list[Path]:
    """The source and all headers of `csrc` that it includes, without duplicates."""
    found = [source]
    for path in found:  # the loop appends to the list
        for name in re.findall(r'^#include "([\w/]+\.h)"', path.read_text(), re.MULTILINE):
            if SOURCES / name not in found:
                found.append(SOURCES / name)
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.cpu.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library (in the package)")
    parser.add_argument("--objects", type=Path, help="keep object files here, to reuse them")
    parser.add_argument("--compiler", help=f"instead of the first there of {', '.join(COMPILERS)}")
    parser.add_argument("--digest", action="store_true", help="print the sources' digest instead")
    arguments = parser.parse_args()
    if arguments.digest:
        print(source_digest(SOURCES))
        return 0
    try:
        build(arguments.output, arguments.objects, arguments.compiler)
    except BuildError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
