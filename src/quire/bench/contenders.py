"""Runs a workload on quire's engine, in continuous or static batches.

Continuous and static batching use the same Engine, with its model, kernels, runner and memory.
Prompts and outputs are token ids, so no tokenizer takes part. Decoding is greedy and ignores end
tokens, so that output lengths are exact. Called by `compare`.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.bench.ledger import LEDGER_FIGURES, STEPS_PER_SAMPLE, LedgerSamples
from quire.bench.metrics import Figures, Timeline
from quire.bench.workload import BenchRequest
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.draft_totals import DraftTotals
from quire.engine.engine import Engine
from quire.errors import ConfigurationError, StepFailedError
from quire.observability.step_trace import StepTrace

MEMORY_FIGURES = (
    "peak_kv_use",
    "mean_kv_use",
    "num_preemptions",
    "num_recomputed_tokens",
    "prefix_hit_rate",
    "max_concurrent_requests",
    "num_drafts",
    "num_accepted_drafts",
    "draft_tokens_a_step",
    *LEDGER_FIGURES,
)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The measurements of one run."""

    #: One timeline per request, in the order of the requests.
    timelines: list[Timeline]
    duration_s: float
    #: Maps MEMORY_FIGURES to values; None if the contender does not have a figure.
    memory: Figures


class Contender(Protocol):
    """A system that can run the workload. All requests arrive when `run` is called."""

    def run(self, requests: Sequence[BenchRequest]) -> RunRecord:
        """Run all requests to their end, with exactly the requested output lengths."""
        ...


class ContinuousBatches:
    """quire's engine, which gets all requests at once and batches them continuously."""

    def __init__(self, engine: Engine, trace: StepTrace | None = None) -> None:
        """`trace`, if given, records this contender's steps; the caller closes it."""
        self._engine = engine
        self._trace = trace

    def run(self, requests: Sequence[BenchRequest]) -> RunRecord:
        self._engine.trace = self._trace
        try:
            meter = _EngineMeter(self._engine, requests)
            for request in requests:
                meter.add(request, request.output_len, cache_domain="")
            meter.drain()
            return meter.record()
        finally:
            self._engine.trace = None


class StaticBatches:
    """Static batching on the same engine, in order of arrival.

    A batch of `width` requests enters an empty engine. All rows compute until the longest output of
    the batch is done. Tokens of rows whose own request is done are not counted. Then the next batch
    enters. Two properties favour this baseline: prompts are packed, not padded to the longest, and
    prefill runs in the engine's chunks. Requests share no blocks, since static batching has no
    prefix cache.
    """

    def __init__(self, engine: Engine, width: int) -> None:
        self._engine = engine
        self._width = width

    def fits(self, requests: Iterable[BenchRequest]) -> bool:
        """Whether the KV cache holds all rows of each batch at their full length."""
        scheduler = self._engine.scheduler
        if self._width > scheduler.config.max_num_seqs:
            return False
        for batch in batches(requests, self._width):
            longest = max(request.output_len for request in batch)
            lengths = [len(request.prompt_token_ids) + longest for request in batch]
            needed = sum(scheduler.memory.blocks_for(length) for length in lengths)
            too_long = max(lengths) > self._engine.limits.max_model_len
            if too_long or needed > scheduler.memory.pool.num_blocks:
                return False
        return True

    def run(self, requests: Sequence[BenchRequest]) -> RunRecord:
        meter = _EngineMeter(self._engine, requests)
        for batch in batches(requests, self._width):
            longest = max(request.output_len for request in batch)
            for request in batch:
                meter.add(request, longest, cache_domain=str(request.index))
            meter.drain()
        return meter.record()


