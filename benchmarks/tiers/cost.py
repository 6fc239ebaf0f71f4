"""The cost of a cache folder in which nothing is found: throughput with and without it.

    python -m benchmarks.tiers.cost --model FOLDER [--requests 24] [--prompt 256] [--output 64]
        [--concurrent 8] [--rounds 7]

Two engines with equal pools compute the same fresh prompts in turns; one has a cache folder, into
which all that it publishes is written behind the steps. The time of a round ends with its last
token; what is still to be written then is written before the next round begins, outside of both
times. Prints prompt and output tokens a second of both, medians over the rounds, and the median of
the rounds' ratios; and what both take of the processors, which other processes disturb less.
"""

import argparse
import gc
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tiers.beside import BLOCK_SIZE, MIB, tier_bytes
from quire.assembly.build import build_engine
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine


def engine_of(given: argparse.Namespace, cache_dir: Path | None) -> Engine:
    """An engine whose pool has room for a quarter more than what runs at once."""
    num_tokens = given.concurrent * (given.prompt + given.output + BLOCK_SIZE)
    options: dict[str, Any] = {
        "model": given.model,
        "block_size": BLOCK_SIZE,
        "num_blocks": 5 * num_tokens // (4 * BLOCK_SIZE),
        "max_num_seqs": given.concurrent,
        "skip_tokenizer_init": True,
    }
    if cache_dir is not None:
        options |= {"cache_dir": str(cache_dir), "cache_size": "2GiB"}
    return build_engine(options)


def seconds_of(
    engine: Engine, prompts: Sequence[Sequence[int]], given: argparse.Namespace
) -> tuple[float, float]:
    """Until the last token of all prompts, which come at once: by the clock, and of processors."""
    params = DecodingParams(max_tokens=given.output, temperature=0.0)
    began_s, used_s = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        engine.add(Request(f"request {number}", list(prompt), params))
    while engine.has_work():
        engine.step()
    took_s, used_s = time.perf_counter() - began_s, time.process_time() - used_s
    engine.tier_work.drain(30.0)
    return took_s, used_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=24, help="of a round (%(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens (%(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens (%(default)s)")
    parser.add_argument("--concurrent", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--folder", help="for the cache; on the disk that is measured")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="quire-cost-", dir=given.folder))
    chance = random.Random(5)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    used: dict[str, list[float]] = {"off": [], "on": []}
    num_tokens = given.requests * (given.prompt + given.output)
    try:
        engines = {"off": engine_of(given, None), "on": engine_of(given, folder)}
        gc.collect()
        gc.freeze()  # as an engine's process does
        for number in range(-1, given.rounds):
            prompts = [
                [chance.randrange(100, 30_000) for _ in range(given.prompt)]
                for _ in range(given.requests)
            ]
            for name in sorted(engines, reverse=bool(number % 2)):
                took_s, used_s = seconds_of(engines[name], prompts, given)
                if number >= 0:  # the first round warms up
                    rates[name].append(num_tokens / took_s)
                    used[name].append(used_s)
        ratios = [on / off for off, on in zip(rates["off"], rates["on"], strict=True)]
        stored = tier_bytes(engines["on"])[1] / MIB
        engines["on"].tier_work.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, values in rates.items():
        print(
            f"cache folder {name}: {statistics.median(values):.0f} tokens/s,"
            f" {statistics.median(used[name]):.3f} s of processors a round"
        )
    print(f"on / off: {statistics.median(ratios):.3f}", end="")
    print(f" ({', '.join(f'{ratio:.3f}' for ratio in ratios)}); {stored:.0f} MiB stored")


if __name__ == "__main__":
    main()
