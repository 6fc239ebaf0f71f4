"""Compiles `csrc/` into the native library; needs only a C++ compiler.

Neither torch nor headers of other packages are needed.

    python -m quire.kernels.cpu.build [--output FILE] [--objects FOLDER] [--compiler NAME]
        [--own-isa | --for-tests | --machine FAMILY]
    python -m quire.kernels.cpu.build --digest [--own-isa | --for-tests | --machine FAMILY]

Files with kernels are compiled once for each instruction set of the processor family, or with
`--own-isa` for the best one of this processor alone, which takes a quarter of the time. With
`--for-tests` they are compiled for those that this processor has, and only the best one is
optimized fully. All that is compiled is linked into one library, which selects an instruction set
when it is loaded. `--machine` compiles for another processor family, with a cross compiler that
`--compiler` names. The packaging hook runs this file by its path, so the file imports only the
standard library, and reads no environment variables.
"""

import argparse
import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "csrc"
LIBRARY = FOLDER / "_native.so"
COMPILERS = ("g++", "clang++", "c++")
MACHINES = ("x86_64", "aarch64")
"""The processor families that `--machine` takes, as `uname -m` names them on Linux."""

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
# With "-z defs" undefined names are errors. macOS's linker lacks the option, and refuses them
# anyway.
LINK_FLAGS = ("-pthread",) if sys.platform == "darwin" else ("-pthread", "-Wl,-z,defs")
# Overrides -O3 in `--for-tests`. Results are the same to the bit, since no flag lets the compiler
# reorder or fuse floating-point operations.
FAST_COMPILE_FLAG = "-O1"
# Compiled once for all instruction sets; the files of every other folder are compiled for each.
COMMON_FOLDERS = ("library", "packing", "threads")

# Headers of the system and the compiler that most files include: parsing them took 40% of all
# processor time.
PRECOMPILED_HEADER = "precompiled.h"
# Headers are precompiled for more files than these: precompiling takes as long as six parses.
MAX_PARSED = 6

CPUINFO = Path("/proc/cpuinfo")
# Linux's names of the features that each instruction set needs; `is_supported` of api.cpp checks
# the same features.
_AVX2_FEATURES = frozenset({"avx2", "fma"})
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_BF16_FEATURES = _AVX512_FEATURES | {"avx512_vnni", "avx512_bf16"}
# Compilers need ARMv8.2 for dot products, and then use the atomic instructions of ARMv8.1.
_DOTPROD_FEATURES = frozenset({"asimddp", "atomics"})
_FEATURES = {
    "avx2": _AVX2_FEATURES,
    "avx_vnni": _AVX2_FEATURES | {"avx_vnni"},
    "avx512": _AVX512_FEATURES,
    "avx512_amx": _AVX512_BF16_FEATURES | {"amx_tile", "amx_int8"},
    "avx512_bf16": _AVX512_BF16_FEATURES,
    "neon_dotprod": _DOTPROD_FEATURES,
    "neon_i8mm": _DOTPROD_FEATURES | {"i8mm"},
    "neon_bf16": _DOTPROD_FEATURES | {"i8mm", "bf16"},
}

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"))
_AVX512_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mprefer-vector-width=512")
_X86_ISAS = {
    "portable": (),
    "avx2": _AVX2,
    "avx_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": (*_AVX512, "-mprefer-vector-width=512"),
    # Listed before the best set, so it is used only on request: its speed was never measured.
    "avx512_amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-int8"),
    "avx512_bf16": _AVX512_BF16,
}
# GCC otherwise moves the loads of an unrolled loop to its front, where registers don't suffice.
# Clang ignores the flag; the second one silences its warning.
_NEON = ("-fno-schedule-insns", "-Wno-ignored-optimization-argument")
_ARM64_ISAS = {
    "neon": _NEON,
    "neon_dotprod": (*_NEON, "-march=armv8.2-a+dotprod"),
    "neon_i8mm": (*_NEON, "-march=armv8.2-a+dotprod+i8mm"),
    "neon_bf16": (*_NEON, "-march=armv8.2-a+dotprod+i8mm+bf16"),
}