class _EngineMeter:
    """Steps an engine with an empty cache, and records the time of each requested token."""

    def __init__(self, engine: Engine, requests: Iterable[BenchRequest]) -> None:
        """Empty the prefix cache and start the clock. All requests count as having arrived now."""
        assert not engine.has_work(), "the engine carries other requests"
        engine.scheduler.memory.prefixes.clear()
        self._engine = engine
        self._before = engine.stats()
        self._num_steps = 0
        self._sum_of_held_blocks = 0
        self._most_held_blocks = 0
        self._most_running = 0
        self._ledger = LedgerSamples()
        self._started_s = time.perf_counter()
        self._num_wanted = {str(request.index): request.output_len for request in requests}
        self._timelines = {
            str(request.index): Timeline(len(request.prompt_token_ids), self._started_s)
            for request in requests
        }

    def add(self, request: BenchRequest, num_tokens: int, cache_domain: str) -> None:
        """Add a request to the engine. `num_tokens` is the number of tokens to generate, at least
        the request's output length."""
        params = DecodingParams(max_tokens=num_tokens, temperature=0.0)
        self._engine.add(
            Request(
                str(request.index),
                request.prompt_token_ids,
                params,
                cache_domain=cache_domain,
            )
        )

    def drain(self) -> None:
        """Step until all requests added so far have ended."""
        while self._engine.has_work():
            self._step()

    def record(self) -> RunRecord:
        """Stop the clock and return the measurements. Called once, at the end."""
        duration_s = time.perf_counter() - self._started_s
        for key, timeline in self._timelines.items():
            made, wanted = len(timeline.token_ids), self._num_wanted[key]
            assert made == wanted, f"request {key} has {made} tokens of {wanted}"
        return RunRecord(list(self._timelines.values()), duration_s, self._memory())

    def _step(self) -> None:
        outputs = self._engine.step()
        now_s = time.perf_counter()
        num_ended = 0
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
            timeline = self._timelines[output.request_id]
            num_missing = self._num_wanted[output.request_id] - len(timeline.token_ids)
            wanted = output.token_ids[:num_missing]
            timeline.token_ids.extend(wanted)
            timeline.token_times_s.extend([now_s] * len(wanted))
            num_ended += output.finish_reason is not None
        if self._num_steps % STEPS_PER_SAMPLE == 0:
            self._ledger.add(self._engine.memory_report())
        stats = self._engine.stats()
        self._num_steps += 1
        self._sum_of_held_blocks += stats.num_held_blocks
        self._most_held_blocks = max(self._most_held_blocks, stats.num_held_blocks)
        self._most_running = max(self._most_running, stats.num_running + num_ended)

    def _memory(self) -> Figures:
        before, after = self._before, self._engine.stats()
        num_queried = after.num_query_tokens - before.num_query_tokens
        num_hit = after.num_hit_tokens - before.num_hit_tokens
        drafts = DraftTotals.of(after.drafts).since(DraftTotals.of(before.drafts))
        values = (
            self._most_held_blocks / after.num_blocks,
            self._sum_of_held_blocks / self._num_steps / after.num_blocks,
            after.num_preemptions - before.num_preemptions,
            after.num_recomputed_tokens - before.num_recomputed_tokens,
            num_hit / num_queried if num_queried else 0.0,
            self._most_running,
            drafts.num_verified,
            drafts.num_accepted,
            drafts.tokens_a_step if drafts.num_rows else None,
            *self._ledger.figures().values(),
        )
        return dict(zip(MEMORY_FIGURES, values, strict=True))


def batches(requests: Iterable[BenchRequest], width: int) -> Iterator[list[BenchRequest]]:
    """Yield the requests in batches of `width`, in order; the last batch may be smaller."""
    batch: list[BenchRequest] = []
    for request in requests:
        batch.append(request)
        if len(batch) == width:
            yield batch
            batch = []
    if batch:
        yield batch


def check_lengths(requests: Iterable[BenchRequest], max_model_len: int) -> None:
    """Raise ConfigurationError if a request would be truncated."""
    longest = max(requests, key=lambda request: request.num_tokens)
    if longest.num_tokens > max_model_len:
        raise ConfigurationError(
            f"request {longest.index} has {longest.num_tokens} tokens (prompt and output), but"
            f" max_model_len is {max_model_len}; lower input_max, output_max or"
            " shared_prefix_tokens"
        )
