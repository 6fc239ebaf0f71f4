"""How busy the engine says that the device is under full load, beside torch's profiler and NVML.

A full batch in a closed loop: each request is followed by another when it ends. The engine's own
figures (`engine.utilization`) come from events in the device's queue; torch's profiler sees every
kernel, and pauses inside of a step, too; NVML samples whether some kernel ran. What the accounts
cost is measured on the same engine, with them and without them by turns.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.harness import Bench, make_model, random_prompts
from benchmarks.gpu.models import SMALL_MODEL, device_pauses
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine
from quire.engine.utilization import Utilization

BUSY_GOAL = 0.9
# The accounts may call so much more of the time busy than the profiler: pauses within steps.
DIFFERENCE = 0.05
COST_GOAL = 0.005
LENGTH = 256


def measure_utilization(bench: Bench) -> None:
    """All of it, on one engine with the shape of Qwen3-0.6B."""
    folder = make_model(bench, SMALL_MODEL.name, SMALL_MODEL.config)
    sizes = {"num_blocks": 60, "max_model_len": 64, "max_num_batched_tokens": 24}
    served = {"max_model_len": 2048, "max_num_batched_tokens": 8192, "max_itl_ratio": 2.8}
    rows = 2 if bench.small else 256
    engine = bench.engine(folder, max_num_seqs=rows, **(sizes if bench.small else served))
    loop = _FullLoad(bench, engine, rows)
    loop.run(0.1 if bench.small else 4.0)
    _measure_accounts(bench, loop)
    if not bench.small:
        _measure_profiled(bench, loop)
        _measure_one_stream(bench, engine, loop)
    _measure_cost(bench, loop)
    loop.end()


class _FullLoad:
    """Steps an engine whose every row has a request at any time. Outputs differ in length, so that
    prompts come a few at a time."""

    def __init__(self, bench: Bench, engine: Engine, rows: int) -> None:
        length = 3 if bench.small else LENGTH
        self.engine = engine
        self._rows = rows
        vocab_size = engine.limits.vocab_size
        self._prompts = random_prompts([length] * 4 * rows, vocab_size, 7)
        self._length = length
        self._num_made = 0

    def run(self, seconds: float) -> int:
        """Returns how many steps were taken."""
        end_s, num_steps = time.perf_counter() + seconds, 0
        while time.perf_counter() < end_s:
            self.step()
            num_steps += 1
        return num_steps

    def step(self) -> None:
        engine = self.engine
        while len(engine._requests) < self._rows:
            self._add()
        for output in engine.step():
            assert output.error is None, output.error

    def end(self) -> None:
        for request_id in list(self.engine._requests):
            self.engine.abort(request_id)
        self.engine.settle()

    def _add(self) -> None:
        index, self._num_made = self._num_made, self._num_made + 1
        count = self._length // 2 + index * 37 % self._length + 1
        params = DecodingParams(max_tokens=count, temperature=0.0)
        prompt = self._prompts[index % len(self._prompts)]
        self.engine.add(Request(f"r{index}", list(prompt), params))


def _measure_accounts(bench: Bench, loop: _FullLoad) -> None:
    """The engine's figures, and NVML's mean over the same seconds."""
    before = loop.engine.stats().utilization
    readings: list[dict[str, float]] = []
    for _ in range(1 if bench.small else 6):
        loop.run(0.2 if bench.small else 1.0)
        readings.append(loop.engine.stats().utilization.get("device", {}))
    after = loop.engine.stats().utilization
    spent = {name: after[name] - before[name] for name in ("busy_s", "gap_s", "idle_s")}
    total_s = sum(spent.values())
    note = f"gap {spent['gap_s'] / total_s:.1%}, idle {spent['idle_s'] / total_s:.1%}"
    bench.at_least("busy, by the engine", spent["busy_s"] / total_s, BUSY_GOAL, "of the time", note)
    if "floor_s" in after:
        floor_s = after["floor_s"] - before["floor_s"]
        rates = f"{after['bytes_per_s'] / 1e9:.0f} GB/s, {after['operations_per_s'] / 1e12:.0f}"
        moved = (after["num_bytes"] - before["num_bytes"]) / total_s / 1e9
        done = (after["operations"] - before["operations"]) / total_s / 1e12
        note = f"{moved:.0f} GB/s and {done:.1f} Tflop/s of {rates} Tflop/s as measured"
        bench.add("floor by busy time", floor_s / spent["busy_s"], "", note=note)
    for name in ("busy_share", "memory_share"):
        found = [reading[name] for reading in readings if name in reading]
        note = "" if found else "NVML is not there (nvidia-ml-py), or does not say"
        mean = statistics.fmean(found) if found else None
        bench.add(f"NVML's {name}", mean, "of the time", note=note)


def _measure_profiled(bench: Bench, loop: _FullLoad) -> None:
    """The engine's figures and the profiler's, of the same steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(30):  # the profiler's own start
            loop.step()
        before = loop.engine.stats().utilization
        for _ in range(120):
            loop.step()
        after = loop.engine.stats().utilization
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    pauses = device_pauses(trace["traceEvents"], skipped=0.2)
    busy_s, gap_s = (after[name] - before[name] for name in ("busy_s", "gap_s"))
    share, seen = busy_s / (busy_s + gap_s), 1.0 - pauses.idle_share
    note = (
        f"engine {share:.1%}, profiler {seen:.1%} (without pauses above 5 us"
        f" {1.0 - pauses.long_share:.1%}) in {pauses.span_s * 1e3:.0f} ms"
    )
    name = "busy by the engine, less that by the profiler"
    bench.at_most(name, abs(share - seen), DIFFERENCE, "of the time", note, is_time=True)


