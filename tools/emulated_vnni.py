"""Runs kernel tests of the instruction sets AVX-VNNI and AMX by AVX2 instructions.

    python -m tools.emulated_vnni [--amx] [--objects FOLDER] [arguments of pytest]

For a processor that has AVX2 and lacks AVX-VNNI. Builds a library whose set `avx_vnni` has the same
sources as always, compiled with `tests/kernels/cpu/emulated_vnni.h` instead of the compiler's
option, and the set `avx2` to compare with; runs pytest with them in this process. With `--amx`, the
set `avx_vnni` also has the products of AMX (`tests/kernels/cpu/emulated_amx.h`), which
`avx512_amx` combines with AVX-512. With `--objects`, object files are kept in that folder and used
again. By default the tests of linears run.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.kernels.cpu import build

ROOT = Path(__file__).resolve().parent.parent
KERNEL_TESTS = ROOT / "tests" / "kernels" / "cpu"
HEADERS = (KERNEL_TESTS / "emulated_vnni.h", KERNEL_TESTS / "emulated_amx.h")
DEFAULT_TESTS = (
    *("test_linear.py", "test_quantized_linear.py", "test_mixture.py", "test_rotation.py"),
    "block_quantized",
)
SET = "avx_vnni"


def main(words: Sequence[str] | None = None) -> int:
    """Build, and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--amx", action="store_true", help="with the products of AMX, too")
    parser.add_argument("--objects", type=Path, help="keep object files here, to use them again")
    args, tests = parser.parse_known_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        # The module is changed before the loader of the library, whose default is its LIBRARY, is
        # imported, and the digest of the library is that of the changed flags.
        build.LIBRARY = Path(scratch) / "_native.so"
        included = [word for path in HEADERS[: 1 + args.amx] for word in ("-include", str(path))]
        build._X86_ISAS[SET] = (*build._AVX2, *included)
        # Neither is optimized fully, which would take longer to compile.
        sets = ("avx2", SET)
        build.build(build.LIBRARY, args.objects, isas=sets, optimized=())

        from quire.kernels.cpu.library import NativeLibrary

        def is_supported(library: NativeLibrary, index: int) -> bool:
            name = library.isa_name(index).decode()
            return name == SET or bool(library._loaded.quire_isa_supported(index))

        pytest.MonkeyPatch().setattr(NativeLibrary, "isa_supported", is_supported, raising=False)
        return int(pytest.main(tests or ["-q", *(str(KERNEL_TESTS / it) for it in DEFAULT_TESTS)]))


if __name__ == "__main__":
    sys.exit(main())
