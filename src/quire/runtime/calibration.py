"""Measures step times at start-up, to fit the cost model of the pacer.

A probe is an ordinary plan on rows that no sequence uses yet: rows that decode, perhaps beside a
chunk of a prompt. Probes use the `Runner` interface, so they measure the kernels that serve
requests later. They write only blocks that are empty and not in the prefix cache; afterwards the
runner has no rows. Called by `assembly.build`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.kv_groups import KVGroup
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.core.step import BlockCopy, Chunk, RowAdmission, Runner, StepPlan
from quire.observability.log import get_logger

logger = get_logger(__name__)

DEFAULT_TIME_LIMIT_S = 0.4
# The time limit is at least the time of this number of the shortest steps.
LEAST_STEPS = 30
NUM_ROUNDS = 8
# A model of an earlier start is used if the fastest of NUM_CHECKS steps differs from its prediction
# by at most this factor.
MOST_CHANGE, NUM_CHECKS = 1.5, 3
# A round ends when a step with a chunk takes more than this multiple of the longest decode step,
# since pacing never allows such a step.
LARGEST_RATIO = 4.0
SMALLEST_CHUNK, LARGEST_CHUNK = 8, 1024
# The context, decoding rows and chunk of the probes that measure attention. The number of rows is
# small because their blocks must be written first.
LONG_CONTEXT, NUM_LONG_ROWS, LONG_CHUNK = 1024, 2, 32
# Sizes of chunks with prompt log-probabilities, and the number of top tokens at each position.
LOGPROB_CHUNKS, NUM_BEST = (16, 128), 20


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """The sizes that a runner was built for."""

    num_rows: int
    #: Maximum number of tokens that one step computes.
    max_num_tokens: int
    max_model_len: int
    groups: tuple[KVGroup, ...]
    #: The number of blocks of the KV cache, all of which are free.
    num_blocks: int
    block_size: int
    vocab_size: int

    def table_length(self, group: KVGroup, num_tokens: int) -> int:
        """The number of entries in the group's table for a row of `num_tokens` tokens, none of
        whose blocks was freed."""
        return group.num_state_blocks or -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Probe:
    """A step to measure: rows that decode one token each, and perhaps a chunk of a prompt."""

    num_decodes: int
    #: The number of tokens in the chunk; 0 means that there is no chunk.
    num_chunk_tokens: int = 0
    #: The number of each row's tokens that are computed before the step.
    num_context: int = 0
    #: Whether log-probabilities of the chunk's tokens are computed.
    wants_logprobs: bool = False

    @property
    def load(self) -> StepLoad:
        """The probe's work, as input of the cost model."""
        decodes = StepLoad(self.num_decodes, self.num_decodes * (self.num_context + 1))
        if not self.num_chunk_tokens:
            return decodes
        return decodes.with_chunk(
            self.num_context, self.num_chunk_tokens, wants_logprobs=self.wants_logprobs
        )

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row that have K and V after the step."""
        chunks = [self.num_context + self.num_chunk_tokens] if self.num_chunk_tokens else []
        return [self.num_context + 1] * self.num_decodes + chunks


def calibrated_model(
    runner: Runner, shape: RunnerShape, max_itl_ratio: float, *, warms_up: bool = False
) -> StepCostModel:
    """A cost model that is fitted to this runner by `calibrate`. max_itl_ratio is for the log."""
    started_s = time.perf_counter()
    model = StepCostModel.fit(calibrate(runner, shape, warms_up=warms_up))
    alone = StepLoad(1, 1)
    alone_s = model.predict_s(alone)
    logger.info(
        "step pacing: one row decodes in %.1f ms, with %d prompt tokens beside it in %g times that"
        " (measured in %.1f s)",
        alone_s * 1e3,
        model.most_tokens(max_itl_ratio * alone_s, alone, 0, shape.max_num_tokens - 1),
        max_itl_ratio,
        time.perf_counter() - started_s,
    )
    return model


def still_holds(
    model: StepCostModel,
    runner: Runner,
    shape: RunnerShape,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Whether a model of an earlier start predicts the time of one decoding row, within a factor of
    MOST_CHANGE. The runner must have no rows, and has none afterwards."""
    probe = Probe(1)
    bench = _Bench(runner, shape, clock)
    try:
        bench.run(probe)  # touches code and memory for the first time
        fastest_s = min(bench.run(probe) for _ in range(NUM_CHECKS))
    finally:
        runner.reset()
    predicted_s = model.predict_s(probe.load)
    return fastest_s <= predicted_s * MOST_CHANGE and predicted_s <= fastest_s * MOST_CHANGE


def calibrate(
    runner: Runner,
    shape: RunnerShape,
    *,
    warms_up: bool = False,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepSample]:
    """Measure steps for about time_limit_s, or for LEAST_STEPS of the shortest if that is longer.

    If `warms_up`, each probe first runs once without a time limit. On a GPU, the first step of a
    kind compiles kernels and captures graphs, and may take a thousand times as long as the next
    step of this kind.

    The runner must have no rows, and has none afterwards. All probes take turns in rounds, so that
    a disturbance doesn't affect every run of a probe. A sample is the fastest run, since
    disturbances only make a step longer. The first round touches code and memory for the first
    time, and counts only if no other round is run.
    """
    probes = make_probes(shape)
    bench = _Bench(runner, shape, clock)
    rounds: dict[Probe, list[float]] = {}
    try:
        bench.write_blocks(max(_num_blocks(probe, shape) for probe in probes))
        if warms_up:
            for probe in probes:
                bench.run(probe)
        bench.run(probes[0])  # touches code and memory for the first time
        limit_s = max(time_limit_s, LEAST_STEPS * bench.run(probes[0]))
        deadline_s = clock() + limit_s
        for _ in range(NUM_ROUNDS):
            _run_round(bench, probes, rounds, deadline_s)
    finally:
        runner.reset()
    return [StepSample(probe.load, min(taken[1:] or taken)) for probe, taken in rounds.items()]


