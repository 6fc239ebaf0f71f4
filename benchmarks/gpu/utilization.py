"""How busy the engine says that the device is under full load, beside torch's profiler and NVML.

Two loads of a full batch. With prompts: a closed loop in which each request is followed by another
when it ends, so that most steps have a prompt in them and are launched kernel by kernel. Without:
all rows decode, in steps that are one CUDA graph. The engine's own figures (`engine.utilization`)
come from events in the device's queue; torch's profiler sees every kernel, and pauses inside of a
step, too; NVML samples whether some kernel ran.

What the accounts cost is measured on the second load, in which all steps are alike, with them and
without them by turns, beside turns that differ in nothing; and as the time of their calls.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.harness import Bench, make_model, random_prompts
from benchmarks.gpu.models import SMALL_MODEL, device_pauses
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SERVED_MAX_ITL_RATIO
from quire.engine.engine import Engine
from quire.engine.utilization import Utilization
from quire.observability.step_trace import StepRecord

BUSY_GOAL = 0.9
# The accounts may call so much more of the time busy than the profiler: pauses within steps.
DIFFERENCE = 0.05
COST_GOAL = 0.005
LENGTH = 256
MAX_MODEL_LEN = 2048
PARTS = ("schedule", "build", "plan", "forward", "sample", "wait", "apply")


def measure_utilization(bench: Bench) -> None:
    """All of it, on one engine with the shape of Qwen3-0.6B. The profiler comes last: what it has
    attached to the driver may slow launches for good."""
    folder = make_model(bench, SMALL_MODEL.name, SMALL_MODEL.config)
    sizes = {"num_blocks": 60, "max_model_len": 64, "max_num_batched_tokens": 24}
    served = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 8192,
        "max_itl_ratio": SERVED_MAX_ITL_RATIO,
    }
    rows = 2 if bench.small else 256
    engine = bench.engine(folder, max_num_seqs=rows, **(sizes if bench.small else served))
    with _frozen():
        for measure in (_measure_unprofiled, _measure_one_stream, _measure_profiled):
            measure(bench, engine, rows)


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep existing objects from the garbage collector, as the engine's process does."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure_unprofiled(bench: Bench, engine: Engine, rows: int) -> None:
    loop = _FullLoad(bench, engine, rows)
    loop.run(0.1 if bench.small else 4.0)
    _measure_accounts(bench, loop, "with prompts")
    _measure_parts(bench, loop, "with prompts", 300)
    loop.end()
    loop = _FullLoad(bench, engine, rows, ends=False)
    loop.fill()
    _measure_accounts(bench, loop, "decodes only")
    _measure_parts(bench, loop, "decodes only", 100)
    _measure_cost(bench, loop)
    _measure_calls(bench, loop, "full batch")
    loop.end()


class _FullLoad:
    """Steps an engine whose every row has a request at any time. ends: outputs differ in length, so
    that prompts come a few at a time; else they are as long as they may be, and are not replaced.
    """

    def __init__(self, bench: Bench, engine: Engine, rows: int, *, ends: bool = True) -> None:
        length = 3 if bench.small else LENGTH if ends else LENGTH // 2
        self.engine = engine
        self._rows = rows
        vocab_size = engine.limits.vocab_size
        self._prompts = random_prompts([length] * 4 * rows, vocab_size, 7)
        self._length = length
        self._num_tokens = None if ends else engine.limits.max_model_len - length
        self._num_made = 0

    def run(self, seconds: float) -> int:
        """Returns how many steps were taken."""
        end_s, num_steps = time.perf_counter() + seconds, 0
        while time.perf_counter() < end_s:
            self.step()
            num_steps += 1
        return num_steps

    def fill(self) -> None:
        """Until no prompt is left to compute, and a little on."""
        self.step()
        for _ in range(200):
            if not self.engine.scheduler.waiting:
                break
            self.step()
        assert not self.engine.scheduler.waiting, "the KV memory has no room for all rows"
        for _ in range(8):
            self.step()

    def step(self) -> None:
        engine = self.engine
        while len(engine._requests) < self._rows:
            self._add()
        for output in engine.step():
            assert output.error is None, output.error

    def end(self) -> None:
        for request_id in list(self.engine._requests):
            self.engine.abort(request_id)
        self.engine.finish_steps()

    def _add(self) -> None:
        index, self._num_made = self._num_made, self._num_made + 1
        count = self._num_tokens or self._length // 2 + index * 37 % self._length + 1
        params = DecodingParams(max_tokens=count, temperature=0.0)
        prompt = self._prompts[index % len(self._prompts)]
        self.engine.add(Request(f"r{index}", list(prompt), params))


def _spent(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """The share of each use in the time between two readings, and the length of this time."""
    names = ("busy_s", "gap_s", "idle_s")
    total_s = sum(after[name] - before[name] for name in names)
    found = {name: (after[name] - before[name]) / total_s for name in (*names, "launching_s")}
    return found | {"total_s": total_s}


def _measure_accounts(bench: Bench, loop: _FullLoad, load: str) -> None:
    """The engine's figures, and NVML's mean over the same seconds."""
    before = loop.engine.stats().utilization
    readings: list[dict[str, float]] = []
    for _ in range(1 if bench.small else 5):
        loop.run(0.05 if bench.small else 0.3)
        readings.append(loop.engine.stats().utilization.get("device", {}))
    after = loop.engine.stats().utilization
    spent = _spent(before, after)
    note = (
        f"gap {spent['gap_s']:.1%}, idle {spent['idle_s']:.1%};"
        f" of it launching at most {spent['launching_s']:.1%}"
    )
    bench.at_least(f"{load}: busy", spent["busy_s"], BUSY_GOAL, "of the time", note)
    if "floor_s" in after:
        total_s = spent["total_s"]
        floor_s = after["floor_s"] - before["floor_s"]
        rates = f"{after['bytes_per_s'] / 1e9:.0f} GB/s, {after['operations_per_s'] / 1e12:.0f}"
        moved = (after["num_bytes"] - before["num_bytes"]) / total_s / 1e9
        done = (after["operations"] - before["operations"]) / total_s / 1e12
        note = f"{moved:.0f} GB/s and {done:.1f} Tflop/s of {rates} Tflop/s as measured"
        bench.add(f"{load}: floor by busy time", floor_s / spent["busy_s"] / total_s, "", note=note)
    for name in ("busy_share", "memory_share"):
        found = [reading[name] for reading in readings if name in reading]
        note = "" if found else "NVML is not there (nvidia-ml-py), or does not say"
        mean = statistics.fmean(found) if found else None
        bench.add(f"{load}: NVML's {name}", mean, "of the time", note=note)


class _Records:
    """Stands in for a step trace."""

    def __init__(self) -> None:
        self.found: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        self.found.append(record)


def _measure_parts(bench: Bench, loop: _FullLoad, load: str, num_steps: int) -> None:
    """Measure the host's parts of a step, with prompts and without. The parts up to `sample` belong
    to the launch of a step, which runs during the step before it. So the parts add up only over
    steps of all kinds."""
    engine, records = loop.engine, _Records()
    engine.trace = records  # type: ignore[assignment]
    try:
        for _ in range(4 if bench.small else num_steps):
            loop.step()
    finally:
        engine.trace = None
    kinds = {"of any kind": records.found}
    kinds["with prompts"] = [record for record in records.found if record.num_prefill_tokens]
    kinds["that only decodes"] = [one for one in records.found if not one.num_prefill_tokens]
    for kind, chosen in kinds.items():
        if not chosen or (kind != "of any kind" and len(chosen) == len(records.found)):
            continue
        means = {part: _mean_ms(chosen, f"{part}_s") for part in PARTS}
        elapsed_ms = _mean_ms(chosen, "elapsed_s")
        tokens = statistics.fmean(record.num_tokens for record in chosen)
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in means.items())
        rest_ms = elapsed_ms - sum(means.values())
        note = f"{parts}, rest {rest_ms:.2f}; {tokens:.0f} tokens; {len(chosen)} steps, means"
        bench.add(f"{load}: a step {kind}", elapsed_ms, "ms", note=note)


def _mean_ms(records: Sequence[StepRecord], name: str) -> float:
    return 1e3 * statistics.fmean(getattr(record, name) for record in records)


def _measure_profiled(bench: Bench, engine: Engine, rows: int) -> None:
    if bench.small:
        return
    loop = _FullLoad(bench, engine, rows, ends=False)
    loop.fill()
    share, seen, launching, note = _profile(loop, num_steps=150)
    name = "decodes only: busy by the engine, less that by the profiler"
    bench.at_most(name, abs(share - seen), DIFFERENCE, "of the time", note, is_time=True)
    loop.end()
    loop = _FullLoad(bench, engine, rows)
    loop.run(3.0)
    share, seen, launching, note = _profile(loop, num_steps=120)
    bench.add(
        "with prompts: busy by the engine, less that by the profiler",
        share - seen,
        "of the time",
        note=note,
    )
    is_within = share - launching - DIFFERENCE <= seen <= share + DIFFERENCE
    bench.check("with prompts: what the profiler sees is between the engine's bounds", is_within)
    loop.end()


def _profile(loop: _FullLoad, num_steps: int) -> tuple[float, float, float, str]:
    """Busy by the engine and by the profiler in the same steps, and what of it the engine calls
    launching: shares of the time; and all in words."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(30):  # the profiler's own start
            loop.step()
        before = loop.engine.stats().utilization
        for _ in range(num_steps):
            loop.step()
        after = loop.engine.stats().utilization
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    pauses = device_pauses(trace["traceEvents"], skipped=0.2)
    spent, seen = _spent(before, after), 1.0 - pauses.idle_share
    share, launching = spent["busy_s"], spent["launching_s"]
    note = (
        f"engine {share:.1%}, of it launching at most {launching:.1%}; profiler {seen:.1%} (without"
        f" pauses above 5 us {1.0 - pauses.long_share:.1%}) in {pauses.span_s * 1e3:.0f} ms;"
        f" {1e3 * spent['total_s'] / num_steps:.2f} ms a step"
    )
    return share, seen, launching, note


