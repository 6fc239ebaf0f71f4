"""Step pacing: what streams and newcomers wait for, with a constant budget and with a paced one.

    python -m benchmarks.cpu.pacing [--model MODEL] [--streams 16] [--load 0.7] [--out pacing.json]

Some streams run all the time, and requests arrive as a Poisson process at a share of capacity: of
the rate at which the engine, with its constant budget and the streams running, completes such
requests when they all wait from the start. Both budgets get the same arrivals, in turns; the engine
loop is that of the server, without HTTP: what has arrived is added between two steps.

Prints, for each budget, ITL of the streams and TTFT of the requests, and their ratios. ITL is also
given in idle medians, of two kinds: of the streams alone; and of as many streams as there were on
average, those that arrived included, while no prompt was computed. The first grows with the crowd
whatever the budget is; the second is what prompts cost.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quire.assembly.build import build_engine
from quire.bench.machine import Noise, NoiseMeter, processor
from quire.bench.workload import LengthSpec, WorkloadSpec, make_requests
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.pacing import ConstantPacer, Pacer, PacingConfig, StepPacer
from quire.engine.engine import Engine

CONSTANT, PACED = "constant", "paced"
ITL_BOUND = 3.0


@dataclass(frozen=True, slots=True)
class Load:
    """num_streams run all the time: each generates stream_output_tokens after its prompt, and then
    begins anew with the prompt from the prefix cache, so that contexts stay as long on average.

    requests: those that arrive, of log-normal lengths. share: of capacity. rounds: of all budgets,
    each with num_prompts arrivals.
    """

    num_streams: int = 16
    stream_prompt_tokens: int = 128
    stream_output_tokens: int = 256
    requests: WorkloadSpec = field(default_factory=WorkloadSpec)
    share: float = 0.7
    rounds: int = 3
    idle_s: float = 1.0
    seed: int = 1234


@dataclass(slots=True)
class Round:
    """The results of one budget in one round. itl_s: gaps of the streams, while requests came.
    num_decodes: mean over time of rows that decoded."""

    budget: str
    itl_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    num_decodes: float = 0.0
    noise: Noise | None = None


class Driver:
    """The engine's loop with requests that arrive between steps.

    Invariant: the streams of `start_streams` run; one that ends begins anew before the next step.
    """

    def __init__(self, engine: Engine, load: Load) -> None:
        self.engine = engine
        self._load = load
        self._num_requests = 0
        self._streams: dict[str, list[int]] = {}  # request -> prompt
        self._last_token_s: dict[str, float] = {}
        self._random = random.Random(load.seed)

    def start_streams(self, num_streams: int) -> None:
        """End the running streams and start num_streams new ones, so that all rounds begin
        alike."""
        for name in self._streams:
            self.engine.abort(name)
        self._streams = {}
        for index in range(num_streams):
            # The first ends come one by one, and so do all others.
            num_outputs = -(-self._load.stream_output_tokens * (index + 1) // num_streams)
            self._start(self._tokens(self._load.stream_prompt_tokens), num_outputs)
        self._last_token_s = {}
        while len(self._last_token_s) < len(self._streams):
            self._step([], {}, {})

    def run_idle(self, duration_s: float) -> list[float]:
        """Gaps of the streams while nobody else is there."""
        gaps: list[float] = []
        until_s = time.perf_counter() + duration_s
        while time.perf_counter() < until_s:
            self._step(gaps, {}, {})
        return gaps

    def run(self, prompts: Sequence[tuple[float, list[int], int]], found: Round) -> None:
        """Requests (arrival, prompt, output tokens), in order of arrival, until all have ended."""
        meter, started_s = NoiseMeter(), time.perf_counter()
        arrivals: dict[str, float] = {}
        first_s: dict[str, float] = {}
        open_names: set[str] = set()
        index, decode_s, before_s = 0, 0.0, started_s
        while index < len(prompts) or open_names:
            now_s = time.perf_counter() - started_s
            while index < len(prompts) and prompts[index][0] <= now_s:
                arrival_s, prompt, num_outputs = prompts[index]
                name = self._add(prompt, num_outputs)
                arrivals[name] = started_s + arrival_s
                open_names.add(name)
                index += 1
            num_decodes = len(self._streams) + len(first_s.keys() & open_names)
            open_names -= self._step(found.itl_s, arrivals, first_s)
            now_s = time.perf_counter()
            decode_s, before_s = decode_s + num_decodes * (now_s - before_s), now_s
        found.duration_s = time.perf_counter() - started_s
        found.num_decodes = decode_s / found.duration_s
        found.ttft_s = [first_s[name] - arrival_s for name, arrival_s in arrivals.items()]
        found.noise = meter.stop()

    def _step(
        self, gaps: list[float], arrivals: dict[str, float], first_s: dict[str, float]
    ) -> set[str]:
        """One step; returns the names of requests that ended with it."""
        outputs = self.engine.step()
        now_s = time.perf_counter()
        ended: set[str] = set()
        for output in outputs:
            name = output.request_id
            if name in self._streams:
                if name in self._last_token_s:
                    gaps.append(now_s - self._last_token_s[name])
                self._last_token_s[name] = now_s
                if output.finish_reason is not None:
                    del self._last_token_s[name]
                    self._start(self._streams.pop(name), self._load.stream_output_tokens)
            elif name in arrivals:
                first_s.setdefault(name, now_s)
            if output.finish_reason is not None:
                ended.add(name)
        return ended

    def _start(self, prompt: list[int], num_outputs: int) -> None:
        self._streams[self._add(prompt, num_outputs)] = prompt

    def _add(self, prompt: list[int], num_outputs: int) -> str:
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        params = DecodingParams(max_tokens=num_outputs, seed=self._num_requests)
        self.engine.add(Request(name, prompt, params))
        return name

    def _tokens(self, count: int) -> list[int]:
        vocab_size = self.engine.limits.vocab_size
        return [self._random.randrange(vocab_size) for _ in range(count)]


def make_prompts(
    load: Load, vocab_size: int, round_index: int, rate: float
) -> list[tuple[float, list[int], int]]:
    """The arrivals of one round; rate: requests a second, infinity for all at once."""
    generator = random.Random(f"arrivals {load.seed} {round_index}")
    now_s = 0.0
    prompts = []
    for request in make_requests(load.requests, vocab_size, round_index):
        now_s += generator.expovariate(1.0) / rate
        prompts.append((now_s, request.prompt_token_ids, request.output_len))
    return prompts


@dataclass(slots=True)
class Found:
    """All that was measured. capacity: requests a second. idle_s: median ITL of the streams alone;
    crowd_idle_s: of num_crowd streams alone, as many as decoded on average while it was paced."""

    capacity: float
    idle_s: float
    crowd_idle_s: float
    num_crowd: int
    rounds: list[Round]


def measure(engine: Engine, load: Load) -> Found:
    """Capacity first, then the rounds, the streams alone between them, and the crowd alone."""
    paced = engine.scheduler.pacer
    assert isinstance(paced, StepPacer)
    driver = Driver(engine, load)
    vocab_size = engine.limits.vocab_size
    pacers: dict[str, Pacer] = {CONSTANT: ConstantPacer(), PACED: paced}
    engine.scheduler.pacer = pacers[CONSTANT]
    driver.start_streams(load.num_streams)
    driver.run_idle(load.idle_s)
    full = Round(CONSTANT)
    driver.run(make_prompts(load, vocab_size, 0, math.inf), full)
    capacity = len(full.ttft_s) / full.duration_s
    idle: list[float] = []
    rounds: list[Round] = []
    for index in range(load.rounds):
        order = [CONSTANT, PACED] if index % 2 == 0 else [PACED, CONSTANT]
        for name in order:
            engine.scheduler.pacer = pacers[name]
            driver.start_streams(load.num_streams)
            idle += driver.run_idle(load.idle_s)
            prompts = make_prompts(load, vocab_size, index + 1, load.share * capacity)
            if name == order[1]:  # the same lengths and times, but no prefix that was seen before
                prompts = [
                    (at_s, [(token + 1) % vocab_size for token in prompt], count)
                    for at_s, prompt, count in prompts
                ]
            rounds.append(Round(name))
            driver.run(prompts, rounds[-1])
    num_crowd = round(statistics.mean(one.num_decodes for one in rounds if one.budget == PACED))
    driver.start_streams(num_crowd)
    crowd_s = statistics.median(driver.run_idle(2 * load.idle_s))
    return Found(capacity, statistics.median(idle), crowd_s, num_crowd, rounds)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarize(result: Found) -> dict[str, dict[str, float]]:
    """Budget -> figures over all its rounds."""
    found: dict[str, dict[str, float]] = {}
    for name in (CONSTANT, PACED):
        mine = [one for one in result.rounds if one.budget == name]
        itl = [gap for one in mine for gap in one.itl_s]
        ttft = [wait for one in mine for wait in one.ttft_s]
        found[name] = {
            "itl_p50_ms": percentile(itl, 50) * 1e3,
            "itl_p99_ms": percentile(itl, 99) * 1e3,
            "itl_p99_idle": percentile(itl, 99) / result.idle_s,
            "itl_p99_crowd": percentile(itl, 99) / result.crowd_idle_s,
            "ttft_mean_ms": statistics.mean(ttft) * 1e3,
            "ttft_p50_ms": percentile(ttft, 50) * 1e3,
            "ttft_p90_ms": percentile(ttft, 90) * 1e3,
            "ttft_p99_ms": percentile(ttft, 99) * 1e3,
        }
    return found


def report(result: Found, load: Load) -> str:
    """The table, the ratios, and how quiet the machine was."""
    figures = summarize(result)
    lines = [
        processor(),
        f"capacity {result.capacity:.2f} requests/s, arrivals at"
        f" {load.share * result.capacity:.2f}/s",
        f"idle ITL median: {load.num_streams} streams {result.idle_s * 1e3:.2f} ms,"
        f" {result.num_crowd} streams {result.crowd_idle_s * 1e3:.2f} ms",
        "",
        f"{'':16}{CONSTANT:>12}{PACED:>12}{'ratio':>8}",
    ]
    for key, before in figures[CONSTANT].items():
        after = figures[PACED][key]
        lines.append(f"{key:16}{before:12.2f}{after:12.2f}{after / before:8.2f}")
    ratio = figures[PACED]["itl_p99_crowd"]
    lines += [
        "",
        f"paced ITL p99 is {ratio:.2f} times the idle median of {result.num_crowd} streams:"
        f" {'below' if ratio < ITL_BOUND else 'NOT below'} {ITL_BOUND:g}",
    ]
    loud = [one for one in result.rounds if one.noise is not None and one.noise.is_loud]
    lines.append(f"{len(loud)} of {len(result.rounds)} runs were disturbed by others")
    return "\n".join(lines)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="local folder or hub id (the embedded model)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--num-prompts", type=int, default=64, help="arrivals of a round")
    parser.add_argument("--input-mean", type=int, default=220)
    parser.add_argument("--input-max", type=int, default=1024)
    parser.add_argument("--output-mean", type=int, default=180)
    parser.add_argument("--idle", type=float, default=1.0, help="seconds alone before a round")
    parser.add_argument("--load", type=float, default=0.7, help="share of capacity")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-itl-ratio", type=float, default=PacingConfig().max_itl_ratio)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--out", type=Path, help="all samples, as JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(words)
    requests = WorkloadSpec(
        num_prompts=args.num_prompts,
        input=LengthSpec(args.input_mean, min(16, args.input_mean), args.input_max),
        output=LengthSpec(args.output_mean, 1, 4 * args.output_mean - 3),
    )
    load = Load(
        args.streams,
        requests=requests,
        share=args.load,
        rounds=args.rounds,
        idle_s=args.idle,
    )
    engine = build_engine(
        {
            "model": args.model,
            "dtype": args.dtype,
            "max_num_seqs": args.max_num_seqs,
            "max_itl_ratio": args.max_itl_ratio,
            "scheduling_policy": args.scheduling_policy,
        }
    )
    result = measure(engine, load)
    print(report(result, load))
    if args.out is not None:
        args.out.write_text(json.dumps(asdict(result)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
