"""How fast whole models are: one stream, a full batch, what the device waits for, CUDA graphs.

Random weights in published shapes: what a step takes does not depend on their values. The floors
are those of `cpu/floors.py` with the device's measured bandwidth and matrix rate.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.harness import (
    GIB,
    LLAMA_8B,
    QWEN3_600M,
    Bench,
    Load,
    drive,
    make_model,
    random_prompts,
)
from quire.engine.engine import Engine
from quire.engine_client.device_ledger import ledger_parts
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.runtime.graphs import graph_sizes

IDLE_GOAL = 0.03
# A pause that is longer lies between two steps, not between two kernels of a replayed graph.
PAUSE_US = 5.0
CAPTURE_GOAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Model:
    """one_stream_goal: share of the weight-streaming floor. batch: sequences of the full batch."""

    name: str
    config: Mapping[str, Any]
    one_stream_goal: float
    batch: int = 256


SMALL_MODEL = Model("qwen3-0.6b", QWEN3_600M, 0.40)
LARGE_MODEL = Model("llama-8b", LLAMA_8B, 0.80)


def measure_small_model(bench: Bench) -> None:
    measure_model(bench, SMALL_MODEL)


def measure_large_model(bench: Bench) -> None:
    measure_model(bench, LARGE_MODEL)


def measure_model(bench: Bench, model: Model) -> None:
    """All of one model, on one engine."""
    folder = make_model(bench, model.name, model.config)
    batch = 2 if bench.small else model.batch
    began_s = time.perf_counter()
    sizes = {"num_blocks": 60, "max_model_len": 64, "max_num_batched_tokens": 24}
    options = sizes if bench.small else {"max_model_len": 4096, "max_num_batched_tokens": 8192}
    engine = bench.engine(folder, max_num_seqs=batch, **options)
    bench.add(f"{model.name}: load, size and prove", time.perf_counter() - began_s, "s")
    report_memory(bench, model, engine)
    measure_graphs(bench, model, engine, batch)
    vocab_size = 61 if bench.small else int(model.config["vocab_size"])
    measure_one_stream(bench, model, folder, engine, vocab_size)
    measure_full_batch(bench, model, folder, engine, batch, vocab_size)
    if not bench.small:
        measure_idle(bench, model, engine, vocab_size)


def report_memory(bench: Bench, model: Model, engine: Engine) -> None:
    """The ledger, and that it agrees with the driver."""
    parts = ledger_parts(engine.facts)
    note = ", ".join(f"{name} {count / GIB:.2f}" for name, count in parts.items())
    bench.add(f"{model.name}: memory", sum(parts.values()) / GIB, "GiB", note=f"GiB: {note}")
    if bench.small:
        return
    free, total = torch.cuda.mem_get_info()
    taken = (total - free) / GIB
    # The allocator holds no activations now: they are what the ledger promises for a step.
    most = (sum(parts.values()) - parts["unused"]) / GIB + 0.1
    bench.at_most(f"{model.name}: taken of what the ledger says", taken, most, "GiB", is_time=False)


def measure_graphs(bench: Bench, model: Model, engine: Engine, batch: int) -> None:
    """All sizes of decode steps, captured now."""
    runner: Any = engine._runner
    if runner.graphs is None:
        bench.check(f"{model.name}: steps are captured", bench.small, "this engine captures none")
        return
    sizes = graph_sizes(batch)
    runner.capture_graphs(sizes)
    seconds, note = runner.graphs.capture_s, f"{len(sizes)} sizes up to {batch}"
    bench.at_most(f"{model.name}: capture", seconds, CAPTURE_GOAL_S, "s", note, is_time=True)
    used = runner.graphs.num_bytes / GIB
    bench.add(f"{model.name}: memory of CUDA graphs", used, "GiB", note=note)


def measure_one_stream(
    bench: Bench, model: Model, folder: Path, engine: Engine, vocab_size: int
) -> None:
    """128 tokens in, then the time from token to token."""
    prompt_len, count = (3, 3) if bench.small else (128, 256)
    (prompt,) = random_prompts([prompt_len], vocab_size, 5)
    if not bench.small:
        drive(engine, Load([prompt], [count // 2]))
    ((answer,), _) = drive(engine, Load([prompt], [count]))
    # The last result comes a step late, and alone: the gaps between are what a client sees.
    gaps = [later - earlier for earlier, later in pairwise(answer.times_s[1:])]
    floors = bench.floors(folder)
    floor_tok_s = floors.decode_tok_s([prompt_len + count // 2])
    tok_s = 1 / statistics.mean(gaps)
    median_ms = statistics.median(gaps) * 1e3
    note = f"{tok_s:.0f} tokens/s, floor {floor_tok_s:.0f}; median {median_ms:.2f} ms"
    name = f"{model.name}: one stream"
    bench.at_least(name, tok_s / floor_tok_s, model.one_stream_goal, "of the floor", note)


def measure_full_batch(
    bench: Bench, model: Model, folder: Path, engine: Engine, batch: int, vocab_size: int
) -> None:
    """As many sequences as run at once, all there at once, each 256 tokens in and out."""
    length, count = (3, 3) if bench.small else (256, 256)
    if not bench.small:
        drive(engine, Load(random_prompts([length] * batch, vocab_size, 1), [8] * batch))
    prompts = random_prompts([length] * batch, vocab_size, 2)
    answers, seconds = drive(engine, Load(prompts, [count] * batch))
    floors = bench.floors(folder)
    tok_s = batch * count / seconds
    floor_tok_s = floors.crowd_tok_s([(length, count)] * batch, batch)
    note = f"{tok_s:.0f} tokens/s, floor {floor_tok_s:.0f}, with the prompts' {length} tokens each"
    bench.add(f"{model.name}: batch of {batch}", tok_s / floor_tok_s, "of the floor", note=note)
    # Between the last first token and the first last one all decode.
    begins = max(answer.times_s[0] for answer in answers)
    ends = min(answer.times_s[-1] for answer in answers)
    decoded = sum(sum(begins < at <= ends for at in answer.times_s) for answer in answers)
    if decoded:
        tok_s = decoded / (ends - begins)
        floor_tok_s = floors.decode_tok_s([length + count // 2] * batch)
        note = f"{tok_s:.0f} tokens/s, floor {floor_tok_s:.0f}"
        name = f"{model.name}: batch of {batch}, while all decode"
        bench.add(name, tok_s / floor_tok_s, "of the floor", note=note)


def measure_idle(bench: Bench, model: Model, engine: Engine, vocab_size: int) -> None:
    """Measure the share of time in which the device waits between steps of 64 decoding
    sequences."""
    from torch.profiler import ProfilerActivity, profile

    num = 64
    load = Load(random_prompts([128] * num, vocab_size, 3), [160] * num)
    drive(engine, load)
    _add(engine, load)
    for _ in range(40):
        engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(60):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work():
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    pauses = device_pauses(trace["traceEvents"], skipped=0.2)  # the profiler's own start
    note = (
        f"{pauses.num_pauses} pauses above {PAUSE_US:g} us in {pauses.span_s * 1e3:.0f} ms;"
        f" all pauses together {pauses.idle_share:.1%}"
    )
    name = f"{model.name}: device idle between steps of {num}"
    bench.at_most(name, pauses.long_share, IDLE_GOAL, "of the time", note, is_time=True)


def _add(engine: Engine, load: Load) -> None:
    from quire.core.request import Request
    from quire.core.sampling_params import DecodingParams

    for index, (prompt, count) in enumerate(zip(load.prompts, load.num_tokens, strict=True)):
        params = DecodingParams(max_tokens=count, **load.params)
        engine.add(Request(str(index), list(prompt), params))


@dataclass(frozen=True, slots=True)
class Pauses:
    """The shares of a time span in which the device did nothing. Long pauses are above PAUSE_US."""

    span_s: float
    idle_share: float
    long_share: float
    num_pauses: int


def device_pauses(events: Iterable[Mapping[str, Any]], skipped: float = 0.0) -> Pauses:
    """events: of a Chrome trace; what ran on the device has a category below. Times are in us.
    skipped: of what ran, the share that came first and is left out."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in kinds and event.get("ph") == "X"
    )
    spans = spans[int(skipped * len(spans)) :]
    assert spans, "the trace has nothing that ran on the device"
    pauses: list[float] = []
    busy_until = spans[0][0]
    for begin, end in spans:
        if begin > busy_until:
            pauses.append(begin - busy_until)
        busy_until = max(busy_until, end)
    span = busy_until - spans[0][0]
    long_ones = [pause for pause in pauses if pause > PAUSE_US]
    return Pauses(span / 1e6, sum(pauses) / span, sum(long_ones) / span, len(long_ones))


