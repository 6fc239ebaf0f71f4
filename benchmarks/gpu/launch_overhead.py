"""The host's time for the launches of a step, on any machine: decode steps and mixed steps.

    python -m benchmarks.gpu.launch_overhead [--rows 64,256] [--layers 28] [--out launches.json]

A real engine runs its path of a device, with a real model of small layers. Each launch of a Triton
kernel goes through Triton's own `JITFunction.run`, which binds the arguments and finds the compiled
kernel; but the launcher is empty, and nothing is compiled. Products of torch return memory that
they never wrote. So what is left is the Python of quire and Triton. What a GPU adds, the calls of
its driver (for a launch, a product, a copy, a graph), is not in here. `host_overhead.py` has the
rest of a step: planning, sampling, results.

Two engines run the same load in turns, step by step. One launches all kernels; the other replays
captured steps, so that it fills their buffers and makes one call. Requests of 161 prompt tokens
come as others end, so that all rows are in use. Times are of the thread, medians in microseconds;
they mean something as ratios between the two engines.
"""

import argparse
import gc
import importlib
import json
import os
import pkgutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are imported

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver, jit

import quire.kernels.triton
from benchmarks.gpu.harness import QWEN3_600M, Bench, make_model, random_prompts
from benchmarks.gpu.host_overhead import NoSampler
from quire.assembly.build import build_engine
from quire.attention.triton_plan import DeviceLimits
from quire.bench.machine import processor
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.observability.step_trace import StepRecord
from quire.runtime.graphs import Computation, RepeatedCalls

NUM_PROMPT_TOKENS = 161
MAX_MODEL_LEN = 512
VOCAB_SIZE = 512
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
}
H200 = DeviceLimits(132, 228 << 10, 227 << 10, is_wide=True)
WAYS, KINDS = ("launched", "replayed"), ("decode", "mixed")


class Counts:
    """The numbers of launches and products so far, and the thread's time in them."""

    launches = 0
    products = 0
    #: Seconds in which the runner built, planned and launched steps.
    execute_s = 0.0


