"""Latency under load: quire's and a peer's HTTP servers, the same arrivals, alternating in one run.

    python -m benchmarks.server.load --setup peers.toml --model llama-160m --precision bf16 \\
        --rates 2,inf --num-requests 96 --rounds 3 --out load.json --markdown load.md

Requests arrive as a Poisson process with each rate per second (inf: all at once), with the lengths
of the common workload and random prompts, and are streamed through OpenAI's /v1/completions. Each
server is started anew for a round and answers two requests before it counts. TTFT is from sending a
request to its first text, ITL the time between two texts of an answer, both as the client sees
them; p50 and p99 over all requests of a round, medians over rounds. The client runs on the same
cores. """

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu.peer_setup import OURS, EngineSetup, Model, SetupError, choose, read_setup
from benchmarks.cpu.tables import LOUD_CORES, NONE, number, table
from benchmarks.server.load_client import complete, free_port, get_status
from quire.bench.machine import NoiseMeter
from quire.bench.metrics import Timeline, figures, medians
from quire.bench.workload import BenchRequest, WorkloadSpec, make_requests

HOST = "127.0.0.1"
VOCABULARY_SIZE = 30_000
START_LIMIT_S = 300.0
SHOWN = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "output_throughput")


@dataclass(slots=True)
class Round:
    """One server under one load. figures: as `quire.bench.metrics` has them."""

    engine: str
    rate: float
    index: int
    figures: dict[str, float | None]
    texts_per_token: float
    other_cores: float


def arrival_times_s(rate: float, count: int, seed: int) -> list[float]:
    """When requests come after the start, the first at 0; a rate of inf: all at once."""
    import numpy as np

    gaps = np.random.default_rng(seed).exponential(1.0, count - 1) / rate
    return [0.0, *np.cumsum(gaps).tolist()]


@contextmanager
def served(engine: EngineSetup, model: Model, args: argparse.Namespace) -> Iterator[Any]:
    """(process, port) of a server that answers /health; ended afterwards."""
    port = free_port(HOST)
    placed = engine.models[model.name]
    values = {"port": str(port), "host": HOST, "model": placed.path}
    values |= {"threads": str(args.threads), "max_num_seqs": str(model.max_num_seqs)}
    command = [*args.prefix, *(word.format(**values) for word in engine.server)]
    log = args.folder / f"{engine.key.replace(' ', '-')}.log"
    environment = {**os.environ, **engine.environment}
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            _wait_until_healthy(process, port, log)
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise SetupError(f"the server ended with {process.returncode}; see {log}")
        if get_status(HOST, port, "/health") == 200:
            return
        time.sleep(0.2)
    raise SetupError(f"the server did not answer /health in {START_LIMIT_S:.0f} s; see {log}")


def run_round(
    port: int, requests: Sequence[BenchRequest], arrivals_s: Sequence[float]
) -> tuple[list[Timeline], float]:
    """One timeline of texts per request, and the seconds from the first arrival to the last end."""

    async def one(request: BenchRequest, arrival_s: float, start_s: float) -> Timeline:
        await asyncio.sleep(max(0.0, start_s + arrival_s - time.perf_counter()))
        sent_s = time.perf_counter()
        prompt = request.prompt_token_ids
        times_s = await complete(HOST, port, prompt, request.output_len)
        return Timeline(len(prompt), sent_s, times_s)

    async def every() -> tuple[list[Timeline], float]:
        start_s = time.perf_counter()
        pairs = zip(requests, arrivals_s, strict=True)
        found = await asyncio.gather(*(one(request, at_s, start_s) for request, at_s in pairs))
        return list(found), time.perf_counter() - start_s

    return asyncio.run(every())


def measure(engine: EngineSetup, model: Model, args: argparse.Namespace, index: int) -> list[Round]:
    """One server, started anew, under every rate."""
    rounds = []
    with served(engine, model, args) as (process, port):
        warm_up = WorkloadSpec(num_prompts=2, seed=99)
        run_round(port, make_requests(warm_up, VOCABULARY_SIZE, index), [0.0, 0.0])
        for rate in args.rates:
            spec = WorkloadSpec(num_prompts=args.num_requests)
            # Another key for each run: the prompts of the last one may be cached.
            key = index * len(args.rates) + args.rates.index(rate)
            requests = make_requests(spec, VOCABULARY_SIZE, key)
            arrivals_s = arrival_times_s(rate, len(requests), seed=key)
            meter, server_s, started_s = NoiseMeter(), _cpu_s(process), time.perf_counter()
            timelines, duration_s = run_round(port, requests, arrivals_s)
            server_cores = (_cpu_s(process) - server_s) / (time.perf_counter() - started_s)
            noise = meter.stop()
            others = max(0.0, (noise.other_cores or 0.0) - server_cores)
            rounds.append(_summary(engine, rate, index, timelines, duration_s, requests, others))
    return rounds


