"""Tags of wheels: those that a library's headers justify, and the libraries that get none."""

import subprocess
import sys
from pathlib import Path

import pytest
from tools.wheel_tag import TagError, parse, read_elf, wheel_tag

# Lines of what readelf prints of a library that was compiled for ARM.
READELF = """\
ELF Header:
  Class:                             ELF64
  Machine:                           AArch64
Dynamic section at offset 0x5d58f8 contains 29 entries:
  Tag        Type                         Name/Value
 0x0000000000000001 (NEEDED)             Shared library: [libstdc++.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-aarch64.so.1]
 0x000000000000000e (SONAME)             Library soname: [_native.so]
Version needs section '.gnu.version_r' contains 2 entries:
  000000: Version: 1  File: libstdc++.so.6  Cnt: 2
  0x0010:   Name: GLIBCXX_3.4.22  Flags: none  Version: 6
  0x0018:   Name: CXXABI_1.3.11  Flags: none  Version: 7
  0x0020: Version: 1  File: libc.so.6  Cnt: 2
  0x0030:   Name: GLIBC_2.17  Flags: none  Version: 5
  0x0040:   Name: GLIBC_2.34  Flags: none  Version: 4
"""


def test_the_newest_symbol_decides() -> None:
    elf = parse(READELF)
    assert elf.machine == "aarch64"
    assert elf.needed == ("libstdc++.so.6", "libc.so.6", "ld-linux-aarch64.so.1")
    assert elf.versions == {
        "GLIBC": {(2, 17), (2, 34)},
        "GLIBCXX": {(3, 4, 22)},
        "CXXABI": {(1, 3, 11)},
    }
    assert wheel_tag(elf) == "py3-none-manylinux_2_34_aarch64"


def test_a_tag_is_not_below_the_first_one() -> None:
    elf = parse(READELF.replace("2.34", "2.2.5"))
    assert wheel_tag(elf) == "py3-none-manylinux_2_28_aarch64"


@pytest.mark.parametrize("name", ["libgomp.so.1", "libcuda.so.1", "libc.musl-aarch64.so.1"])
def test_a_library_that_needs_others_has_no_tag(name: str) -> None:
    with pytest.raises(TagError, match=f"the library needs {name}, which other machines may lack"):
        wheel_tag(parse(READELF.replace("libstdc++.so.6", name)))


@pytest.mark.parametrize("name", ["GLIBCXX_3.4.25", "CXXABI_1.3.13", "GCC_12.0.0"])
def test_a_library_that_needs_a_newer_c_plus_plus_library_has_no_tag(name: str) -> None:
    text = READELF.replace("GLIBCXX_3.4.22", name)
    with pytest.raises(TagError, match=f"the library needs {name}, which is newer than"):
        wheel_tag(parse(text))


def test_other_families_have_no_tag() -> None:
    with pytest.raises(TagError, match="the processor family is RISC-V, but must be in"):
        parse(READELF.replace("AArch64", "RISC-V"))


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("text")
    with pytest.raises(TagError, match=r"text\.so is no library"):
        read_elf(path)


def test_the_command_says_why_there_is_no_tag(tmp_path: Path) -> None:
    command = [sys.executable, "tools/wheel_tag.py"]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    command.append(str(tmp_path / "none.so"))
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("quire: error: ")