def check_memory(bench: Bench) -> None:
    """Check that sizes that don't fit are refused at the start, with advice on what to lower."""
    folder = make_model(bench, SMALL_MODEL.name, SMALL_MODEL.config)
    cases: dict[str, dict[str, Any]] = {
        "a KV cache larger than the device": {"kv_cache_memory": "900GiB"},
        "a share that leaves no block": {"gpu_memory_utilization": 1e-9},
    }
    if not bench.small:
        long = {"max_model_len": 40_960, "gpu_memory_utilization": 0.025}
        cases["a pool too small for max_model_len"] = long
    for name, options in cases.items():
        _check_refused(bench, name, folder, options)
    if not bench.small:
        # With all but a little taken by somebody else, here by this process.
        size = torch.cuda.mem_get_info()[0] - 7 * GIB // 2
        ballast = torch.empty(size, dtype=torch.uint8, device=bench.device)
        many = {"max_num_batched_tokens": 2**17, "max_num_seqs": 512, "max_model_len": 4096}
        _check_refused(bench, "a step larger than what is left", folder, many)
        del ballast


def _check_refused(bench: Bench, name: str, folder: Path, options: dict[str, Any]) -> None:
    try:
        bench.engine(folder, **options)
    except InsufficientMemoryError as error:
        named = [word for word in OPTIONS if word in str(error)]
        bench.check(name, bool(named), str(error))
    except ConfigurationError as error:
        bench.check(name, False, f"another error: {error}")
    else:
        bench.check(name, False, "the engine was built")


OPTIONS = (
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "gpu_memory_utilization"),
    *("kv_cache_memory", "quantization", "num_blocks", "KV cache"),
)
