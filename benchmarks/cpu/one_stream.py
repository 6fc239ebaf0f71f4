"""One stream beside a plain read of memory, in turns of a few hundred milliseconds in one process.

    python -m benchmarks.cpu.one_stream --model MODEL [--precisions bf16,int8,int4] [--turns 30]

Where the bandwidth of a machine moves by tens of percent within minutes, a floor that was measured
at another time says little. Each turn reads a large array and then decodes some tokens; the share
of the floor is the median over turns of: seconds that the bytes of the turn's tokens take at the
bandwidth read before and after it, over the seconds that they took.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cpu.floors import PRECISIONS, Floors, ModelShape, Roofline
from quire import LLM, SamplingParams
from quire.bench.machine import NoiseMeter, processor

READ_BYTES = 256 << 20
PROMPT_TOKENS = 128


def read_bytes_s(numbers: torch.Tensor) -> float:
    """The better of two reads, with all threads; the engine holds torch to one."""
    best_s, num_threads = float("inf"), torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for _ in range(2):
        started_s = time.perf_counter()
        numbers.max()
        best_s = min(best_s, time.perf_counter() - started_s)
    torch.set_num_threads(num_threads)
    return numbers.nbytes / best_s


def measure(llm: LLM, shape: ModelShape, precision: str, turns: int, tokens: int) -> str:
    """A line: tokens per second, share of the floor, and how the bandwidth moved."""
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.int32)
    params = SamplingParams(max_tokens=tokens * (turns + 1), temperature=0, ignore_eos=True)
    prompt = {"prompt_token_ids": [300 + index for index in range(PROMPT_TOKENS)]}
    shares: list[float] = []
    rates: list[float] = []
    reads: list[float] = []
    with llm.start(prompt, params) as generation:
        for _ in range(tokens):
            generation.step()
        meter, before = NoiseMeter(), read_bytes_s(numbers)
        for turn in range(turns):
            started_s = time.perf_counter()
            for _ in range(tokens):
                generation.step()
            took_s = time.perf_counter() - started_s
            after = read_bytes_s(numbers)
            roofline = Roofline((before + after) / 2, dict.fromkeys(("bf16", "int8", "fp32"), 1e15))
            context = PROMPT_TOKENS + tokens * (turn + 1) + tokens // 2
            floor = Floors(shape, PRECISIONS[precision], roofline).decode_tok_s([context])
            rates.append(tokens / took_s)
            shares.append(rates[-1] / floor)
            reads.append(before / 1e9)
            before = after
        noise = meter.stop()
    return (
        f"{precision}: {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to"
        f" {max(rates):.1f}), {statistics.median(shares):.0%} of the floor; read"
        f" {statistics.median(reads):.1f} GB/s ({min(reads):.1f} to {max(reads):.1f});"
        f" others took {noise.other_cores or 0:.2f} cores"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=16, help="of a turn")
    args = parser.parse_args(words)
    shape = ModelShape.from_folder(args.model)
    print(f"{processor()}, {shape.name}", flush=True)
    for precision in args.precisions.split(","):
        quantization = None if precision == "bf16" else precision
        llm = LLM(
            model=args.model,
            quantization=quantization,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        print(measure(llm, shape, precision, args.turns, args.tokens), flush=True)
        del llm
    return 0


if __name__ == "__main__":
    sys.exit(main())
