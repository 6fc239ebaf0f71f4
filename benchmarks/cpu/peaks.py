"""Operations per second of an instruction set in registers alone, by precision.

Compiles `peaks_csrc/`, which has the instructions of the kernels, and calls its functions in as
many threads as are asked for. Called by `roofline.py`.
"""

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.kernels.cpu import build

SOURCES = Path(__file__).with_name("peaks_csrc")
PRECISIONS = ("fp32", "bf16", "int8", "int4")
NUM_STEPS = 4_000_000
NUM_REPS = 6


def peak_ops_s(isa: str, num_threads: int) -> dict[str, float]:
    """The most operations per second, by precision; a multiplication and an addition are two.

    `isa` is a name of `build.isa_flags`. Raises BuildError without a compiler, and
    CalledProcessError if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peaks.so"
        flags = [*build.COMMON_FLAGS, *build.isa_flags()[isa], f"-DQUIRE_ISA={isa}"]
        flags.append("-fvisibility=default")
        command = [build.find_compiler(), "-shared", *flags, f"-I{build.SOURCES}"]
        subprocess.run([*command, *SOURCES.glob("*.cpp"), "-o", library], check=True)
        functions = ctypes.CDLL(str(library))
    with ThreadPoolExecutor(num_threads) as pool:
        return {
            name: 2 * _products_s(functions[f"peak_{name}"], num_threads, pool)
            for name in PRECISIONS
        }


def _products_s(
    function: Callable[[int], int], num_threads: int, pool: ThreadPoolExecutor
) -> float:
    """The most products per second of NUM_REPS calls, each made by all threads at once."""
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    rates = []
    for _ in range(NUM_REPS):
        started_s = time.perf_counter()
        num_products = sum(pool.map(function, [NUM_STEPS] * num_threads))
        rates.append(num_products / (time.perf_counter() - started_s))
    return max(rates)
