"""How busy an engine keeps its cores under full load, and what the time between steps is spent on.

    python -m benchmarks.cpu.utilization [--models MODEL,...] [--seconds 10] [--out use.json]
    python -m benchmarks.cpu.utilization --overlap          # planning beside the steps
    python -m benchmarks.cpu.utilization --server           # through HTTP, with clients beside it
    python -m benchmarks.cpu.utilization --cost             # what keeping the accounts costs

Closed loop: as many requests as the engine has rows, each followed by another when it ends, prompts
and outputs of log-normal lengths, or (load "decode") short prompts and long outputs. The first
quarter of the time warms up, and time in which other programs ran does not count. Shares are read
from the step trace, which says of each step how much of the time since the result before it was
busy; with --server from /health.

--cost measures what the accounts take in their place, and, as a check, compares steps with them to
steps without them, and to others with them, by turns.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.server.load_client import complete
from benchmarks.server.serving import Server, served
from quire.assembly.build import build_engine
from quire.bench.machine import NOISE_LIMIT_CORES, NoiseMeter, processor
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SERVED_MAX_ITL_RATIO
from quire.engine.engine import Engine
from quire.engine.utilization import Utilization
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.observability.step_trace import StepRecord, StepTrace, read_step_trace

GOAL = 0.9
COST_GOAL = 0.005
WARM_SHARE = 0.25
SLICE_S = 0.5
PATIENCE = 6
BLOCK_STEPS = 4
LEAST_ROUNDS = 10
LOADS = {
    "mixed": ((220, 0.8, 16, 1024), (180, 0.8, 8, 512)),
    "decode": ((16, 0, 16, 16), (400, 0.3, 100, 800)),
}
HOST_PARTS = ("schedule_s", "build_s", "apply_s")


class Requests:
    """An endless sequence of requests of one load."""

    def __init__(self, load: str, vocab_size: int, seed: int = 1234) -> None:
        self._lengths = LOADS[load]
        self._rng = random.Random(seed)
        self._num_made = 0
        # Prompts are cut from one stretch, so that making them takes no time between steps.
        self._token_ids = self._rng.choices(range(vocab_size), k=1 << 16)

    def draw(self) -> tuple[list[int], int]:
        """(prompt, number of output tokens)."""
        num_prompt, num_output = (self._length(*each) for each in self._lengths)
        start = self._rng.randrange(len(self._token_ids) - num_prompt)
        return self._token_ids[start : start + num_prompt], num_output

    def make(self) -> Request:
        prompt, num_output = self.draw()
        self._num_made += 1
        # No end tokens: lengths are exact.
        params = DecodingParams(max_tokens=num_output, temperature=0.0)
        return Request(str(self._num_made), prompt, params)

    def _length(self, mean: float, sigma: float, low: int, high: int) -> int:
        drawn = mean * self._rng.lognormvariate(-sigma * sigma / 2, sigma)
        return min(high, max(low, round(drawn)))


def engine_for(model: str, rows: int, *, overlap: bool = False) -> Engine:
    return build_engine(
        {
            "model": model,
            "skip_tokenizer_init": True,
            "max_num_seqs": rows,
            "max_itl_ratio": SERVED_MAX_ITL_RATIO,
            "async_scheduling": overlap,
            "max_model_len": 2048,
        }
    )


def step_until(engine: Engine, requests: Requests, rows: int, end_s: float) -> None:
    """Full load: no row is ever without a request that could have it."""
    num_open = engine.stats().num_running + engine.stats().num_waiting
    for _ in range(rows - num_open):
        engine.add(requests.make())
    while time.perf_counter() < end_s:
        for output in engine.step():
            if output.finish_reason is not None:
                engine.add(requests.make())


def abort_all(engine: Engine) -> None:
    for request_id in list(engine._requests):
        engine.abort(request_id)
    engine.finish_steps()


def measure(
    model: str, load: str, rows: int, seconds: float, *, overlap: bool = False
) -> dict[str, Any]:
    """In this process, by the step trace: in slices, of which those count beside which nothing else
    ran, if there are any. Goes on for up to PATIENCE times as long for the sake of them."""
    engine = engine_for(model, rows, overlap=overlap)
    requests = Requests(load, engine.limits.vocab_size)
    step_until(engine, requests, rows, time.perf_counter() + WARM_SHARE * seconds)
    slices: list[tuple[float, list[StepRecord], dict[str, float]]] = []
    end_s = time.perf_counter() + PATIENCE * seconds
    num_wanted = max(1, round(seconds / SLICE_S))
    while time.perf_counter() < end_s and len(_quiet(slices)) < num_wanted:
        slices.append(_measure_slice(engine, requests, rows))
    chosen = _quiet(slices) or slices
    abort_all(engine)
    means = {
        name: statistics.fmean(accounts[name] for _, _, accounts in chosen) for name in chosen[0][2]
    }
    records = [record for _, some, _ in chosen for record in some]
    others = max(each[0] for each in chosen)
    found = {"model": Path(model).name, "load": load, "others": others, "slices": len(chosen)}
    return found | shares(records) | means


def _quiet(slices: list[Any]) -> list[Any]:
    return [each for each in slices if each[0] <= NOISE_LIMIT_CORES]


def _measure_slice(
    engine: Engine, requests: Requests, rows: int
) -> tuple[float, list[StepRecord], dict[str, float]]:
    """(cores that others took, records but for the first, shares by the accounts)."""
    before, meter = engine.stats().utilization, NoiseMeter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with StepTrace(path) as trace:
            engine.trace = trace
            step_until(engine, requests, rows, time.perf_counter() + SLICE_S)
            engine.trace = None
        noise, after = meter.stop(), engine.stats().utilization
        records = list(read_step_trace(path))[1:]
    return noise.other_cores or 0.0, records, since(before, after)


def shares(records: Sequence[StepRecord]) -> dict[str, float]:
    """The share of each part in the time between the results."""
    total_s = sum(record.busy_s + record.gap_s for record in records)
    found = {"busy": sum(record.busy_s for record in records) / total_s}
    for part in HOST_PARTS:
        found[part.removesuffix("_s")] = sum(getattr(one, part) for one in records) / total_s
    rest = 1.0 - sum(found.values())
    if rest >= 0:  # else the host's parts lie beside steps
        found["between"] = rest
    found["step_ms"] = 1e3 * total_s / len(records)
    found["tokens_s"] = sum(record.num_tokens for record in records) / total_s
    found["rows"] = statistics.fmean(record.num_rows for record in records)
    return found


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """The shares and rates of the time between two readings of the accounts."""
    spent = {name: after[name] - before[name] for name in ("busy_s", "gap_s", "idle_s", "floor_s")}
    work = {name: after[name] - before[name] for name in ("num_bytes", "operations")}
    busy_s = spent["busy_s"]
    return {
        "accounts_busy": busy_s / (busy_s + spent["gap_s"] + spent["idle_s"]),
        "floor": spent["floor_s"] / busy_s,
        "bandwidth": work["num_bytes"] / busy_s / after["bytes_per_s"],
        "arithmetic": work["operations"] / busy_s / after["operations_per_s"],
    }


# ---- through HTTP -------------------------------------------------------------------------------


def measure_server(model: str, load: str, rows: int, seconds: float) -> dict[str, Any]:
    """With clients on the same cores, by the engine's accounts."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model", model, "--max-num-seqs", str(rows), "--max-model-len", "2048"]
        with served(words, Path(folder) / "log") as server:
            meter = NoiseMeter()
            found = asyncio.run(_load_server(server, load, rows, seconds))
            noise = meter.stop()
    return found | {"model": Path(model).name, "load": load, "others": noise.other_cores}