def write_blocks(runner: Runner, shape: RunnerShape) -> None:
    """Write all blocks of a runner without rows, so that each has physical memory of its own.

    The system maps unwritten pages to one page of zeros. Reading them hits the processor's caches,
    so measurements would be too fast.
    """
    try:
        _Bench(runner, shape, time.perf_counter).write_blocks(shape.num_blocks)
    finally:
        runner.reset()


def make_probes(shape: RunnerShape) -> list[Probe]:
    """The probes in order: decodes alone, attention over a long context, prompt log-probabilities,
    growing chunks.

    Leaves out probes that exceed the rows, the step or the KV cache; a single decode always fits.
    """
    counts = [1 << power for power in range(shape.num_rows.bit_length())]
    probes = [Probe(count) for count in counts]
    if counts[-1] != shape.num_rows:
        probes.append(Probe(shape.num_rows))
    context = min(LONG_CONTEXT, shape.max_model_len - LONG_CHUNK - 1)
    probes += [
        Probe(min(NUM_LONG_ROWS, shape.num_rows), 0, context),
        Probe(1, LONG_CHUNK, context),
        *(Probe(1, size, wants_logprobs=True) for size in LOGPROB_CHUNKS),
    ]
    size = SMALLEST_CHUNK
    while size <= LARGEST_CHUNK:
        probes.append(Probe(1, size))
        size *= 2
    return [probe for probe in probes if _has_room(probe, shape)]


def _run_round(
    bench: "_Bench", probes: list[Probe], rounds: dict[Probe, list[float]], deadline_s: float
) -> None:
    """Run each probe once, up to the first chunk that exceeds LARGEST_RATIO or the deadline."""
    longest_decode_s = 0.0
    for probe in probes:
        if bench.clock() > deadline_s and rounds:
            return
        seconds = bench.run(probe)
        rounds.setdefault(probe, []).append(seconds)
        if not probe.num_chunk_tokens:
            longest_decode_s = max(longest_decode_s, seconds)
        # The probes of attention and log-probabilities are not in order of size.
        elif probe.num_context or probe.wants_logprobs:
            continue
        elif seconds > LARGEST_RATIO * longest_decode_s:
            return


def _has_room(probe: Probe, shape: RunnerShape) -> bool:
    return (
        len(probe.lengths) <= shape.num_rows
        and probe.num_decodes + probe.num_chunk_tokens <= shape.max_num_tokens
        and probe.num_context >= 0
        and max(probe.lengths) < shape.max_model_len
        and _num_blocks(probe, shape) <= shape.num_blocks
    )


def _num_blocks(probe: Probe, shape: RunnerShape) -> int:
    return sum(
        shape.table_length(group, length) for group in shape.groups for length in probe.lengths
    )


class _Bench:
    """Runs probes. Invariant: between two probes the runner's rows are 0 .. num_rows - 1."""

    def __init__(self, runner: Runner, shape: RunnerShape, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._runner = runner
        self._shape = shape
        self._num_rows = 0
        self._step_id = 0

    def write_blocks(self, num_blocks: int) -> None:
        """Write the first `num_blocks` blocks; see the function `write_blocks`."""
        copies = tuple(BlockCopy(0, target) for target in range(1, num_blocks))
        self._run(Probe(1), copies)

    def run(self, probe: Probe) -> float:
        """Run the probe's step. Returns its duration in seconds."""
        return self._run(probe, ())

    def _run(self, probe: Probe, copies: tuple[BlockCopy, ...]) -> float:
        plan = self._plan(probe, copies)
        started_s = self.clock()
        self._runner.execute(plan)
        self._runner.sample()
        self._runner.result()
        return self.clock() - started_s

    def _plan(self, probe: Probe, copies: tuple[BlockCopy, ...]) -> StepPlan:
        """A plan that releases all rows and admits the probe's, which share no blocks."""
        num_before, lengths = self._num_rows, probe.lengths
        self._num_rows, self._step_id = len(lengths), self._step_id + 1
        admissions: list[RowAdmission] = []
        next_block = 0
        for row, length in enumerate(lengths):
            tables: list[tuple[int, ...]] = []
            for group in self._shape.groups:
                end = next_block + self._shape.table_length(group, length)
                tables.append(tuple(range(next_block, end)))
                next_block = end
            admissions.append(self._admission(row, probe, length, tuple(tables)))
        chunks: tuple[Chunk, ...] = ()
        if probe.num_chunk_tokens:
            chunks = (Chunk(len(lengths) - 1, probe.num_chunk_tokens),)
        return StepPlan(
            step_id=self._step_id,
            num_rows=len(lengths),
            num_tokens=probe.num_decodes + probe.num_chunk_tokens,
            release=tuple(range(num_before)),
            admit=tuple(admissions),
            chunks=chunks,
            copies=copies,
        )

    def _admission(
        self, row: int, probe: Probe, length: int, tables: tuple[tuple[int, ...], ...]
    ) -> RowAdmission:
        # The prompt has one token more than the chunk, so the chunk samples no token, like most
        # chunks.
        num_tokens = length + (row >= probe.num_decodes)
        token_ids = [(row + 7 * place) % self._shape.vocab_size for place in range(num_tokens)]
        is_asked = probe.wants_logprobs and row >= probe.num_decodes
        num_best = min(NUM_BEST, self._shape.vocab_size) if is_asked else None
        params = DecodingParams(max_tokens=2, prompt_logprobs=num_best)
        return RowAdmission(row, token_ids, num_tokens, probe.num_context, tables, params)
