"""Runs tests of the ARM64 kernels on an x86-64 machine, under qemu.

    python -m tools.arm64 --root FOLDER --packages FOLDER [--cpus NAMES] [pytest arguments]
    python -m tools.arm64 --root FOLDER --packages FOLDER --engine [MODEL ...]

It compiles the library by aarch64-linux-gnu-g++, copies the checkout's files to a temporary folder
with it, and runs pytest there, once for each processor that qemu emulates. With --engine, a whole
engine runs instead (`tools.engine_tokens`), and its tokens are compared with this machine's.
The folders hold Python for ARM64, and the packages that the tests import; docs/install.md says how
to make them. Emulated processors are a hundred times as slow as real ones, so nothing here
measures time; `benchmarks.arm64.counts` counts instructions.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire.kernels.cpu import build

CHECKOUT = Path(__file__).resolve().parent.parent
CPUS = ("neoverse-n1", "max")
"""A processor with the dot products of ARMv8.2, and one with all that qemu knows. On both, the
tests try each instruction set that the processor has, `neon` among them. torch's own wheel is ended
by an illegal instruction on a processor without ARMv8.2, such as cortex-a72."""
TESTS = ("tests/kernels/cpu",)
COMPILER = "aarch64-linux-gnu-g++"


def copy_checkout(target: Path) -> None:
    """Copy the files of the checkout, except those that git ignores."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (CHECKOUT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(CHECKOUT / name, target / name)


def minor_version(python: Path) -> int:
    """The 11 of python3.11; -1 for other files beside it, such as python3.11-config."""
    number = python.name.removeprefix("python3.")
    return int(number) if number.isdecimal() else -1


def run_python(
    folder: Path, cpu: str, root: Path, packages: Path, arguments: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` on an emulated processor, and show its output when it has ended."""
    python = max(root.glob("usr/bin/python3.*"), key=minor_version)
    paths = [packages, folder / "src", folder]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "QEMU_LD_PREFIX": str(root),
    }
    command = ["qemu-aarch64", "-cpu", cpu, "-L", str(root), str(python), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, end="", flush=True)
    return done


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(prog="python -m tools.arm64", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="has usr/bin/python3 for ARM64")
    parser.add_argument("--packages", type=Path, required=True, help="has torch for ARM64")
    parser.add_argument("--cpus", default=",".join(CPUS), help="(%(default)s)")
    parser.add_argument(
        "--engine", action="store_true", help="compare the tokens of models, instead of testing"
    )
    parser.add_argument("--objects", type=Path, help="keep object files here, to reuse them")
    arguments, names = parser.parse_known_args()
    if not list(arguments.root.glob("usr/bin/python3.*")):
        parser.error(f"--root is {arguments.root}, but there is no usr/bin/python3.* in it")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_checkout(folder)
        library = folder / build.LIBRARY.relative_to(CHECKOUT)
        # -O1 gives the same results, and takes a third of the time to compile.
        build.build(library, arguments.objects, COMPILER, machine="aarch64", optimized=())
        expected = ""
        if arguments.engine:
            options = ["-m", "tools.engine_tokens", *names]
            own = [sys.executable, *options]
            expected = subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True).stdout
        else:
            options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(names or TESTS)]
        failed = []
        for cpu in arguments.cpus.split(","):
            print(f"{cpu}:", flush=True)
            root, packages = arguments.root.resolve(), arguments.packages.resolve()
            done = run_python(folder, cpu, root, packages, options)
            if done.returncode != 0:
                failed.append(f"{cpu} (exit status {done.returncode})")
            elif arguments.engine and done.stdout != expected:
                failed.append(f"{cpu} (tokens differ; this machine's are\n{expected})")
    print(f"failed on {', '.join(failed)}" if failed else "passed on each processor")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