class BuildError(Exception):
    """The library can't be built on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One object file: a source and the instruction set that it is compiled for, if any."""

    source: Path
    isa: str | None
    #: The flags of that instruction set, and FAST_COMPILE_FLAG if it is not optimized fully.
    isa_flags: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        return [] if self.isa is None else [f"-DQUIRE_ISA={self.isa}", *self.isa_flags]


def isa_flags(machine: str | None = None) -> dict[str, Sequence[str]]:
    """The instruction sets of a library for a processor family, with their flags.

    `machine` is the family's name as `platform.machine` has it, by default this machine's.
    """
    family = (machine or platform.machine()).lower()  # ARM64 is aarch64 on Linux, arm64 on macOS
    if family in ("x86_64", "amd64"):
        return dict(_X86_ISAS)
    return dict(_ARM64_ISAS) if family in ("aarch64", "arm64") else {"portable": ()}


def own_isas() -> tuple[str, ...]:
    """The best instruction set of this processor; all if the system doesn't list its features."""
    supported = supported_isas()
    return tuple(isa_flags()) if supported is None else supported[-1:]


def supported_isas() -> tuple[str, ...] | None:
    """The instruction sets that this processor has, the best one last.

    None if the system doesn't list its features.
    """
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    # x86 has a line of flags, ARM one of Features.
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    if listed is None:
        return None
    features = frozenset(listed.partition(":")[2].split())
    return tuple(isa for isa in isa_flags() if _FEATURES.get(isa, frozenset()) <= features)