def _summary(
    engine: EngineSetup,
    rate: float,
    index: int,
    timelines: list[Timeline],
    duration_s: float,
    requests: Sequence[BenchRequest],
    others: float,
) -> Round:
    num_tokens = sum(request.output_len for request in requests)
    num_texts = sum(len(timeline.token_times_s) for timeline in timelines)
    found = figures(timelines, duration_s)
    found["output_throughput"] = num_tokens / duration_s
    return Round(engine.key, rate, index, found, num_texts / num_tokens, others)


def _cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and its descendants, those that ended left out."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        total += times.user + times.system
    return total


def make_report(rounds: Sequence[Round], args: argparse.Namespace, model: Model) -> str:
    """One line for each rate and engine; medians over the quiet rounds."""
    header = ["requests/s", "engine", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "output tok/s"]
    rows = []
    for rate in args.rates:
        for engine in dict.fromkeys(one.engine for one in rounds):
            mine = [one for one in rounds if (one.engine, one.rate) == (engine, rate)]
            quiet = [one for one in mine if one.other_cores <= LOUD_CORES]
            middle = medians([one.figures for one in quiet or mine])
            cells = [NONE if middle[key] is None else number(middle[key] or 0.0) for key in SHOWN]
            rows.append([f"{rate:g}", engine + ("" if quiet else " (loud)"), *cells])
    texts_of = {one.engine: f"{one.engine} {one.texts_per_token:.3f}" for one in rounds}
    texts = ", ".join(texts_of.values())
    note = f"{model.name}, {args.num_requests} requests; texts per token: {texts}."
    return f"{table(header, rows)}\n\n{note}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--setup", type=Path, required=True, help="models and engines; see cpu_setup.py")
    add("--model", required=True, help="one of the set-up's, by name")
    add("--precision", default="bf16")
    add("--engines", type=lambda text: text.split(","), default=[OURS, "vLLM"])
    add("--rates", type=_rates, default=[2.0, float("inf")], help="requests per second")
    add("--num-requests", type=int, default=48)
    add("--rounds", type=int, default=2)
    add("--quire-arguments", type=shlex.split, default=[], help="such as --kernels=avx512")
    add("--threads", type=int, default=2)
    add("--out", type=Path, required=True)
    add("--markdown", type=Path)
    add("--folder", type=Path, help="the servers' logs; default: beside --out")
    add("--prefix", type=shlex.split, default=[], help="words before every command")
    args = parser.parse_args(argv)
    args.folder = args.folder or args.out.with_suffix(".raw")
    for name in ("num_requests", "rounds", "threads"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(args, name)}, but must be at least 1")
    return args


def _rates(text: str) -> list[float]:
    rates = [float(word) for word in text.split(",")]
    if not all(rate > 0 for rate in rates) or len(set(rates)) < len(rates):
        raise ValueError(f"{text}: rates must be above 0, and each given once")
    return rates


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    rounds: list[Round] = []
    try:
        whole = read_setup(args.setup, tuple(args.quire_arguments))
        setup = choose(whole, [args.model], args.engines, [args.precision])
        model = setup.models[0]
        engines = [one for one in setup.engines if one.server and model.name in one.models]
        for index in range(args.rounds):
            for engine in engines if index % 2 == 0 else engines[::-1]:
                rounds += measure(engine, model, args, index)
                listed = [{name: getattr(one, name) for name in Round.__slots__} for one in rounds]
                args.out.write_text(json.dumps(listed, indent=1) + "\n")
                print(f"{engine.key}, round {index}: done", file=sys.stderr)
    except SetupError as error:
        sys.exit(f"load.py: error: {error}")
    report = make_report(rounds, args, model)
    print(report)
    if args.markdown:
        args.markdown.write_text(report + "\n")


if __name__ == "__main__":
    main()
