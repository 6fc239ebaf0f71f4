"""quire beside what it is to replace, on one device, one model and one load.

The load and the memory are the published ones (Kwon et al., SOSP 2023, sections 6.1 to 6.3):
prompts of 161 and outputs of 338 tokens on average, sequences of at most 2,048, room for 15,700
tokens. Beside paging: the contiguous allocators of `quire.bench.baselines` on the same engine,
static batches on the same engine, and transformers' own continuous and static batching. All
requests are there at once; lengths are exact, end tokens end nothing. Figures are output tokens per
second.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.harness import Bench, Load, drive, make_model
from benchmarks.gpu.models import LARGE_MODEL, SMALL_MODEL, Model
from benchmarks.memory.load import Budget, MemoryLoad, make_memory_requests
from quire.bench.baselines.contiguous import KV_ALLOCATORS, PAGED, find_allocator
from quire.bench.contenders import batches
from quire.bench.workload import BenchRequest
from quire.core.scheduling.policy import POLICIES
from quire.core.scheduling.scheduler import Scheduler
from quire.engine.engine import Engine

# The published claims.
OVER_CONTIGUOUS, OVER_STATIC = 2.0, 6.0

NUM_REQUESTS = 120
# Static batching is many times slower, so its rate is measured with fewer requests.
NUM_STATIC = 42
NUM_HF_STATIC = 14
# Pages of transformers' cache are 256 tokens.
HF_PAGE = 256


def setup(bench: Bench, vocab_size: int) -> tuple[list[BenchRequest], Budget, int]:
    """The requests, the memory, the longest sequence."""
    if bench.small:
        load = MemoryLoad(num_prompts=2, input_mean=3, output_mean=2, sigma=0, max_model_len=32)
        return make_memory_requests(load, 61), Budget(96, 8, 4, 24), 32
    load = MemoryLoad(num_prompts=NUM_REQUESTS)
    return make_memory_requests(load, vocab_size), Budget(), load.max_model_len


def make_load(requests: Sequence[BenchRequest]) -> Load:
    return Load(
        [request.prompt_token_ids for request in requests],
        [request.output_len for request in requests],
    )


def measure_allocators(bench: Bench) -> None:
    """Paging against reserving, on the engine of the large model."""
    model = SMALL_MODEL if bench.small else LARGE_MODEL
    engine, requests, budget = _engine(bench, model)
    max_model_len = engine.limits.max_model_len
    load = make_load(requests)
    _warm_up(bench, engine, load)
    rates = {}
    reserving = [name for name in KV_ALLOCATORS if name != PAGED]
    for name in (PAGED, *reserving[: 1 if bench.small else None]):
        other = with_allocator(engine, name)
        _, seconds = drive(other, load)
        rates[name] = load.num_output_tokens / seconds
        ratio = rates[PAGED] / rates[name]
        note = "" if name == PAGED else f"paging: {ratio:.2f} times"
        bench.add(f"{model.name}: {name}", rates[name], "tokens/s", note=note)
    static = _static_rate(
        with_allocator(engine, PAGED), requests[:NUM_STATIC], budget.num_slots // max_model_len
    )
    bench.add(f"{model.name}: static batches", static, "tokens/s")
    ratio = rates[PAGED] / rates["contiguous_max"]
    bench.at_least(f"{model.name}: over contiguous", ratio, OVER_CONTIGUOUS, "times")
    bench.at_least(f"{model.name}: over static", rates[PAGED] / static, OVER_STATIC, "times")


def measure_peers(bench: Bench) -> None:
    """Beside transformers on the small model: with the published memory, and with all of it."""
    model = SMALL_MODEL
    ours = _our_rates(bench, model)
    requests, budget, max_model_len = setup(bench, int(model.config["vocab_size"]))
    peer = Transformers(bench, make_model(bench, model.name, model.config))
    num_pages = max(1, budget.num_slots // HF_PAGE)
    static = requests[: 2 if bench.small else NUM_HF_STATIC]
    seconds = peer.static(static, budget.num_slots // max_model_len)
    rate = make_load(static).num_output_tokens / seconds
    bench.add(f"{model.name}: transformers, static", rate, "tokens/s")
    bench.at_least(f"{model.name}: over its static", ours["published"] / rate, OVER_STATIC, "times")
    total = make_load(requests).num_output_tokens
    for label, pages in (("published", num_pages), ("all", None)):
        seconds = peer.continuous(requests, pages)
        rate = total / seconds
        name = f"{model.name}: transformers, continuous, {label} memory"
        bench.add(name, rate, "tokens/s", note=f"attention {peer.attention}")
        title = f"{model.name}: over its continuous, {label} memory"
        bench.at_least(title, ours[label] / rate, 1.0, "times")


def _our_rates(bench: Bench, model: Model) -> dict[str, float]:
    rates = {}
    for label in ("published", "all"):
        engine, requests, _ = _engine(bench, model, all_memory=label == "all")
        load = make_load(requests)
        _warm_up(bench, engine, load)
        _, seconds = drive(engine, load)
        rates[label] = load.num_output_tokens / seconds
        bench.add(f"{model.name}: quire, {label} memory", rates[label], "tokens/s")
        del engine  # before the next one measures what is free
    return rates


def _warm_up(bench: Bench, engine: Engine, load: Load) -> None:
    """So that no kernel is compiled, and no graph captured, while a load is timed."""
    if not bench.small:
        _, seconds = drive(engine, load)
        print(f"warmed up in {seconds:.1f} s", flush=True)


def _engine(
    bench: Bench, model: Model, *, all_memory: bool = False
) -> tuple[Engine, list[BenchRequest], Budget]:
    folder = make_model(bench, model.name, model.config)
    requests, budget, max_model_len = setup(bench, int(model.config["vocab_size"]))
    options: dict[str, Any] = {"block_size": budget.block_size}
    options |= {"max_model_len": max_model_len, "max_num_seqs": budget.max_num_seqs}
    options["max_num_batched_tokens"] = budget.max_num_batched_tokens
    if bench.small or not all_memory:
        options["num_blocks"] = budget.num_blocks
    return bench.engine(folder, **options), requests, budget


def with_allocator(engine: Engine, name: str) -> Engine:
    """Another engine on the same runner, with nothing in it, whose memory is given out so."""
    before = engine.scheduler
    config = replace(before.memory.config, enable_prefix_caching=name == PAGED)
    memory = find_allocator(name)(config, engine.limits.max_model_len)
    scheduler = Scheduler(before.config, memory, POLICIES.make("fcfs"))
    engine._runner.reset()
    return Engine(scheduler, engine._runner, engine.limits, overlap=engine.overlap)


def _static_rate(engine: Engine, requests: Sequence[BenchRequest], width: int) -> float:
    """Batches of `width` in order, all rows computed until the longest output is there."""
    seconds = 0.0
    for batch in batches(requests, width):
        longest = max(request.output_len for request in batch)
        prompts = [request.prompt_token_ids for request in batch]
        seconds += drive(engine, Load(prompts, [longest] * len(batch)))[1]
    return make_load(requests).num_output_tokens / seconds


class Transformers:
    """The model in transformers, and its two ways to carry a load. Both return seconds."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        import transformers  # takes seconds

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._transformers = transformers
        self._device = bench.device
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=bench.dtype, attn_implementation="sdpa"
        )
        self._model: Any = model.eval().to(bench.device)
        self.attention = "sdpa"

    def continuous(self, requests: Sequence[BenchRequest], num_pages: int | None) -> float:
        """Its paged continuous batching, warmed up. num_pages: None: all memory."""
        sizes = {} if num_pages is None else {"num_blocks": num_pages}
        if self._device.type == "cpu":
            sizes |= {"num_blocks": 16, "max_batch_tokens": 64}
        config = self._transformers.ContinuousBatchingConfig(**sizes)
        generation = self._transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        manager = self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, block=True, timeout=5
        )
        with manager as running:
            began_s = time.perf_counter()
            for request in requests:
                running.add_request(
                    request.prompt_token_ids,
                    request_id=str(request.index),
                    max_new_tokens=request.output_len,
                    eos_token_id=-1,
                )
            lengths: dict[str, int] = {}
            while len(lengths) < len(requests):
                result = running.get_result(timeout=10)
                assert result is not None or running.is_running(), "its thread has ended"
                if result is not None and result.is_finished():
                    assert result.error is None, result.error
                    lengths[result.request_id] = len(result.generated_tokens)
            seconds = time.perf_counter() - began_s
            self.attention = self._model.config._attn_implementation
        wanted = {str(request.index): request.output_len for request in requests}
        assert lengths == wanted, "its answers are not as long as was asked for"
        return seconds

    @torch.inference_mode()
    def static(self, requests: Sequence[BenchRequest], width: int) -> float:
        """`generate` on batches padded on the left, each until its longest output is there."""
        self._generate(requests[:1], 4)
        began_s = time.perf_counter()
        for batch in batches(requests, width):
            self._generate(batch, max(request.output_len for request in batch))
        return time.perf_counter() - began_s

    def _generate(self, batch: Sequence[BenchRequest], num_tokens: int) -> None:
        prompts = [request.prompt_token_ids for request in batch]
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        config = self._transformers.GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        made = self._model.generate(
            torch.tensor(padded, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=config,
        )
        assert made.shape[1] == longest + num_tokens, "generate stopped early"