def source_digest(folder: Path = SOURCES, machine: str | None = None) -> str:
    """The digest of the sources and flags. A library with another digest is not loaded.

    `machine` is as for `isa_flags`.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".cpp", ".h"):
            name = path.relative_to(folder).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((COMMON_FLAGS, sorted(isa_flags(machine).items()))).encode())
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


def is_current(library: Path = LIBRARY) -> bool:
    """Whether `library` can be loaded and has the digest of the present sources."""
    try:
        digest = ctypes.CDLL(str(library)).quire_source_digest
    except (OSError, AttributeError):
        return False
    digest.restype = ctypes.c_char_p
    return bool(digest().decode() == source_digest(SOURCES))


def build(
    output: Path = LIBRARY,
    objects: Path | None = None,
    compiler_name: str | None = None,
    isas: Sequence[str] | None = None,
    machine: str | None = None,
    optimized: Sequence[str] | None = None,
) -> None:
    """Compile and link the library.

    `objects` is a folder that keeps object files, which are reused while their sources and flags
    don't change. If it is None, they are deleted. `compiler_name` is as for `find_compiler`. `isas`
    are names of `isa_flags`, by default all. `machine` is as for `isa_flags`; the compiler must
    compile for it. `optimized` names the instruction sets that are optimized fully, by default all.
    Raises BuildError with the compiler's messages.
    """
    compiler = find_compiler(compiler_name)
    chosen = tuple(isas or isa_flags(machine))
    digest = source_digest(SOURCES, machine)
    with tempfile.TemporaryDirectory() as scratch:
        folder = objects or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        all_units = _units(chosen, machine, optimized)
        full_speed = chosen if optimized is None else optimized
        flags = {unit: _flags(unit, chosen, digest, full_speed) for unit in all_units}
        units = {unit: _object_path(compiler, unit, flags[unit], folder) for unit in flags}
        missing = [unit for unit, target in units.items() if not target.exists()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            headers = _precompile(compiler, missing, Path(scratch), pool)
            done = [
                pool.submit(
                    _compile, compiler, unit, units[unit], flags[unit], headers.get(unit.isa)
                )
                for unit in missing
            ]
            for compiled in done:
                compiled.result()
        linked = output.with_name(f"{output.name}.{os.getpid()}")
        _run([compiler, "-shared", *LINK_FLAGS, "-o", str(linked), *map(str, units.values())])
        linked.replace(output)  # processes that have the old file open keep it


def _units(
    isas: Sequence[str], machine: str | None = None, optimized: Sequence[str] | None = None
) -> list[_Unit]:
    """The object files of a library; see `build` for the arguments."""
    flags = {isa: tuple(of_isa) for isa, of_isa in isa_flags(machine).items()}
    if optimized is not None:
        flags |= {isa: (*flags[isa], FAST_COMPILE_FLAG) for isa in flags if isa not in optimized}
    units = []
    for path in sorted(SOURCES.rglob("*.cpp")):
        is_common = path.parent.name in COMMON_FOLDERS
        if is_common:
            units.append(_Unit(path, None))
        else:
            units += [_Unit(path, isa, flags[isa]) for isa in isas]
    return units


def _precompile(
    compiler: str, units: Sequence[_Unit], scratch: Path, pool: ThreadPoolExecutor
) -> dict[str | None, Future[Path]]:
    """The precompiled headers for `units`, in `scratch`, by instruction set.

    Object files are the same without precompiled headers, so a header is precompiled only for an
    instruction set with enough units.
    """
    header = SOURCES / PRECOMPILED_HEADER
    counts = Counter((unit.isa, unit.isa_flags) for unit in units if unit.isa is not None)

    def precompile(isa: str, isa_flags: tuple[str, ...]) -> Path:
        copy = scratch / isa / header.name
        copy.parent.mkdir()
        shutil.copyfile(header, copy)
        flags = [*COMMON_FLAGS, *_Unit(header, isa, isa_flags).flags()]
        # Both compilers look for it under this name where the header is included.
        output = copy.with_name(f"{copy.name}.gch")
        _run([compiler, *flags, "-x", "c++-header", str(copy), "-o", str(output)])
        return copy

    return {
        isa: pool.submit(precompile, isa, isa_flags)
        for (isa, isa_flags), count in counts.items()
        if count > MAX_PARSED
    }


def _flags(unit: _Unit, isas: Sequence[str], digest: str, optimized: Sequence[str]) -> list[str]:
    flags = [*COMMON_FLAGS, *unit.flags()]
    if unit.source.name == "api.cpp":
        best_first = " ".join(f"ISA({isa},{int(isa in optimized)})" for isa in reversed(isas))
        flags += [f'-DQUIRE_SOURCE_DIGEST="{digest}"', f"-DQUIRE_ISAS={best_first}"]
    return flags


def _object_path(compiler: str, unit: _Unit, flags: Sequence[str], folder: Path) -> Path:
    """The object file of `unit`; its name has a digest of the sources and flags."""
    key = hashlib.sha256(repr((compiler, flags)).encode())
    for path in _with_headers(unit.source):
        key.update(path.read_bytes())
    return folder / f"{unit.source.stem}-{unit.isa or 'all'}-{key.hexdigest()[:16]}.o"


def _compile(
    compiler: str,
    unit: _Unit,
    target: Path,
    flags: Sequence[str],
    header: Future[Path] | None,
) -> None:
    """header: the header that has been precompiled, to be included before the source."""
    if header is not None:
        flags = [*flags, "-include", str(header.result())]
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    _run([compiler, *flags, f"-I{SOURCES}", "-c", str(unit.source), "-o", str(partial)])
    partial.replace(target)


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
    # First, define the options.
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.cpu.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library (in the package)")
    parser.add_argument("--objects", type=Path, help="keep object files here, to reuse them")
    parser.add_argument("--compiler", help=f"compiler (the first found of {', '.join(COMPILERS)})")
    family = parser.add_mutually_exclusive_group()
    family.add_argument(
        "--own-isa",
        action="store_true",
        help="compile for this processor's best instruction set, not for all of its family",
    )
    family.add_argument(
        "--for-tests",
        action="store_true",
        help="compile for the instruction sets that this processor has, and optimize fully for the"
        " best one only",
    )
    family.add_argument(
        "--machine",
        choices=MACHINES,
        help="compile for this processor family, with a --compiler for it (this machine's family)",
    )
    parser.add_argument(
        "--digest",
        action="store_true",
        help="build nothing, and print the sources' digest, followed by the instruction set with"
        " --own-isa, or 'tests' with --for-tests",
    )
    arguments = parser.parse_args()
    # Then print the digest, or build.
    isas = own_isas() if arguments.own_isa else None
    if arguments.for_tests:
        isas = supported_isas()
    if arguments.digest:
        kind = ["tests"] if arguments.for_tests else isas or ()
        print(source_digest(SOURCES, arguments.machine), *kind)
        return 0
    try:
        build(
            arguments.output,
            arguments.objects,
            arguments.compiler,
            isas,
            arguments.machine,
            own_isas() if arguments.for_tests else None,
        )
    except BuildError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
