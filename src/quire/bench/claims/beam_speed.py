"""Claims that beams which share blocks are searched faster.

Beside the same engine with a copy of K and V for each beam, and beside transformers' `generate`. A
model searches, since beams live by its probabilities. Each of its steps is timed on two clocks: the
virtual one of `bench.memory`, and processor time of one computing thread.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.assembly.build import build_engine
from quire.bench.baselines.copied_forks import copied_forks
from quire.bench.claims.claim import COMMAND, FOLKLORE, Claim, Setting, StudyResult
from quire.bench.claims.crowds import COST
from quire.bench.compare import say
from quire.bench.hf_generate import HfModel
from quire.bench.memory.length_runner import VirtualClock
from quire.bench.memory.load import Budget, MemoryLoad
from quire.bench.memory.meter import WARM_UP_SHARE
from quire.bench.memory.sharing import BEAMS, branched, text_requests
from quire.bench.memory.study import ProcessorClock
from quire.bench.memory.timed_runner import TimedRunner
from quire.bench.workload import BenchRequest
from quire.core.memory.kv_cache_manager import KVManagerFactory
from quire.core.step import Runner
from quire.errors import ConfigurationError, StepFailedError
from quire.hub.model_folder import resolve_model_folder
from quire.text.tokenizer import Tokenizer

SOURCE = f"{FOLKLORE} (Kwon et al., SOSP 2023, section 6.3: 2.3 times Orca (Oracle) with 6 beams)"
TIMES = 10.0
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class SearchLoad:
    """What is searched. num_prompts_hf: the first of the requests, for transformers."""

    load: MemoryLoad
    budget: Budget
    width: int = 6
    num_prompts_hf: int = 8


# The memory lines' lengths and slots, and rows for as many beams as fit.
LOAD = SearchLoad(MemoryLoad(num_prompts=100), Budget(max_num_seqs=768))
QUICK = SearchLoad(
    MemoryLoad(num_prompts=16, input_mean=12, output_mean=8, max_model_len=64),
    Budget(256, 8, 48, 128),
    width=2,
    num_prompts_hf=2,
)


@dataclass(slots=True)
class Searched:
    """What came of one engine's searches, over the time in which requests wait.

    num_tokens: of all beams. seconds, real_seconds: by the virtual clock, and of processor time.
    running_s: sequences that run, multiplied with virtual seconds. num_copied_blocks: in the whole
    run.
    """

    width: int
    num_tokens: int = 0
    seconds: float = 0.0
    real_seconds: float = 0.0
    running_s: float = 0.0
    num_copied_blocks: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Of one beam a search, on the virtual clock: all beams of a search are equally long."""
        return self.num_tokens / self.width / self.seconds

    @property
    def real_tokens_per_s(self) -> float:
        """The same by processor time."""
        return self.num_tokens / self.width / self.real_seconds

    @property
    def num_at_once(self) -> float:
        """Searches that run, on average over virtual time."""
        return self.running_s / self.width / self.seconds


def study_beams(setting: Setting) -> StudyResult:
    """Beam search with shared blocks, with copies of K and V, and by transformers."""
    spec = QUICK if setting.is_quick else LOAD
    folder = resolve_model_folder(setting.model, None)
    requests = text_requests(spec.load, Tokenizer.from_folder(folder))
    shared, copied = (
        search(setting, spec, requests, allocator) for allocator in (None, copied_forks)
    )
    found = (shared, copied)
    claims = [
        _beside_copies("virtual clock", [one.tokens_per_s for one in found], found),
        _beside_copies("this processor", [one.real_tokens_per_s for one in found], found),
    ]
    notes = [_note(setting, spec, shared, copied)]
    try:
        model = HfModel(folder, getattr(torch, DTYPE))
    except ConfigurationError as error:
        notes.append(f"The line beside transformers is left out: {error}.")
        say(notes[-1])
    else:
        batches = list(batches_that_fit(requests[: spec.num_prompts_hf], spec))
        claims.append(_beside_hf(spec, shared, model, batches))
    return StudyResult("Speed of beam search", tuple(claims), tuple(notes))


