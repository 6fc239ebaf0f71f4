"""Claims that beams which share blocks are searched faster.

Beside the same engine with a copy of K and V for each beam, and beside transformers' `generate`. A
model searches, since beams live by its probabilities. Each of its steps is timed on two clocks: the
virtual one of `bench.memory`, and processor time of one computing thread.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.claims.claim import COMMAND, FOLKLORE, Claim, Setting, StudyResult
from benchmarks.claims.copied_forks import copied_forks
from benchmarks.claims.crowds import COST
from benchmarks.claims.saturated import TURN_S, take_turns
from benchmarks.memory.load import Budget, MemoryLoad
from benchmarks.memory.meter import WARM_UP_SHARE
from benchmarks.memory.sharing import BEAMS, branched, text_requests
from benchmarks.memory.study import ProcessorClock
from benchmarks.memory.timed_runner import TimedRunner
from quire.assembly.build import build_engine
from quire.bench.compare import say
from quire.bench.hf_generate import HfModel
from quire.bench.workload import BenchRequest
from quire.core.memory.kv_cache_manager import KVManagerFactory
from quire.core.step import Runner
from quire.errors import ConfigurationError, StepFailedError
from quire.hub.model_folder import resolve_model_folder
from quire.simulation.virtual_engine import VirtualClock
from quire.text.tokenizer import Tokenizer

SOURCE = f"{FOLKLORE} (Kwon et al., SOSP 2023, section 6.3: 2.3 times Orca (Oracle) with 6 beams)"
TIMES = 10.0
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class SearchLoad:
    """The beam searches to run. turn_s: see `saturated.take_turns`."""

    load: MemoryLoad
    budget: Budget
    width: int = 6
    turn_s: float = TURN_S


# The memory lines' lengths and slots, and rows for as many beams as fit.
LOAD = SearchLoad(MemoryLoad(num_prompts=100), Budget(max_num_seqs=768))
QUICK = SearchLoad(
    MemoryLoad(num_prompts=16, input_mean=12, output_mean=8, max_model_len=64),
    Budget(256, 8, 48, 128),
    width=2,
    turn_s=math.inf,
)


class Search:
    """One engine's searches. Measures from when a tenth has ended until none waits.

    num_tokens: of all beams. seconds, real_seconds: by the virtual clock, and of processor time.
    running_s: sequences that run, multiplied with virtual seconds.
    """

    def __init__(
        self,
        setting: Setting,
        spec: SearchLoad,
        requests: Sequence[BenchRequest],
        allocator: KVManagerFactory | None,
    ) -> None:
        """All requests are there at once. allocator: None: pages, which forks share."""
        self._width = spec.width
        self._block_size = spec.budget.block_size
        self._clock, self._real_clock = VirtualClock(), ProcessorClock()
        self._num_to_warm = WARM_UP_SHARE * len(requests) * spec.width
        self._num_ended = 0
        self.num_tokens = 0
        self.seconds = self.real_seconds = self.running_s = 0.0
        options = _options(setting, spec)
        self._engine = build_engine(options, kv_allocator=allocator, watch=self._watch)
        for request in requests:
            self._engine.add(branched(request, BEAMS, spec.width))

    def _watch(self, runner: Runner) -> Runner:
        self.runner = TimedRunner(runner, COST, self._clock, self._block_size)
        return self.runner

    @property
    def is_done(self) -> bool:
        """See `Steps`."""
        waiting = self._engine.scheduler.waiting
        return self._num_ended >= self._num_to_warm and not len(waiting)

    def step(self) -> float:
        """See `Steps`; in processor time."""
        is_measured = self._num_ended >= self._num_to_warm
        num_sampled = self.runner.num_sampled_rows
        started_s, real_started_s = self._clock(), self._real_clock()
        outputs = self._engine.step()
        seconds, real_seconds = self._clock() - started_s, self._real_clock() - real_started_s
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
        self._num_ended += len(outputs)
        if is_measured:
            num_running = len(self._engine.scheduler.running) + len(outputs)
            self.num_tokens += self.runner.num_sampled_rows - num_sampled
            self.seconds += seconds
            self.real_seconds += real_seconds
            self.running_s += seconds * num_running
        return real_seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one beam of each search, on the virtual clock. All beams of a search
        are equally long."""
        return self.num_tokens / self._width / self.seconds

    @property
    def real_tokens_per_s(self) -> float:
        """Tokens per second of one beam of each search, by processor time."""
        return self.num_tokens / self._width / self.real_seconds

    @property
    def num_at_once(self) -> float:
        """Searches that run, on average over virtual time."""
        return self.running_s / self._width / self.seconds


def _options(setting: Setting, spec: SearchLoad) -> dict[str, Any]:
    budget = spec.budget
    options: dict[str, Any] = {
        "dtype": DTYPE,
        "max_model_len": spec.load.max_model_len,
        "num_blocks": budget.num_blocks,
        "block_size": budget.block_size,
        "max_num_seqs": budget.max_num_seqs,
        "max_num_batched_tokens": budget.max_num_batched_tokens,
        "num_threads": 1,
        "enable_prefix_caching": False,
    }
    return options if setting.model is None else {**options, "model": setting.model}


