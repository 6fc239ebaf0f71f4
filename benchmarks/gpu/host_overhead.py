"""The host's share of a step on a device, which should overlap with the device's own time.

    python -m benchmarks.gpu.host_overhead [--rows 64,256] [--out host.json] [--profile 40]

The real engine, scheduler, memory, rows and buffers, over a device that takes no time: a model
whose layers do nothing, a sampler that knows its tokens. What is left is what the host does for
each step: plan it, build its inputs, fetch, apply, and pack the outputs for the API server. The
rows are those of a device's path, with copies within main memory. What CUDA adds, the launches of a
captured graph, of the logits and of sampling, is not in here: `gpu.py` measures the whole on a
device, as the time that it is idle between two steps. Steps don't overlap here, which changes
nothing in what the host does, only what it waits for.

Requests of 161 prompt and 338 output tokens come as others end, so that all rows are in use; a step
that also computes prompts is told apart from one that only decodes. Times are of the processor, so
that neighbours don't count; those of the parts are of the wall.
"""

import argparse
import gc
import itertools
import json
import pstats
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from cProfile import Profile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from quire.attention.interface import AttentionBatch, AttentionCall, AttentionSpec
from quire.attention.kv_format import KVFormat
from quire.attention.torch_paged import TorchPagedAttention
from quire.bench.machine import processor
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine_client.messages import Outputs
from quire.ipc import encode
from quire.kernels.transfers import DeviceLink
from quire.layers.operator_module import OperatorModule
from quire.models.interface import CausalLM, InputEmbeds
from quire.observability.step_trace import StepRecord
from quire.runtime.batch import RowBatch
from quire.runtime.device_rows import DeviceRows
from quire.runtime.graphs import graph_sizes
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner
from quire.runtime.page_layout import plan_layout
from quire.sampling.host.history import Ints
from quire.sampling.host.processors import RowMasks
from quire.sampling.host.sampler import (
    AheadSampler,
    PendingLogprobs,
    PendingSample,
    Rows,
    SampledTokens,
    SamplingRows,
)

VOCAB_SIZE = 151_936
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 161, 338
MAX_MODEL_LEN = 2048
MAX_NUM_BATCHED_TOKENS = 8192
PARTS = ("schedule", "build", "plan", "forward", "sample", "wait", "apply", "pack")

COPY_BYTES_PER_S = 4.2e12  # of an H200: the 88% of its 4.8e12 that copies reach


@dataclass(frozen=True, slots=True)
class Model:
    """The bytes that a step reads in 16 bits: all weights, and K and V of each token of a
    context."""

    weight_bytes: float
    bytes_per_token: int

    def floor_s(self, num_rows: int) -> float:
        """The least seconds of a decode step of num_rows rows."""
        context = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS / 2
        num_bytes = self.weight_bytes + num_rows * context * self.bytes_per_token
        return num_bytes / COPY_BYTES_PER_S


MODELS = {
    "0.6B": Model(2 * 0.596e9, 28 * 8 * 128 * 2 * 2),  # Qwen3-0.6B
    "8B": Model(2 * 8.03e9, 32 * 8 * 128 * 2 * 2),  # Llama-3.1-8B
}


class NoModel(CausalLM):
    """Hidden states and logits that nobody computed."""

    def __init__(self, max_num_tokens: int, max_num_rows: int) -> None:
        OperatorModule.__init__(self)
        self.vocab_size = VOCAB_SIZE
        self.hidden_size = 1
        self.attention_specs = (AttentionSpec(1, 1, 8, 1.0),)
        self._hidden = torch.zeros(max_num_tokens, 1)
        self._logits = torch.zeros(max_num_rows, 1)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._hidden[: len(token_ids)]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        return self._hidden[: len(positions)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class NoAttention(TorchPagedAttention):
    """Plans nothing."""

    def plan(self, batch: AttentionBatch) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Known:
    """See `PendingSample`."""

    tokens: SampledTokens

    def fetch(self) -> SampledTokens:
        return self.tokens


class NoSampler:
    """Always the same tokens; the options of rows are kept as ever. See `StepSampler`."""

    def __init__(self, max_num_rows: int) -> None:
        self.rows = SamplingRows(max_num_rows, VOCAB_SIZE)
        self.ahead: AheadSampler | None = None
        self._tokens = np.arange(100, 100 + max_num_rows)

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: RowMasks | None = None
    ) -> PendingSample:
        return Known(SampledTokens(self._tokens[: len(rows)]))

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        raise AssertionError("nobody asks for these here")