def search(
    setting: Setting,
    spec: SearchLoad,
    requests: Sequence[BenchRequest],
    allocator: KVManagerFactory | None,
) -> Searched:
    """All requests are there at once; measures from when a tenth has ended until none waits.

    Raises ConfigurationError where none waits by then.
    """
    budget, clock, real_clock = spec.budget, VirtualClock(), ProcessorClock()
    timed: list[TimedRunner] = []

    def watch(runner: Runner) -> TimedRunner:
        timed.append(TimedRunner(runner, COST, clock, budget.block_size))
        return timed[-1]

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
    if setting.model is not None:
        options["model"] = setting.model
    engine = build_engine(options, kv_allocator=allocator, watch=watch)
    for request in requests:
        engine.add(branched(request, BEAMS, spec.width))
    found, runner, scheduler = Searched(spec.width), timed[0], engine.scheduler
    num_to_warm, num_ended = WARM_UP_SHARE * len(requests) * spec.width, 0
    while len(scheduler.waiting) or num_ended < num_to_warm:
        is_measured = num_ended >= num_to_warm
        num_sampled, started_s, real_started_s = runner.num_sampled_rows, clock(), real_clock()
        outputs = engine.step()
        seconds, real_seconds = clock() - started_s, real_clock() - real_started_s
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
        num_ended += len(outputs)
        if is_measured:
            found.num_tokens += runner.num_sampled_rows - num_sampled
            found.seconds += seconds
            found.real_seconds += real_seconds
            found.running_s += seconds * (len(scheduler.running) + len(outputs))
    if not found.num_tokens:
        raise ConfigurationError("no search waited for memory, so there is no rate; search more")
    found.num_copied_blocks = runner.num_copied_blocks
    return found


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


def _hf_tokens_per_s(
    model: HfModel, batches: Sequence[Sequence[BenchRequest]], width: int
) -> float:
    """Tokens of the best beams by processor time of one thread; only those asked for count."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    clock = ProcessorClock()
    try:
        for batch in batches:
            prompts = [request.prompt_token_ids for request in batch]
            longest = max(request.output_len for request in batch)
            model.generate(prompts, longest, num_beams=width)
    finally:
        torch.set_num_threads(num_threads)
    return sum(request.output_len for batch in batches for request in batch) / clock()


# ---- what is made of it ---------------------------------------------------------------------


def _beside_copies(place: str, rates: Sequence[float], found: Sequence[Searched]) -> Claim:
    """rates: tokens/s with shared blocks and with copies, as `found`."""
    ours, theirs = rates
    at_once, copied_at_once = (f"{one.num_at_once:.1f} searches at once" for one in found)
    return Claim(
        f"Beam search more than {TIMES:g} times as fast with shared blocks ({place})",
        SOURCE,
        f"{ours:,.0f} tokens/s, {at_once}",
        f"{theirs:,.0f}, {copied_at_once} (each beam has its own K and V, copied at each fork)",
        ours / theirs,
        ours / theirs > TIMES,
        f"{COMMAND} beams",
    )


def _beside_hf(
    spec: SearchLoad, shared: Searched, model: HfModel, batches: Sequence[Sequence[BenchRequest]]
) -> Claim:
    ours = shared.real_tokens_per_s
    theirs = _hf_tokens_per_s(model, batches, spec.width)
    mean_width = sum(map(len, batches)) / len(batches)
    return Claim(
        f"Beam search more than {TIMES:g} times as fast as transformers' (this processor)",
        SOURCE,
        f"{ours:,.0f} tokens/s, {shared.num_at_once:.1f} searches at once",
        f"{theirs:,.1f} (generate(num_beams={spec.width}) of transformers {model.version},"
        f" {mean_width:.1f} requests in a batch)",
        ours / theirs,
        ours / theirs > TIMES,
        f"{COMMAND} beams",
    )


def _note(setting: Setting, spec: SearchLoad, shared: Searched, copied: Searched) -> str:
    return (
        f"{spec.load.num_prompts} requests of real text, all there at once, {spec.width} beams"
        f" each, on {setting.model or 'the embedded model'} in {DTYPE}; lengths and"
        f" {spec.budget.num_slots:,} KV slots are the memory lines'. Rates count the tokens of one"
        " beam a search, while requests wait. Both engines find the same tokens: they differ in"
        " that one copies all blocks that a fork would share"
        f" ({copied.num_copied_blocks:,} blocks copied, beside {shared.num_copied_blocks:,} partly"
        " filled ones), and has room for fewer searches. A step is timed on the virtual clock as"
        " OPT-13B's on an A100, each beam reading its whole context, a copy as a read and a write;"
        " and by the processor time of one thread. transformers' batches are as wide as the same"
        " number of slots has room for, padded, and end with their longest output"
        f" ({spec.num_prompts_hf} requests). It loses by narrow batches and by work for each step"
        " that does not depend on the model's size: with a larger model it loses less."
    )