class HfSearch:
    """transformers' `generate` on one batch after the other; a step is a whole batch.

    num_tokens: of the best beams, as far as they were asked for.
    """

    def __init__(
        self, model: HfModel, batches: Sequence[Sequence[BenchRequest]], width: int
    ) -> None:
        self.version = model.version
        self.num_tokens = self.num_requests = self.num_batches = 0
        self._model = model
        self._batches = batches
        self._width = width
        self._clock = ProcessorClock()
        self._seconds = 0.0

    @property
    def is_done(self) -> bool:
        """See `Steps`."""
        return self.num_batches == len(self._batches)

    def step(self) -> float:
        """See `Steps`; in processor time."""
        batch = self._batches[self.num_batches]
        prompts = [request.prompt_token_ids for request in batch]
        longest = max(request.output_len for request in batch)
        started_s = self._clock()
        self._model.generate(prompts, longest, num_beams=self._width)
        seconds = self._clock() - started_s
        self.num_tokens += sum(request.output_len for request in batch)
        self.num_requests += len(batch)
        self.num_batches += 1
        self._seconds += seconds
        return seconds

    @property
    def tokens_per_s(self) -> float:
        """By processor time."""
        return self.num_tokens / self._seconds


def study_beams(setting: Setting) -> StudyResult:
    """Beam search with shared blocks, with copies of K and V, and by transformers."""
    spec = QUICK if setting.is_quick else LOAD
    folder = resolve_model_folder(setting.model, None)
    requests = text_requests(spec.load, Tokenizer.from_folder(folder))
    shared, copied = (
        Search(setting, spec, requests, allocator) for allocator in (None, copied_forks)
    )
    hf, notes = None, [_note(setting, spec)]
    try:
        model = HfModel(folder, getattr(torch, DTYPE))
    except ConfigurationError as error:
        notes.append(f"The line beside transformers is left out: {error}.")
        say(notes[-1])
    else:
        hf = HfSearch(model, list(batches_that_fit(requests, spec)), spec.width)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        take_turns([shared, copied] if hf is None else [shared, copied, hf], spec.turn_s)
    finally:
        torch.set_num_threads(num_threads)
    if not shared.num_tokens or not copied.num_tokens:
        raise ConfigurationError("no search waited for memory, so there is no rate to compare")
    claims = [
        _beside_copies(
            "virtual clock", [one.tokens_per_s for one in (shared, copied)], shared, copied
        ),
        _beside_copies(
            "this processor", [one.real_tokens_per_s for one in (shared, copied)], shared, copied
        ),
    ]
    if hf is not None:
        claims.append(_beside_hf(spec, shared, hf))
    return StudyResult("Speed of beam search", tuple(claims), tuple(notes))


def batches_that_fit(
    requests: Iterable[BenchRequest], spec: SearchLoad
) -> Iterator[list[BenchRequest]]:
    """In order, each as wide as the slots have room for: all beams of all its requests, as long as
    its longest prompt and its longest output together; at least one request."""
    batch: list[BenchRequest] = []
    for request in requests:
        wider = [*batch, request]
        longest = max(len(each.prompt_token_ids) for each in wider)
        longest += max(each.output_len for each in wider)
        if batch and len(wider) * spec.width * longest > spec.budget.num_slots:
            yield batch
            wider = [request]
        batch = wider
    yield batch


# ---- what is made of it ---------------------------------------------------------------------


def _beside_copies(place: str, rates: Sequence[float], shared: Search, copied: Search) -> Claim:
    """rates: tokens/s with shared blocks and with copies."""
    ours, theirs = rates
    return Claim(
        f"Beam search more than {TIMES:g} times as fast with shared blocks ({place})",
        SOURCE,
        f"{ours:,.0f} tokens/s, {shared.num_at_once:.1f} searches at once",
        f"{theirs:,.0f}, {copied.num_at_once:.1f} searches at once (each beam has its own K and V,"
        " copied at each fork)",
        ours / theirs,
        ours / theirs > TIMES,
        f"{COMMAND} beams",
    )


def _beside_hf(spec: SearchLoad, shared: Search, hf: HfSearch) -> Claim:
    ours, theirs = shared.real_tokens_per_s, hf.tokens_per_s
    return Claim(
        f"Beam search more than {TIMES:g} times as fast as transformers' (this processor)",
        SOURCE,
        f"{ours:,.0f} tokens/s, {shared.num_at_once:.1f} searches at once",
        f"{theirs:,.1f} (generate(num_beams={spec.width}) of transformers {hf.version},"
        f" {hf.num_requests / hf.num_batches:.1f} requests in a batch)",
        ours / theirs,
        ours / theirs > TIMES,
        f"{COMMAND} beams",
    )


def _note(setting: Setting, spec: SearchLoad) -> str:
    return (
        f"The load is {spec.load.num_prompts} requests of real text, all there at once, with"
        f" {spec.width} beams each, on {setting.model or 'the embedded model'} in {DTYPE}. Lengths"
        f" and {spec.budget.num_slots:,} KV slots are the memory lines'. Rates count the tokens of"
        " one beam a search, while requests wait. Both engines find the same tokens. They differ"
        " in one way: the baseline copies all blocks that a fork would share, not a partly filled"
        " one alone, and so has room for fewer searches. Steps are timed on the virtual clock as"
        " OPT-13B's on an A100; each beam reads its whole context, and a copy is a read and a"
        " write. They are also timed by the processor time of one thread, all in turns. The"
        " batches of transformers are as wide as the same number of slots has room for, padded,"
        " and end with their longest output. It loses by narrow batches, and by work for each step"
        " that does not depend on the model's size, so it loses less with a larger model"
        " (`--model`)."
    )
