"""Measures the KV blocks that parallel samples and beams share.

As in figure 15 of Kwon et al. (SOSP 2023): blocks saved by blocks without sharing, here summed over
all steps. What parallel samples share depends on lengths alone, so a simulation shows it. Beams
live and die by a model's own probabilities: a few requests with real text, on a real model. No
other request runs beside them. `memory` calls it.
"""

import argparse
import ast
import calendar
import dataclasses
import difflib
import inspect
import logging
import tarfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.memory.load import Budget, MemoryLoad, draw_lengths, make_memory_requests
from benchmarks.memory.study import real_engine, simulated_engine
from quire.bench.baselines.contiguous import PAGED
from quire.bench.workload import BenchRequest
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import ConfigurationError, StepFailedError
from quire.hub.model_folder import resolve_model_folder
from quire.text.tokenizer import Tokenizer

PARALLEL, BEAMS = "parallel", "beams"
_BATCHED_TOKENS = Budget().max_num_batched_tokens
# Enough that chance, which pairs prompts with outputs, moves the share by less than a point.
_SIMULATED_PROMPTS = 600
_SIMULATED_INTERVAL = 8
_OFFSETS = 3  # a stream of random numbers apart from that of `load`
# Text that every machine has, and that the embedded model was trained on.
_SOURCES: tuple[ModuleType, ...] = (
    argparse,
    ast,
    calendar,
    dataclasses,
    difflib,
    inspect,
    logging,
    tarfile,
)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The requests to measure.

    branches: how many a request has, in turn. num_prompts: requests for the model. only_model:
    parallel samples run on it, too. options: for its engine, by EngineOptions' names.
    """

    load: MemoryLoad
    block_size: int = 16
    branches: tuple[int, ...] = (2, 4, 6)
    num_prompts: int = 16
    only_model: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def budget(self, num_prompts: int) -> Budget:
        """Rows and blocks for all branches of num_prompts requests at once.

        In a crowd, branches may run one after the other and so share less; that is not the
        question here.
        """
        lengths = draw_lengths(replace(self.load, num_prompts=num_prompts))
        blocks = sum(-(-sum(pair) // self.block_size) for pair in lengths)
        width = max(self.branches)
        longest = self.load.max_model_len
        num_slots = max(longest, (blocks + num_prompts) * width * self.block_size)
        num_rows = num_prompts * width
        return Budget(num_slots, self.block_size, num_rows, max(num_rows, _BATCHED_TOKENS))


@dataclass(frozen=True, slots=True)
class Saved:
    """kind: PARALLEL or BEAMS. share: of the blocks that there would be without sharing."""

    kind: str
    width: int
    share: float
    num_requests: int
    num_steps: int


def share(spec: Sharing) -> Iterator[Saved]:
    """One case after the other: no prefix cache, so that only branches share.

    Raises ConfigurationError and RequestNeverFitsError for what can't be measured as asked.
    """
    no_cache = {**spec.options, "enable_prefix_caching": False}
    budget = spec.budget(spec.num_prompts)
    engine = real_engine(PAGED, spec.load.max_model_len, budget, no_cache)
    folder = resolve_model_folder(spec.options.get("model"), None)
    few = text_requests(
        replace(spec.load, num_prompts=spec.num_prompts), Tokenizer.from_folder(folder)
    )
    interval = 1 if spec.only_model else _SIMULATED_INTERVAL
    parallel = (engine, few) if spec.only_model else _simulation(spec)
    for width in spec.branches:
        yield measure_sharing(*parallel, PARALLEL, width, interval)
    for width in spec.branches:
        yield measure_sharing(engine, few, BEAMS, width)


def _simulation(spec: Sharing) -> tuple[Engine, list[BenchRequest]]:
    load = replace(spec.load, num_prompts=_SIMULATED_PROMPTS)
    budget = spec.budget(load.num_prompts)
    engine, _ = simulated_engine(
        PAGED, spec.load.max_model_len, budget, enable_prefix_caching=False
    )
    return engine, make_memory_requests(load, engine.limits.vocab_size)


def text_requests(load: MemoryLoad, tokenizer: Tokenizer) -> list[BenchRequest]:
    """Requests of the load's lengths whose prompts are pieces of the standard library's sources."""
    text = "\n".join(inspect.getsource(module) for module in _SOURCES)
    token_ids = tokenizer.encode(text)
    generator = np.random.default_rng((load.seed, _OFFSETS))
    requests = []
    for index, (prompt_len, output_len) in enumerate(draw_lengths(load)):
        first = int(generator.integers(0, len(token_ids) - prompt_len))
        requests.append(BenchRequest(index, token_ids[first : first + prompt_len], output_len))
    return requests


def measure_sharing(
    engine: Engine, requests: Items[BenchRequest], kind: str, width: int, interval: int = 1
) -> Saved:
    """Run all requests, each with `width` branches that end at its output's length.

    engine: with nothing to do. interval: steps from one count to the next; the first is in the
    middle of one, as all begin alike. Raises ConfigurationError where no branch outlives a count.
    """
    for request in requests:
        engine.add(branched(request, kind, width))
    num_steps = num_tables = num_held = 0
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
        if num_steps % interval == interval // 2:
            in_tables, held = count_blocks(engine.scheduler)
            num_tables, num_held = num_tables + in_tables, num_held + held
        num_steps += 1
    if not num_tables:
        raise ConfigurationError("all outputs end with their first token; raise output_mean")
    return Saved(kind, width, 1 - num_held / num_tables, len(requests), num_steps)


def count_blocks(scheduler: Scheduler) -> tuple[int, int]:
    """(blocks with computed tokens, each counted for each of its sequences; different ones)."""
    size = scheduler.memory.block_size
    num_in_tables = 0
    held: set[int] = set()
    for sequence in [*scheduler.running, *scheduler.waiting]:
        num_used = -(-sequence.num_computed_tokens // size)
        for table in sequence.block_tables:
            num_in_tables += num_used
            held.update(table[:num_used])
    return num_in_tables, len(held)


def branched(request: BenchRequest, kind: str, width: int) -> Request:
    """A request with `width` branches of a kind, which end at its output's length."""
    if kind == BEAMS:
        params = DecodingParams(request.output_len, temperature=0.0, beam_width=width)
    else:
        params = DecodingParams(request.output_len, temperature=1.0, seed=request.index)
    return Request(f"{kind}-{request.index}", request.prompt_token_ids, params, n=width)