async def _load_server(server: Server, load: str, rows: int, seconds: float) -> dict[str, Any]:
    requests = Requests(load, 1000)
    end_s = time.perf_counter() + (1 + WARM_SHARE) * seconds + 1.0

    async def repeat() -> None:
        while time.perf_counter() < end_s:
            await complete(server.host, server.port, *requests.draw())

    clients = [asyncio.create_task(repeat()) for _ in range(rows)]
    await asyncio.sleep(WARM_SHARE * seconds)
    before = (await asyncio.to_thread(server.health))["utilization"]
    await asyncio.sleep(seconds)
    after = (await asyncio.to_thread(server.health))["utilization"]
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    found = since(before, after)
    return {"busy": found["accounts_busy"]} | found


# ---- what the accounts cost ---------------------------------------------------------------------


class NoAccounts(Utilization):
    """Keeps none."""

    def record_arrival(self, now_s: float) -> None: ...

    def record_idle(self, now_s: float) -> None: ...

    def account_step(self, *_: Any) -> tuple[float, float]:
        return 0.0, 0.0


def measure_cost(model: str, load: str, rows: int, seconds: float) -> dict[str, Any]:
    """Time blocks of steps of one engine with its accounts, without them, and with them again."""
    engine = engine_for(model, rows)
    requests = Requests(load, engine.limits.vocab_size)
    step_until(engine, requests, rows, time.perf_counter() + WARM_SHARE * seconds)
    timed = _timed(engine.utilization)
    kept, none = engine.utilization, NoAccounts(0.0)
    took: list[list[float]] = [[], [], []]
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(took[0]) < LEAST_ROUNDS:
        for kind in (0, 1, 2) if len(took[0]) % 2 else (2, 1, 0):
            engine.utilization = none if kind == 1 else kept
            took[kind].append(_time_block(engine, requests))
    abort_all(engine)
    ratios = [a / b for a, b in zip(took[0], took[1], strict=True)]
    control = [a / b for a, b in zip(took[0], took[2], strict=True)]
    return {
        "model": Path(model).name,
        "load": load,
        "cost": statistics.median(timed) * BLOCK_STEPS / statistics.median(took[0] + took[2]),
        "by_turns": statistics.median(ratios) - 1,
        "control": statistics.median(control) - 1,
        "num_rounds": len(ratios),
        "accounts_us": 1e6 * statistics.median(timed),
    }