class NoGpu(DriverBase):  # type: ignore[misc]
    """An H200 without a device: Triton asks for its kind and its stream."""

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def empty_launches(counts: Counts) -> None:
    """Let launches and products compute nothing, and count them. Call it before an engine."""
    driver.set_active(NoGpu())

    def launch(*arguments: Any) -> None:
        counts.launches += 1

    def compile_nothing(self: Any, key: Any, signature: Any, device: int, *rest: Any) -> Any:
        kernel = SimpleNamespace(
            run=launch, function=0, packed_metadata=(), launch_metadata=lambda *arguments: None
        )
        self.device_caches[device][0][key] = kernel
        return kernel

    def multiply_nothing(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        counts.products += 1
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    jit.JITFunction._do_compile = compile_nothing
    torch.nn.functional.linear = multiply_nothing
    # Kernels are decorated when they are imported. After that, the engine takes the CPU for a place
    # where they run, as it does in the interpreter.
    for module in pkgutil.walk_packages(quire.kernels.triton.__path__, "quire.kernels.triton."):
        importlib.import_module(module.name)
    knobs.runtime.interpret = True
    DeviceLimits.of = staticmethod(lambda device: H200)  # type: ignore[method-assign]


class OneCall(RepeatedCalls):
    """A replay is one call, which computes nothing."""

    def capture(self, computation: Computation) -> Computation:
        result = computation()
        return lambda: result


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine."""

    is_mixed: bool
    num_tokens: int
    launches: int
    products: int
    #: The thread's time to build, plan and launch the step.
    execute_us: float
    #: The thread's time for all of the step.
    host_us: float


class _Records:
    """Stands in for a step trace, and has the last record."""

    last: StepRecord | None = None

    def write(self, record: StepRecord) -> None:
        self.last = record


def make_engine(folder: Path, num_rows: int, counts: Counts, *, replays: bool) -> Engine:
    num_blocks = num_rows * (MAX_MODEL_LEN // 16)
    options = {"device": "cpu", "kernels": "triton", "async_scheduling": False}
    options |= {"dtype": "bfloat16", "max_num_seqs": num_rows, "max_model_len": MAX_MODEL_LEN}
    options |= {"num_blocks": num_blocks, "skip_tokenizer_init": True}
    options |= {"enable_prefix_caching": False}
    engine = build_engine({"model": str(folder), "enforce_eager": not replays, **options})
    runner: Any = engine._runner
    # The device's sampler would fetch tokens that no kernel wrote.
    runner._sampler = NoSampler(num_rows)
    if replays:
        runner.graphs._capture = OneCall()
    execute = runner.execute

    def timed(plan: StepPlan) -> None:
        began_s = time.thread_time()
        execute(plan)
        counts.execute_s += time.thread_time() - began_s

    runner.execute = timed
    return engine


def steps_of(
    engine: Engine, num_rows: int, num_output_tokens: int, counts: Counts
) -> Iterator[Step]:
    """Endless steps with all rows in use, in a crowd of all lengths."""
    records, num_added = _Records(), 0
    engine.trace = records  # type: ignore[assignment]
    prompts = random_prompts([NUM_PROMPT_TOKENS] * 64, VOCAB_SIZE, seed=num_rows)
    num_open = 0
    while True:
        while num_open < num_rows:
            # The first requests have fewer tokens, so that later one ends after the other.
            share = min(1.0, (num_added + 1) / num_rows)
            params = DecodingParams(int(1 + (num_output_tokens - 1) * share), temperature=0.7)
            engine.add(Request(str(num_added), prompts[num_added % 64], params))
            num_added, num_open = num_added + 1, num_open + 1
        launches, products, execute_s = counts.launches, counts.products, counts.execute_s
        began_s = time.thread_time()
        outputs = engine.step()
        host_s = time.thread_time() - began_s
        record = records.last
        assert record is not None
        yield Step(
            record.num_prefill_tokens > 0,
            record.num_tokens,
            counts.launches - launches,
            counts.products - products,
            1e6 * (counts.execute_s - execute_s),
            1e6 * host_s,
        )
        num_open -= sum(output.finish_reason is not None for output in outputs)


@dataclass(frozen=True, slots=True)
class Share:
    """Medians of an engine's steps of one kind."""

    num_rows: int
    kind: str
    way: str
    num_steps: int
    launches: float
    products: float
    execute_us: float
    host_us: float


def measure(
    folder: Path, num_rows: int, num_steps: int, num_output_tokens: int, counts: Counts
) -> list[Share]:
    """`num_steps` of each engine, in turns. Both have the same load, so their steps are alike."""
    engines = {
        way: make_engine(folder, num_rows, counts, replays=way == "replayed") for way in WAYS
    }
    runs = {
        way: steps_of(engine, num_rows, num_output_tokens, counts)
        for way, engine in engines.items()
    }
    steps: dict[str, list[Step]] = {way: [] for way in WAYS}
    # The first steps compute the prompts of the crowd. Then all sizes are captured that come up.
    num_first = NUM_PROMPT_TOKENS * num_rows // 2048 + 2
    for index in range(num_first + 2 * num_steps):
        for way, run in runs.items():
            step = next(run)
            if index >= num_first + num_steps:
                steps[way].append(step)
    sizes = [[step.num_tokens for step in found] for found in steps.values()]
    assert sizes[0] == sizes[1], "the engines have different loads"
    return [share for way in WAYS for share in _shares(num_rows, way, steps[way])]


def _shares(num_rows: int, way: str, steps: Sequence[Step]) -> Iterator[Share]:
    for kind in KINDS:
        chosen = [step for step in steps if step.is_mixed == (kind == "mixed")]
        if chosen:
            yield Share(
                num_rows,
                kind,
                way,
                len(chosen),
                statistics.median(step.launches for step in chosen),
                statistics.median(step.products for step in chosen),
                statistics.median(step.execute_us for step in chosen),
                statistics.median(step.host_us for step in chosen),
            )


def table(shares: Sequence[Share], num_layers: int) -> str:
    """As markdown. The launches of a layer include its products."""
    head = ["rows", "step", "kernels", "steps", "launches", "products", "a layer"]
    head += ["build and launch", "all of the host"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for share in shares:
        a_layer = (share.launches + share.products) / num_layers
        cells = [str(share.num_rows), share.kind, share.way, str(share.num_steps)]
        cells += [f"{share.launches:.0f}", f"{share.products:.0f}", f"{a_layer:.1f}"]
        cells += [f"{share.execute_us:.0f}", f"{share.host_us:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="64,256", help="crowds, by commas (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="of the model (%(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="of each engine (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=338, help="of a request (%(default)s)")
    parser.add_argument("--out", type=Path, help="where to write all figures as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts = Counts()
    empty_launches(counts)
    shares: list[Share] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench("launch-overhead", Path(name), Path(name) / "rows.jsonl")
        config = QWEN3_600M | SMALL | {"num_hidden_layers": options.layers}
        folder = make_model(bench, "model", config)
        gc.collect()
        gc.freeze()  # as the engine's process does
        for num_rows in map(int, options.rows.split(",")):
            shares += measure(folder, num_rows, options.steps, options.output_tokens, counts)
    print(f"{processor()}; microseconds, medians\n\n{table(shares, options.layers)}")
    if options.out is not None:
        found = {"processor": processor(), "shares": [asdict(share) for share in shares]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
