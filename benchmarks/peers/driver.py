"""The measurements of one engine by a driver, and the result file, whose form all engines share.

    DRIVER --model M --workload requests.json --out result.json --label bf16
        [--limit 16] [--reps 2] [--max-batch 48] [--skip decode1,prefill]
        [--pause-pidfile FILE] [--quiet-wait 8]

    decode1      one stream: tokens per second after the first, 128 prompt tokens, 128 new ones
    prefill512   prompt tokens / time to first token; also of 2,048
    workload     all requests of the file at t=0, end tokens ignored, lengths exact
    peak_rss_mib of the process

Prompts are random token ids, decided by place and repetition alone: the same for every engine, and
no prefix cache helps. Each repetition says how many cores other processes took (`other_cpus`), and
the hypervisor (`steal_cpus`). Knows no engine.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from quire.bench.machine import NoiseMeter

# Token ids lie in this range, below the vocabulary size of every model that is measured.
LOW_TOKEN_ID, HIGH_TOKEN_ID = 300, 30_000
PROMPT_SEED = 77
DECODE_TOKENS = 128  # of the prompt, and new ones
PREFILL_TOKENS = (512, 2048)
PARTS = ("decode1", "prefill", "workload")
QUIET_CORES = 0.15
# A repetition of the workload that takes so long is the last.
LONG_RUN_S = 180.0

T = TypeVar("T")
Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of one request: prompt_len tokens, and exactly output_len new ones."""

    index: int
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the call to the first token, and to the last."""

    first_s: float
    total_s: float


class Engine(Protocol):
    """The engine that is measured. `quire_offline.py` has quire's."""

    name: str
    version: str

    def generate_one(self, prompt: list[int], num_new_tokens: int) -> Latency:
        """Continue one prompt, alone."""
        ...

    def run_workload(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        """Continue all, given at once; how many tokens were generated."""
        ...

    def details(self) -> dict[str, Any]:
        """Further entries of the result file."""
        ...


# ---- the command line -----------------------------------------------------------------------


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that all drivers have."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--model", required=True, help="the model's folder")
    add("--workload", required=True, type=Path, help="the requests' lengths, as JSON")
    add("--out", required=True, type=Path, help="the result file")
    add("--label", default="", help="precision or variant, copied into the result")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=2)
    add("--max-batch", type=int, default=48)
    add("--reps", type=int, default=2)
    add("--limit", type=int, default=0, help="use only the first N requests")
    add("--skip", default="", help=f"comma list of: {','.join(PARTS)}")
    add("--quiet-wait", type=float, default=0.0, metavar="SECONDS", help="wait at most so long")
    add("--pause-pidfile", type=Path, help="a file with a process id to stop while timing")
    return parser


def parse_args(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> Any:
    """Checked: `skip` is a set of PARTS."""
    args = parser.parse_args(argv)
    args.skip = {part for part in args.skip.split(",") if part}
    unknown = sorted(args.skip - set(PARTS))
    if unknown:
        parser.error(f"--skip names {unknown}, but the parts are {', '.join(PARTS)}")
    for name, low in (("threads", 1), ("max_batch", 1), ("reps", 1), ("limit", 0)):
        if getattr(args, name) < low:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(args, name)}, but must be at least {low}")
    return args