def _timed(accounts: Utilization) -> list[float]:
    """Gets the seconds of each call of `account_step`: in its place, where the caches are cold."""
    found: list[float] = []
    account_step = accounts.account_step

    def timed(*arguments: Any) -> tuple[float, float]:
        began_s = time.perf_counter()
        result = account_step(*arguments)
        found.append(time.perf_counter() - began_s)
        return result

    accounts.account_step = timed  # type: ignore[method-assign]
    return found


def _time_block(engine: Engine, requests: Requests) -> float:
    began_s = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        for output in engine.step():
            if output.finish_reason is not None:
                engine.add(requests.make())
    return time.perf_counter() - began_s


# ---- the command --------------------------------------------------------------------------------


def describe(found: dict[str, Any]) -> str:
    name = f"{found['model']}, {found['load']}"
    if "cost" in found:
        return (
            f"{name}: accounts take {found['cost']:.2%} of the time, {found['accounts_us']:.1f} us"
            f" a step; steps with them by those without {found['by_turns']:+.2%}, by others with"
            f" them {found['control']:+.2%} ({found['num_rounds']} rounds)"
        )
    host = "".join(
        f", {part} {found[part]:.1%}"
        for part in ("schedule", "build", "apply", "between")
        if part in found
    )
    return (
        f"{name}: busy {found['busy']:.1%} (accounts {found['accounts_busy']:.1%}){host}; step"
        f" {found.get('step_ms', 0):.2f} ms of {found.get('rows', 0):.0f} rows,"
        f" {found.get('tokens_s', 0):.0f} tokens/s; floor"
        f" {found['floor']:.0%} of busy time (bytes {found['bandwidth']:.0%}, operations"
        f" {found['arithmetic']:.0%}); others took {found['others'] or 0:.2f} cores"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where a goal was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=str(EMBEDDED_MODEL), help="folders, comma-separated")
    parser.add_argument("--loads", default=",".join(LOADS), help="of: " + ", ".join(LOADS))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--overlap", action="store_true", help="async_scheduling")
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    how: Callable[..., dict[str, Any]] = partial(measure, overlap=args.overlap)
    if args.cost or args.server:
        how = measure_cost if args.cost else measure_server
    results = []
    print(f"{processor()}; {args.rows} rows")
    for model in args.models.split(","):
        for load in args.loads.split(","):
            results.append(how(model, load, args.rows, args.seconds))
            print(describe(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    if args.cost:
        return int(any(found["cost"] > COST_GOAL for found in results))
    return int(any(found["busy"] < GOAL for found in results))


if __name__ == "__main__":
    sys.exit(main())
