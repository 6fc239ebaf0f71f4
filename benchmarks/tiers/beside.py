"""The effect of loads from disk and of write-behind on the inter-token latency of streams.

    python -m benchmarks.tiers.beside --model FOLDER [--streams 4] [--tokens 2048] [--every 8]
        [--steps 800] [--rounds 5] [--cold]

Two engines answer the same requests in turns. Streams decode all the time, and every few
steps (--every) a request for one token arrives, with one of a few long prefixes:

- memory: no cache folder, and a pool in which all prefixes stay, so each is a hit;
- disk: a cache folder, and a pool that has room for two of them, so each is loaded, and what the
  streams make is stored behind them.

So both compute the same tokens over the same contexts, and what differs are the moves. Of each
round: p50 and p99 of the time between two tokens of a stream, and their ratios; then the medians
over the rounds, how many bytes were loaded and stored a second, and the time from a request's
arrival to its token. --cold: the files are dropped from the page cache before each round.
"""

import argparse
import gc
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tiers.warm_restart import drop_from_page_cache
from quire.assembly.build import build_engine
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine

BLOCK_SIZE = 16
STREAM_PROMPT_TOKENS = 64
NUM_PREFIXES = 6
PREFIXES_IN_POOL = 2
MIB = 1 << 20


@dataclass(slots=True)
class Round:
    """gaps_s: between two tokens of the streams. first_s: of each request, until its token came."""

    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def gap_s(self, percent: int) -> float:
        return statistics.quantiles(self.gaps_s, n=100)[percent - 1]


def tier_bytes(engine: Engine) -> tuple[int, int]:
    """Loaded and stored so far."""
    counts: dict[str, Any] = engine.stats().tiers
    disk = counts["by_tier"]["disk"] if counts else {}
    return disk.get("loaded_bytes", 0), disk.get("stored_bytes", 0)


class Driver:
    """One engine, with its streams and its prefixes."""

    def __init__(self, engine: Engine, given: argparse.Namespace) -> None:
        self._engine, self._given = engine, given
        chance = random.Random(7)
        self._prefixes = [
            [chance.randrange(100, 30_000) for _ in range(given.tokens)]
            for _ in range(NUM_PREFIXES)
        ]
        self._chance = chance
        self._next_prefix = self._num_requests = 0

    def fill(self) -> None:
        """Compute all prefixes, until they are stored."""
        for prefix in self._prefixes:
            self._add(prefix, 1)
            while self._engine.has_work():
                self._engine.step()
        self._engine.tier_work.drain(30.0)

    def run(self, num_steps: int) -> Round:
        """Run num_steps steps, with fresh streams."""
        engine, found = self._engine, Round()
        streams = [
            self._add([self._chance.randrange(100, 30_000) for _ in range(STREAM_PROMPT_TOKENS)])
            for _ in range(self._given.streams)
        ]
        for _ in range(20):
            engine.step()
        began, loaded, stored = time.perf_counter(), *tier_bytes(engine)
        arrived: dict[str, float] = {}
        before = began
        for number in range(num_steps):
            if number % self._given.every == 0:
                prefix = self._prefixes[self._next_prefix % NUM_PREFIXES]
                self._next_prefix += 1
                # With one token more, both engines find the whole prefix and compute that token.
                prompt = [*prefix, self._chance.randrange(100, 30_000)]
                arrived[self._add(prompt, 1)] = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            found.gaps_s.append(now - before)
            before = now
            for output in outputs:
                if output.request_id in arrived:
                    found.first_s.append(now - arrived.pop(output.request_id))
        found.seconds = time.perf_counter() - began
        found.loaded_bytes, found.stored_bytes = (
            count - past for count, past in zip(tier_bytes(engine), (loaded, stored), strict=True)
        )
        for name in (*streams, *arrived):
            engine.abort(name)
        while engine.has_work():
            engine.step()
        engine.tier_work.drain(30.0)
        return found

    def _add(self, prompt: Sequence[int], num_tokens: int | None = None) -> str:
        self._num_requests += 1
        name = f"request {self._num_requests}"
        count = self._given.steps + 100 if num_tokens is None else num_tokens
        params = DecodingParams(max_tokens=count, temperature=0.0)
        self._engine.add(Request(name, list(prompt), params))
        return name


def engine_of(given: argparse.Namespace, num_prefixes: int, cache_dir: Path | None) -> Engine:
    """An engine whose pool has room for the streams and num_prefixes prefixes."""
    stream_tokens = STREAM_PROMPT_TOKENS + given.steps + 200
    num_tokens = given.streams * stream_tokens + num_prefixes * given.tokens
    options: dict[str, Any] = {
        "model": given.model,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_tokens // BLOCK_SIZE + 32,
        "max_num_seqs": given.streams + 8,
        "skip_tokenizer_init": True,
    }
    if cache_dir is not None:
        options |= {"cache_dir": str(cache_dir), "cache_size": "4GiB"}
    return build_engine(options)


def line(name: str, found: Round) -> str:
    loads = found.loaded_bytes / found.seconds / MIB
    stores = found.stored_bytes / found.seconds / MIB
    return (
        f"{name}: ITL p50 {1e3 * found.gap_s(50):.2f} ms, p99 {1e3 * found.gap_s(99):.2f} ms;"
        f" first token {1e3 * statistics.median(found.first_s):.1f} ms;"
        f" {loads:.0f} MiB/s loaded, {stores:.1f} MiB/s stored"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=4, help="that decode (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prefix (%(default)s)")
    parser.add_argument("--every", type=int, default=8, help="steps between requests (%(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache")
    parser.add_argument("--folder", help="for the cache; on the disk that is measured")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="quire-beside-", dir=given.folder))
    ratios: dict[int, list[float]] = {50: [], 99: []}
    try:
        engines = {
            "memory": engine_of(given, NUM_PREFIXES, None),
            "disk": engine_of(given, PREFIXES_IN_POOL, folder),
        }
        gc.collect()
        gc.freeze()  # as an engine's process does
        drivers = {name: Driver(engine, given) for name, engine in engines.items()}
        for driver in drivers.values():
            driver.fill()
            driver.run(100)
        for number in range(given.rounds):
            rounds: dict[str, Round] = {}
            order = sorted(drivers, reverse=bool(number % 2))
            for name in order:
                if given.cold:
                    drop_from_page_cache(folder)
                rounds[name] = drivers[name].run(given.steps)
                print(f"round {number + 1}, {line(name, rounds[name])}", flush=True)
            for percent, values in ratios.items():
                values.append(rounds["disk"].gap_s(percent) / rounds["memory"].gap_s(percent))
        for percent, values in ratios.items():
            print(f"ITL p{percent}, disk / memory: {statistics.median(values):.3f}", end="")
            print(f" ({', '.join(f'{value:.2f}' for value in values)})")
        engines["disk"].tier_work.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
