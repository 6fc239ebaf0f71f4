"""Reads from a native library which machine and C library it needs, as a wheel's tag.

    python tools/wheel_tag.py LIBRARY        prints the tag

The tag is PEP 600's: manylinux_2_34_x86_64 says that glibc 2.34 has every symbol that the library
needs. Systems with glibc 2.28 have the C++ library of GCC 8, so its symbols may be used, too. A
library that needs newer ones, or other libraries, has no such tag and is refused. Called by the
packaging hook; needs readelf, which comes with each compiler.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ELF_MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}
"""Maps readelf's name of a processor family to the one of `uname -m`."""
LIBRARIES = re.compile(
    r"(libc|libm|libpthread|libdl|librt|libstdc\+\+|libgcc_s)\.so\.\d|ld-linux-[\w-]+\.so\.\d"
)
"""Names of the libraries that a wheel for manylinux may need."""
FIRST_GLIBC = 28
"""The minor version of glibc in the oldest systems that a tag may name."""
NEWEST_SYMBOLS = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Maps the families of symbols in GCC's libraries to the newest that manylinux_2_28 allows."""


class TagError(Exception):
    """The library can't be tagged; the message says why."""


@dataclass(frozen=True, slots=True)
class Elf:
    """The fields of a library's headers that its wheel's tag depends on."""

    #: The processor family, as `uname -m` names it.
    machine: str
    #: The libraries that the loader has to find.
    needed: tuple[str, ...]
    #: The versions of symbols that are used, by family: GLIBC has (2, 34) for GLIBC_2.34.
    versions: dict[str, set[tuple[int, ...]]]


def read_elf(library: Path) -> Elf:
    """Read the headers of a library. Raises TagError if they can't be read."""
    command = ["readelf", "--wide", "--file-header", "--dynamic", "--version-info", str(library)]
    try:
        environment = os.environ | {"LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise TagError(f"readelf can't be started ({error}); it is in the package binutils") from (
            error
        )
    if done.returncode != 0:
        raise TagError(f"{library} is no library: {done.stderr.strip()}")
    return parse(done.stdout)


def parse(text: str) -> Elf:
    """Parse what readelf prints."""
    machine = re.search(r"^ *Machine: +(.+)$", text, re.MULTILINE)
    if machine is None or machine[1] not in ELF_MACHINES:
        found = "none" if machine is None else machine[1]
        raise TagError(f"the processor family is {found}, but must be in {[*ELF_MACHINES]}")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
    versions: dict[str, set[tuple[int, ...]]] = {}
    for family, version in re.findall(r"\bName: ([A-Z]+)_([\d.]+)", text):
        versions.setdefault(family, set()).add(tuple(map(int, version.split("."))))
    return Elf(ELF_MACHINES[machine[1]], tuple(needed), versions)


def wheel_tag(elf: Elf) -> str:
    """The tag of a wheel with this library. Raises TagError if no tag is right."""
    foreign = [name for name in elf.needed if LIBRARIES.fullmatch(name) is None]
    if foreign:
        raise TagError(f"the library needs {', '.join(foreign)}, which other machines may lack")
    for family, newest in NEWEST_SYMBOLS.items():
        used = max(elf.versions.get(family, {()}))
        if used > newest:
            name = f"{family}_{'.'.join(map(str, used))}"
            raise TagError(f"the library needs {name}, which is newer than manylinux_2_28 allows")
    minor = max(minor for _, minor, *_ in (*elf.versions.get("GLIBC", ()), (2, FIRST_GLIBC)))
    return f"py3-none-manylinux_2_{minor}_{elf.machine}"


def main() -> int:
    """The command line of this file."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(wheel_tag(read_elf(Path(sys.argv[1]))))
    except TagError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