def _measure_one_stream(bench: Bench, engine: Engine, rows: int) -> None:
    """One sequence: bound by bytes, and the shortest steps."""
    num_steps = 4 if bench.small else 400
    loop = _FullLoad(bench, engine, 1, ends=False)
    loop.fill()
    for _ in range(num_steps // 4):
        loop.step()
    before = engine.stats().utilization
    for _ in range(num_steps):
        loop.step()
    after = engine.stats().utilization
    spent = _spent(before, after)
    step_ms = 1e3 * spent["total_s"] / num_steps
    note = f"of it launching at most {spent['launching_s']:.1%}; {step_ms:.2f} ms a step"
    if "floor_s" in after:
        busy_s = after["busy_s"] - before["busy_s"]
        note += f"; {(after['floor_s'] - before['floor_s']) / busy_s:.0%} of the floor while busy"
    bench.add("one stream: busy", spent["busy_s"], "of the time", note=note)
    _measure_calls(bench, loop, "one stream")
    loop.end()


class _NoAccounts(Utilization):
    """Keeps none."""

    def record_arrival(self, now_s: float) -> None: ...

    def record_idle(self, now_s: float) -> None: ...

    def account_step(self, *_: Any) -> tuple[float, float]:
        return 0.0, 0.0


@contextmanager
def _without_accounts(engine: Engine) -> Iterator[None]:
    """Switch off accounts and events inside the block, which begins while no step is in flight."""
    runner: Any = engine._runner
    kept, timer = engine.utilization, runner._timer
    engine.utilization, runner._timer = _NoAccounts(0.0), None
    try:
        yield
    finally:
        engine.utilization, runner._timer = kept, timer


@contextmanager
def _with_accounts(engine: Engine) -> Iterator[None]:
    yield


def _measure_cost(bench: Bench, loop: _FullLoad) -> None:
    """Steps that only decode, in turns: without accounts, with, without; and in reverse, so that
    what grows with the contexts cancels. The first and the third differ in nothing."""
    num_steps, num_rounds = (1, 1) if bench.small else (14, 8)
    costs: list[float] = []
    controls: list[float] = []
    turns = (_without_accounts, _with_accounts, _without_accounts)
    for _ in range(num_rounds):
        if bench.left_s < 10:
            break
        took_s = [0.0] * len(turns)
        for turn in (0, 1, 2, 2, 1, 0):
            with turns[turn](loop.engine):
                took_s[turn] += _time_steps(loop, num_steps)
                _drain(loop)
        costs.append(2 * took_s[1] / (took_s[0] + took_s[2]) - 1)
        controls.append(took_s[2] / took_s[0] - 1)
    if not costs:
        return
    note = (
        f"median of {len(costs)} rounds of 6 x {num_steps} steps that only decode; without accounts"
        f" beside without {statistics.median(controls):+.2%}, worst {max(map(abs, controls)):.2%}"
    )
    cost = statistics.median(costs)
    bench.at_most("what the accounts cost", cost, COST_GOAL, "of a step", note, is_time=True)


def _measure_calls(bench: Bench, loop: _FullLoad, load: str) -> None:
    """The time of all calls that the accounts consist of, which includes that of measuring it."""
    engine: Any = loop.engine
    spent: dict[str, float] = {}
    accounts = [(engine.utilization, "account_step")]
    if engine._runner._timer is not None:
        accounts += [(engine._runner._timer, name) for name in ("begin", "end", "wait")]
    for owner, name in accounts:
        setattr(owner, name, _timed(getattr(owner, name), name, spent))
    num_steps = 2 if bench.small else 100
    began_s = time.perf_counter()
    try:
        for _ in range(num_steps):
            loop.step()
        took_s = time.perf_counter() - began_s
    finally:
        for owner, name in accounts:
            delattr(owner, name)
    parts = ", ".join(f"{name} {1e6 * s / num_steps:.1f}" for name, s in spent.items())
    note = f"{parts} us a step of {1e3 * took_s / num_steps:.2f} ms"
    share = sum(spent.values()) / took_s
    bench.add(f"{load}: calls of the accounts", share, "of a step", note=note)


def _timed(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """call, whose time is added to spent[name]."""
    spent[name] = 0.0

    def timed(*arguments: Any, **options: Any) -> Any:
        began_s = time.perf_counter()
        found = call(*arguments, **options)
        spent[name] += time.perf_counter() - began_s
        return found

    return timed


def _drain(loop: _FullLoad) -> None:
    """Fetch what is in flight."""
    engine: Any = loop.engine
    while engine._in_flight:
        landed = engine._fetch(is_idle=True)
        if landed is not None:
            engine._apply(*landed)


def _time_steps(loop: _FullLoad, num_steps: int) -> float:
    """Seconds of num_steps steps, after two steps that fill the queue."""
    for _ in range(2):
        loop.step()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    return time.perf_counter() - began_s