def _measure_one_stream(bench: Bench, engine: Engine, loop: _FullLoad) -> None:
    """One sequence: bound by bytes."""
    loop.end()
    params = DecodingParams(max_tokens=600, temperature=0.0)
    engine.add(Request("one", loop._prompts[0][:128], params))
    for _ in range(100):
        engine.step()
    before = engine.stats().utilization
    for _ in range(400):
        engine.step()
    after = engine.stats().utilization
    loop.end()
    busy_s, gap_s, floor_s = (after[name] - before[name] for name in ("busy_s", "gap_s", "floor_s"))
    note = f"{floor_s / busy_s:.0%} of the floor while busy; {2.5 * (busy_s + gap_s):.2f} ms a step"
    bench.add("one stream: busy", busy_s / (busy_s + gap_s), "of the time", note=note)


class _NoAccounts(Utilization):
    """Keeps none."""

    def arrive(self, now_s: float) -> None: ...

    def rest(self, now_s: float) -> None: ...

    def land(self, *_: Any) -> tuple[float, float]:
        return 0.0, 0.0


@contextmanager
def _without_accounts(engine: Engine) -> Iterator[None]:
    """Nothing is counted and no events are recorded, from one step without others in flight on."""
    runner: Any = engine._runner
    kept, timer = engine.utilization, runner._timer
    engine.utilization, runner._timer = _NoAccounts(0.0), None
    try:
        yield
    finally:
        engine.utilization, runner._timer = kept, timer


def _measure_cost(bench: Bench, loop: _FullLoad) -> None:
    """Decode steps with accounts and without, by turns of a few. What is in flight when they are
    switched is drained first, outside of the times."""
    ratios: list[float] = []
    num_steps, num_rounds = (2, 2) if bench.small else (20, 16)
    if not bench.small:
        loop.run(1.0)
    for at in range(num_rounds):
        if at and bench.left_s < 10:
            break
        took = {True: 0.0, False: 0.0}
        for keeps in (True, False) if at % 2 else (False, True):
            if keeps:
                took[keeps] = _time_steps(bench, loop, num_steps)
            else:
                with _drained(loop), _without_accounts(loop.engine):
                    took[keeps] = _time_steps(bench, loop, num_steps)
                    _drain(loop)
        ratios.append(took[True] / took[False])
    note = f"median of {len(ratios)} rounds of {num_steps} steps by turns"
    cost = statistics.median(ratios) - 1
    bench.at_most("what the accounts cost", cost, COST_GOAL, "of a step", note, is_time=True)


@contextmanager
def _drained(loop: _FullLoad) -> Iterator[None]:
    _drain(loop)
    yield


def _drain(loop: _FullLoad) -> None:
    """Fetch what is in flight."""
    engine: Any = loop.engine
    while engine._in_flight:
        landed = engine._fetch(is_idle=True)
        if landed is not None:
            engine._apply(*landed)


def _time_steps(bench: Bench, loop: _FullLoad, num_steps: int) -> float:
    """Seconds of so many steps, after two that fill the queue."""
    for _ in range(2):
        loop.step()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    return time.perf_counter() - began_s
