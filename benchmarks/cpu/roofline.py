"""The machine's best rates: bytes read per second, operations per second in large products.

    python -m benchmarks.cpu.roofline --threads 2 [--kernels avx2] [--out roofline.json]

Bandwidth: the best of reading 512 MiB by a sum and by a maximum, far more than any cache holds.
Rates: the best of square products of 2,048 and 4,096 through torch, whose libraries are near the
processor's limit where they use its instructions, and of products in registers by those of an
instruction set of the native kernels (`peaks.py`). The best of all repetitions counts, since a
floor must not be beaten. A process of its own, so that `cpu.py` measures it in turn with the
engines.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cpu.peaks import peak_ops_s
from quire.bench.machine import NoiseMeter, processor
from quire.kernels.cpu.library import load_library

READ_BYTES = 512 << 20
SIZES = (2048, 4096)
NUM_REPS = 6


def best_s(call: Callable[[], object], num_reps: int = NUM_REPS) -> float:
    """The least seconds of a call, after one to warm up."""
    call()
    found = []
    for _ in range(num_reps):
        started_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - started_s)
    return min(found)


def read_bytes_s() -> float:
    """Bytes per second."""
    import torch  # after the number of threads is fixed

    numbers = torch.ones(READ_BYTES // 4)
    whole = numbers.view(torch.int32)
    return READ_BYTES / min(best_s(numbers.sum), best_s(whole.max))


def matrix_ops_s() -> dict[str, float]:
    """Operations per second by precision; a multiplication and an addition are two."""
    import torch

    def draw(size: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 127, (size, size), dtype=dtype)
        return torch.randn(size, size).to(dtype)

    multiply: dict[str, tuple[torch.dtype, Callable[..., torch.Tensor]]] = {
        "bf16": (torch.bfloat16, torch.mm),
        "fp32": (torch.float32, torch.mm),
        "int8": (torch.int8, torch._int_mm),
    }
    rates: dict[str, float] = {}
    for name, (dtype, product) in multiply.items():
        for size in SIZES:
            left, right = draw(size, dtype), draw(size, dtype).t()
            rate = 2 * size**3 / best_s(partial(product, left, right), 3)
            rates[name] = max(rate, rates.get(name, 0.0))
    return rates


def ops_s(isa: str, num_threads: int) -> dict[str, float]:
    """The most operations per second by precision: torch's matrix products', or in registers."""
    rates = matrix_ops_s()
    for name, rate in peak_ops_s(isa, num_threads).items():
        rates[name] = max(rate, rates.get(name, 0.0))
    return rates


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", help="an instruction set; by default this processor's best")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    meter = NoiseMeter()
    result = {
        "processor": processor(),
        "threads": args.threads,
        "read_bytes_s": read_bytes_s(),
        "ops_s": ops_s(args.kernels or next(iter(load_library().isas())), args.threads),
    }
    noise = meter.stop()
    result |= {"other_cpus": noise.other_cores, "steal_cpus": noise.steal_cores}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
