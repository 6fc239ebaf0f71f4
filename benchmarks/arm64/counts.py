"""Counts the ARM64 instructions of linears under qemu, beside llama.cpp's.

    python -m benchmarks.arm64.counts [--objects FOLDER] [--llama SOURCES] [--formats NAMES]
        [--isas NAMES] [--rows NUMBERS]

The products are those of a token of `llama-160m`: 12 layers and the head. `llama.cpp` is compiled
for the same features, and places its weights as it does by itself. Counts are exact and the same
in each run; they leave out attention, norms and the creation of threads. Needs qemu-user with
plugins, aarch64-linux-gnu-g++, and cmake and ninja for llama.cpp. docs/performance.md has a table.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.kernels.cpu import build

FOLDER = Path(__file__).resolve().parent
LIBRARIES = Path("/usr/aarch64-linux-gnu")
COMPILER = "aarch64-linux-gnu-g++"
FORMATS = ("Q8_0", "Q4_K", "Q6_K", "int8", "int4", "bf16")
#: llama.cpp's names.
PEER_FORMATS = {"Q8_0": "q8_0", "Q4_K": "q4_K", "Q6_K": "q6_K", "bf16": "bf16"}
ROWS = (1, 16, 128)
NUM_LAYERS = 12
#: Outputs and inputs of a layer's linears. quire multiplies some of them as one.
LAYER = ((1280, 768), (768, 768), (4096, 768), (768, 2048))
PEER_LAYER = ((768, 768), (256, 768), (256, 768), (768, 768), (2048, 768), (2048, 768), (768, 2048))
HEAD = (32_000, 768)


@dataclass(frozen=True, slots=True)
class Counts:
    """The instructions of a step's products."""

    #: Instructions, of these SIMD and floating-point ones, and loads and stores.
    instructions: int = 0
    simd: int = 0
    memory: int = 0
    #: Weights that are read.
    bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.instructions + other.instructions,
            self.simd + other.simd,
            self.memory + other.memory,
            self.bytes + other.bytes,
        )

    def times(self, number: int) -> "Counts":
        return Counts(
            self.instructions * number,
            self.simd * number,
            self.memory * number,
            self.bytes * number,
        )


class Counter:
    """Runs programs for ARM64 under qemu with the plugin that counts."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._plugin = scratch / "plugin.so"
        compile_with(build.find_compiler(), FOLDER / "plugin.cpp", self._plugin, "-shared", "-fPIC")

    def compile(self, name: str, *options: str) -> Path:
        """The program of a source of this folder."""
        program = self._scratch / name
        compile_with(COMPILER, FOLDER / f"{name}.cpp", program, f"-I{FOLDER}", *options)
        return program

    def step(self, command: Sequence[str], layer: Sequence[tuple[int, int]], rows: int) -> Counts:
        """The sum of a step's products: a program that takes shapes multiplies them one by one.

        A step of more than 16 rows is a part of a prompt, so its head has one row.
        """
        head_rows = rows if rows <= 16 else 1
        shapes = [f"{rows}:{n}:{k}" for n, k in layer] + [f"{head_rows}:{HEAD[0]}:{HEAD[1]}"]
        qemu = ["qemu-aarch64", "-cpu", "max", "-L", str(LIBRARIES)]
        done = subprocess.run(
            [*qemu, "-plugin", str(self._plugin), *command, *shapes],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        ends = [
            line.split()[2:] for line in done.stderr.splitlines() if line.startswith("mark 127")
        ]
        # Each product is counted twice; the first one also allocates memory.
        products = [
            Counts(*map(int, [*counts, num_bytes]))
            for counts, num_bytes in zip(ends[1::2], done.stdout.split(), strict=True)
        ]
        total = products[-1]
        for product in products[:-1]:
            total += product.times(NUM_LAYERS)
        return total


def compile_with(compiler: str, source: Path, target: Path, *options: str) -> None:
    command = [compiler, "-O2", "-std=c++20", str(source), *options, "-o", str(target)]
    subprocess.run(command, check=True)


def build_llama(sources: Path, folder: Path, isa: str) -> list[str]:
    """Configure and compile llama.cpp's kernels; the linker's arguments for them."""
    march = next(flag for flag in build.isa_flags("aarch64")[isa] if flag.startswith("-march="))
    options = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": COMPILER.replace("g++", "gcc"),
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "GGML_NATIVE": "OFF",
        "GGML_OPENMP": "OFF",
        "GGML_CPU_ARM_ARCH": march.removeprefix("-march="),
        "LLAMA_BUILD_COMMON": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    configure = ["cmake", "-S", str(sources), "-B", str(folder), "-G", "Ninja", *defined]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    compile_command = ["ninja", "-C", str(folder), "ggml-base", "ggml-cpu"]
    subprocess.run(compile_command, check=True, stdout=subprocess.DEVNULL)
    archives = [str(next(folder.rglob(f"lib{name}.a"))) for name in ("ggml-cpu", "ggml-base")]
    return [f"-I{sources}/ggml/include", *archives, "-pthread"]


def main() -> int:
    """The command line of this file."""
    # First, define the options.
    all_isas = tuple(build.isa_flags("aarch64"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arm64.counts", description=__doc__)
    parser.add_argument("--library", type=Path, help="a library for ARM64, instead of compiling it")
    parser.add_argument("--objects", type=Path, help="keep object files here, to reuse them")
    parser.add_argument("--llama", type=Path, help="llama.cpp's sources, to count its kernels too")
    parser.add_argument("--formats", default=",".join(FORMATS), help="(%(default)s)")
    parser.add_argument("--isas", default=",".join(all_isas), help="(%(default)s)")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="(%(default)s)")
    arguments = parser.parse_args()
    # Then compile, and count.
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        objects = (arguments.objects or folder / "objects").resolve()
        library = arguments.library or folder / "library.so"
        if arguments.library is None:
            build.build(library, objects, COMPILER, machine="aarch64")
        counter = Counter(folder)
        quire = [
            str(counter.compile("quire_linears", f"-I{build.SOURCES}")),
            str(library.resolve()),
        ]
        print("| format, set | rows | engine | instructions | SIMD | memory | bytes |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
        for isa in arguments.isas.split(","):
            peer = None
            if arguments.llama is not None and isa != "neon":
                linked = build_llama(arguments.llama.resolve(), objects / f"llama-{isa}", isa)
                peer = str(counter.compile("ggml_linears", *linked))
            for name in arguments.formats.split(","):
                for rows in map(int, arguments.rows.split(",")):
                    own = counter.step([*quire, isa, name], LAYER, rows)
                    print_line(f"{name}, {isa}", rows, "quire", own)
                    if peer is not None and name in PEER_FORMATS:
                        others = counter.step([peer, PEER_FORMATS[name]], PEER_LAYER, rows)
                        print_line("", rows, "llama.cpp", others)
    return 0


def print_line(what: str, rows: int, engine: str, counts: Counts) -> None:
    """Millions, of a whole step."""
    numbers = (counts.instructions, counts.simd, counts.memory, counts.bytes)
    cells = " | ".join(f"{number / 1e6:,.1f}" for number in numbers)
    print(f"| {what} | {rows} | {engine} | {cells} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