def make_engine(num_rows: int) -> Engine:
    """Every row may grow to its end."""
    num_blocks = 2 * num_rows * -(-(NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS) // BLOCK_SIZE)
    model = NoModel(MAX_NUM_BATCHED_TOKENS, num_rows)
    layout = plan_layout(
        model.attention_specs, NoAttention, BLOCK_SIZE, KVFormat.plain(torch.float32)
    )
    memory = KVCacheManager(KVCacheConfig(layout.groups, num_blocks, BLOCK_SIZE, True, b"secret"))
    scheduler = Scheduler(SchedulerConfig(num_rows, MAX_NUM_BATCHED_TOKENS), memory)
    device = torch.device("cpu")
    host = RowBatch(
        num_rows=num_rows,
        max_model_len=MAX_MODEL_LEN,
        max_num_tokens=MAX_NUM_BATCHED_TOKENS,
        num_groups=len(layout.groups),
        block_size=BLOCK_SIZE,
    )
    runner = ModelRunner(
        model,
        NoAttention(),
        KVCache(layout, num_blocks, device),
        DeviceRows(host, DeviceLink(device), graph_sizes(num_rows)),
        NoSampler(num_rows),
    )
    limits = ModelLimits(VOCAB_SIZE, MAX_MODEL_LEN)
    return Engine(scheduler, runner, limits, timing=runner.timing)


def draw_requests(seed: int) -> Iterator[Request]:
    """Prompts without anything in common."""
    draws = np.random.default_rng(seed)
    params = DecodingParams(NUM_OUTPUT_TOKENS, temperature=0.7, end_token_ids=(2,))
    index = 0
    while True:
        prompt = draws.integers(1000, VOCAB_SIZE, NUM_PROMPT_TOKENS).tolist()
        yield Request(f"request-{index}", prompt, params)
        index += 1


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the engine and what its API server is sent. host_us: of the processor. parts_us:
    of the wall, by PARTS."""

    num_prefill_tokens: int
    parts_us: dict[str, float]
    host_us: float


class _Records:
    """Stands in for a step trace: the last record is at hand."""

    def __init__(self) -> None:
        self._last: StepRecord | None = None

    def write(self, record: StepRecord) -> None:
        self._last = record

    def step(self, pack_s: float, host_s: float) -> Step:
        """The one that was written last; none is taken twice."""
        record, self._last = self._last, None
        assert record is not None
        parts = {name: 1e6 * getattr(record, f"{name}_s") for name in PARTS if name != "pack"}
        return Step(record.num_prefill_tokens, parts | {"pack": 1e6 * pack_s}, 1e6 * host_s)


def run(num_rows: int, num_steps: int, profile: Profile | None = None) -> list[Step]:
    """Steps in a crowd of all lengths, after as many as make it one."""
    engine, records = make_engine(num_rows), _Records()
    engine.trace = records  # type: ignore[assignment]
    requests = draw_requests(seed=num_rows)
    steps: list[Step] = []
    num_open = num_calls = 0
    while len(steps) < num_steps:
        # At first one comes every few steps, so that they end one by one later.
        num_wanted = min(num_rows, 1 + num_rows * num_calls // NUM_OUTPUT_TOKENS)
        for request in itertools.islice(requests, num_wanted - num_open):
            engine.add(request)
        is_warm = num_calls >= 2 * NUM_OUTPUT_TOKENS
        if is_warm and profile is not None:
            profile.enable()
        began_s = time.thread_time()
        outputs = engine.step()
        packing_s = time.perf_counter()
        encode(Outputs(outputs))
        packed_s = time.perf_counter()
        host_s = time.thread_time() - began_s
        if profile is not None:
            profile.disable()
        num_open = num_wanted - sum(output.finish_reason is not None for output in outputs)
        num_calls += 1
        if is_warm:
            steps.append(records.step(packed_s - packing_s, host_s))
    return steps


@dataclass(frozen=True, slots=True)
class Share:
    """Medians in microseconds; host_us: of whole steps, and their mean and 99th percentile.

    hides_behind: model -> what a step takes at least over what the host needs for it.
    """

    num_rows: int
    kind: str
    num_steps: int
    parts_us: dict[str, float]
    host_us: float
    host_mean_us: float
    host_p99_us: float
    hides_behind: dict[str, float]


def summarize(num_rows: int, steps: Sequence[Step]) -> list[Share]:
    """The shares of steps that only decode, and of steps with prompts."""
    kinds = {
        "decode": [step for step in steps if not step.num_prefill_tokens],
        "with prompts": [step for step in steps if step.num_prefill_tokens],
    }
    return [_share(num_rows, kind, chosen) for kind, chosen in kinds.items() if chosen]


def _share(num_rows: int, kind: str, steps: Sequence[Step]) -> Share:
    host = sorted(step.host_us for step in steps)
    median = statistics.median(host)
    return Share(
        num_rows,
        kind,
        len(steps),
        {part: statistics.median(step.parts_us[part] for step in steps) for part in PARTS},
        median,
        statistics.fmean(host),
        host[int(0.99 * (len(host) - 1))],
        {name: 1e6 * model.floor_s(num_rows) / median for name, model in MODELS.items()},
    )


def table(shares: Sequence[Share]) -> str:
    """As markdown."""
    head = ["rows", "step", *PARTS, "host (mean, p99)", *(f"{one} / host" for one in MODELS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for share in shares:
        cells = [str(share.num_rows), share.kind]
        cells += [f"{share.parts_us[part]:.0f}" for part in PARTS]
        cells.append(f"{share.host_us:.0f} ({share.host_mean_us:.0f}, {share.host_p99_us:.0f})")
        cells += [f"{share.hides_behind[one]:.1f}" for one in MODELS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="64,256", help="crowds, by commas (%(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="of each crowd (%(default)s)")
    parser.add_argument("--out", type=Path, help="where to write all figures as JSON")
    parser.add_argument(
        "--profile", type=int, help="also print this number of functions, by their own time"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as the engine's process does
    shares: list[Share] = []
    for num_rows in map(int, options.rows.split(",")):
        shares += summarize(num_rows, run(num_rows, options.steps))
        if options.profile:
            profile = Profile()
            run(num_rows, options.steps, profile)
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
    print(f"{processor()}; microseconds, medians\n\n{table(shares)}")
    if options.out is not None:
        found = {"processor": processor(), "shares": [asdict(share) for share in shares]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