def hold_threads(num_threads: int) -> None:
    """No library of this process uses more cores: call it before they are imported.

    The affinity binds thread pools that ask the operating system for the number of processors.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])


# ---- the load -------------------------------------------------------------------------------


def read_workload(path: Path, limit: int) -> list[Lengths]:
    """The first `limit` requests of the file, all where it is 0."""
    listed = json.loads(path.read_text())["requests"]
    requests = [Lengths(one["id"], one["prompt_len"], one["output_len"]) for one in listed]
    return requests[:limit] if limit else requests


def draw_tokens(count: int, *key: int) -> list[int]:
    """`count` random token ids, decided by key alone."""
    generator = np.random.default_rng([PROMPT_SEED, *key])
    return [int(token) for token in generator.integers(LOW_TOKEN_ID, HIGH_TOKEN_ID, count)]


# ---- the measurement ------------------------------------------------------------------------


@contextlib.contextmanager
def paused(pidfile: Path | None) -> Iterator[None]:
    """Hold the process that the file names, if there is one, stopped meanwhile."""
    pid = int(pidfile.read_text()) if pidfile is not None and pidfile.exists() else None
    if pid is None:
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_until_quiet(limit_s: float) -> None:
    """Return when other processes took less than QUIET_CORES for a second, or after the limit."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        meter = NoiseMeter()
        time.sleep(1.0)
        if (meter.stop().other_cores or 0.0) < QUIET_CORES:
            return


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Least, median and most of each column, and the rows themselves."""
    summary: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        spread = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        summary[name] = {key: round(value, 4) for key, value in spread.items()}
    return {**summary, "reps": len(rows), "rows": list(rows)}


@dataclass(slots=True)
class Measurement:
    """Runs the parts that are not skipped; `result` grows, and the file with it.

    child_pid: of the process that computes, where it is not this one.
    """

    args: Any
    engine: Engine
    child_pid: int | None = None
    result: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """All parts. Raises AssertionError where the engine generates another number of tokens."""
        args, requests = self.args, read_workload(self.args.workload, self.args.limit)
        self.result.update(
            peer=self.engine.name,
            version=self.engine.version,
            label=args.label,
            model=Path(args.model).name,
            threads=args.threads,
            python=platform.python_version(),
            requests=len(requests),
        )
        if "decode1" not in args.skip:
            self._measure_decode()
        if "prefill" not in args.skip:
            for num_tokens in PREFILL_TOKENS:
                self._measure_prefill(num_tokens)
        if "workload" not in args.skip:
            self._measure_workload(requests)
        self._save()

    def _measure_decode(self) -> None:
        self.engine.generate_one(draw_tokens(64, 900, 1), 8)  # warm up
        rows = []
        for rep in range(max(2, self.args.reps)):
            prompt = draw_tokens(DECODE_TOKENS, 901, rep)
            latency, noise = self._timed(partial(self.engine.generate_one, prompt, DECODE_TOKENS))
            rows.append(
                {
                    "decode_tok_s": (DECODE_TOKENS - 1) / (latency.total_s - latency.first_s),
                    "e2e_tok_s": DECODE_TOKENS / latency.total_s,
                    **noise,
                }
            )
        self._keep("decode1", rows)

    def _measure_prefill(self, num_tokens: int) -> None:
        self.engine.generate_one(draw_tokens(num_tokens, 902, num_tokens, 99), 1)  # warm up
        rows = []
        for rep in range(max(2, self.args.reps)):
            prompt = draw_tokens(num_tokens, 903, num_tokens, rep)
            latency, noise = self._timed(partial(self.engine.generate_one, prompt, 1))
            rows.append({"prefill_tok_s": num_tokens / latency.first_s, **noise})
        self._keep(f"prefill{num_tokens}", rows)

    def _measure_workload(self, requests: list[Lengths]) -> None:
        output_lens = [one.output_len for one in requests]
        num_prompt_tokens = sum(one.prompt_len for one in requests)
        rows: list[Row] = []
        for rep in range(self.args.reps):
            prompts = [draw_tokens(one.prompt_len, rep, one.index) for one in requests]
            wall_s, noise = self._timed(partial(self._crowd, prompts, output_lens))
            num_tokens = sum(output_lens)
            rates = {
                "output_tok_s": num_tokens / wall_s,
                "total_tok_s": (num_tokens + num_prompt_tokens) / wall_s,
            }
            rows.append({"output_tokens": num_tokens, "wall_s": wall_s, **rates, **noise})
            self._keep("workload", rows)
            if wall_s > LONG_RUN_S:
                return

    def _crowd(self, prompts: list[list[int]], output_lens: list[int]) -> float:
        started_s = time.perf_counter()
        num_tokens = self.engine.run_workload(prompts, output_lens)
        wall_s = time.perf_counter() - started_s
        assert num_tokens == sum(output_lens), (num_tokens, sum(output_lens))
        return wall_s

    def _timed(self, call: Callable[[], T]) -> tuple[T, Row]:
        """The result of the call, and a row with its time and the load of other processes."""
        with paused(self.args.pause_pidfile):
            wait_until_quiet(self.args.quiet_wait)
            meter, child_s, started_s = NoiseMeter(), self._child_s(), time.perf_counter()
            value = call()
            noise, elapsed_s = meter.stop(), time.perf_counter() - started_s
        child_cores = (self._child_s() - child_s) / elapsed_s
        return value, {
            "other_cpus": max(0.0, (noise.other_cores or 0.0) - child_cores),
            "steal_cpus": noise.steal_cores or 0.0,
        }

    def _child_s(self) -> float:
        """The processor time of the child so far."""
        if self.child_pid is None:
            return 0.0
        words = Path(f"/proc/{self.child_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def _peak_rss_mib(self) -> float:
        if self.child_pid is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        status = Path(f"/proc/{self.child_pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def _keep(self, part: str, rows: list[Row]) -> None:
        self.result[part] = summarize(rows)
        self._save()

    def _save(self) -> None:
        self.result["peak_rss_mib"] = round(self._peak_rss_mib())
        self.result.update(self.engine.details())
        self.args.out.write_text(json.dumps(self.result, indent=1) + "\n")
