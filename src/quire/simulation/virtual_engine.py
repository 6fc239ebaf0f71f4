"""The real engine on a virtual clock, with a runner that computes nothing.

Admission, chunks, pacing, prefix cache, preemption, beams, adapters and grammars run the code of a
real engine, through `engine.Engine`. Only its runner is replaced: `CountingRunner` counts the work
of each step and gives every row whose gap closes a new token. `planning`, `replay`, the simulated
replicas of a fleet and benchmarks run their loads with it. `simulator` checks plans instead, and
shares the clock and the device's time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Generic, NoReturn, Protocol, TypeVar

from quire.core.kv_groups import KVGroup
from quire.core.memory.eviction import DEFAULT_ORDER
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import StepPacer
from quire.core.scheduling.policy import POLICIES
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult, TokenLogprobs, TokenMasks
from quire.engine.adapter_work import AdapterWork
from quire.engine.content_work import ContentWork
from quire.engine.engine import Engine
from quire.engine.grammar_work import GrammarWork
from quire.engine.tier_work import WAIT_S
from quire.simulation.fakes.fake_adapters import FakeAdapters
from quire.simulation.fakes.fake_grammar import InlineExecutor
from quire.simulation.fakes.fake_source import FakeSource
from quire.simulation.planned_work import PlannedWork, PlannedWorkCounter
from quire.simulation.virtual_disk import DiskShape, VirtualDisk

T = TypeVar("T")

#: Token ids of prompts and answers are below this number, so that they fit into the prefix cache's
#: 31 bits.
VOCABULARY = 1 << 31
#: The first of the token ids that are sampled once each, so that no two are equal by chance.
FIRST_NEW_TOKEN = 1 << 30
#: A grammar that allows all tokens; the text of its requests' params.
ANY_TEXT = "any"
#: Slots for contents of prompts, as many as a real engine has at most.
NUM_CONTENT_SLOTS = 64
#: The prefix of digests of broken contents, with which no digest begins.
_NO_DIGEST = "-"


class VirtualClock:
    """A time in seconds, which only goes forward."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, at_s: float) -> None:
        """Move the clock forward to a time, but never back."""
        self.now_s = max(self.now_s, at_s)


class DeviceTime:
    """The steps in flight of a device that runs steps one after another.

    A step begins when it is launched and the step before has ended.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._ends_s: deque[float] = deque()

    def launch(self, seconds: float) -> None:
        """Add a step that takes this long."""
        ends_s, now_s = self._ends_s, self._clock.now_s
        begins_s = max(ends_s[-1], now_s) if ends_s else now_s
        ends_s.append(begins_s + seconds)

    def wait(self) -> None:
        """Move the clock to the end of the oldest step."""
        self._clock.wait_until(self._ends_s[0])

    def land(self) -> None:
        """Remove the oldest step."""
        self._ends_s.popleft()

    def reset(self) -> None:
        """Wait for all steps, and remove them."""
        self._clock.wait_until(max(self._ends_s, default=0.0))
        self._ends_s.clear()


class VirtualCosts(Protocol):
    """The seconds that an engine's work takes."""

    def step_s(self, work: PlannedWork) -> float:
        """The seconds of the next step. Called once for each step."""
        ...

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """The seconds that ending `num_ended` sequences of `num_ended_tokens` tokens adds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The sizes and options of a simulated engine. The fields have the names of engine options."""

    #: The groups of the KV layout.
    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_itl_ratio: float = 0.0
    enable_prefix_caching: bool = True
    num_lookahead_blocks: int = 1
    scheduling_policy: str = "fcfs"
    #: The eviction order of the prefix cache.
    eviction: str = DEFAULT_ORDER
    #: Number of slots for adapters; 0 if the engine serves none.
    max_loras: int = 0
    #: Whether the engine computes all positions of a content, such as an image, in one step.
    reads_contents_whole: bool = False
    #: Whether a step is planned while the previous one runs.
    overlap: bool = False
    #: The disk tier behind the KV cache; None if there is none.
    disk: DiskShape | None = None


class CountingRunner:
    """A `core.step.Runner` that counts work and invents tokens.

    The candidates of a beam have random log-probabilities, so that beams fork and end as those of a
    model do.
    """

    def __init__(
        self,
        block_size: int,
        clock: VirtualClock,
        step_s: Callable[[PlannedWork], float],
        tokens: Iterator[int],
    ) -> None:
        """`step_s` returns the seconds of a step. `tokens` are sampled in turn."""
        self._counter = PlannedWorkCounter(block_size)
        self._device = DeviceTime(clock)
        self._step_s = step_s
        self._tokens = tokens
        self._launched: deque[tuple[int, PlannedWork]] = deque()
        self._chance = random.Random("candidates of beams")

    def draft(self, plan: StepPlan) -> NoReturn:
        """See `Runner`. Not called: plans and replays simulate no drafts."""
        raise AssertionError(f"step {plan.step_id} orders drafts, but nothing makes them")

    def execute(self, plan: StepPlan) -> None:
        """See `Runner`."""
        work = self._counter.count(plan)
        self._launched.append((plan.step_id, work))
        self._device.launch(self._step_s(work))

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See `Runner`. The tokens are invented when the result is fetched."""

    def result(self) -> StepResult:
        """See `Runner`."""
        self._device.wait()
        self._device.land()
        step_id, work = self._launched.popleft()
        rows = work.sampled
        tokens = list(zip(islice(self._tokens, len(rows))))
        if not work.beams:
            return StepResult(step_id, rows, tokens)
        entries: dict[int, tuple[TokenLogprobs, ...]] = {}
        for index, row in enumerate(rows):
            if row in work.beams:
                entry = self._candidates(tokens[index][0], work.beams[row])
                entries[row] = (entry,)
        return StepResult(step_id, rows, tokens, entries)

    def reset(self) -> None:
        """See `Runner`."""
        self._device.reset()
        self._launched.clear()
        self._counter.reset()

    def _candidates(self, token_id: int, number: int) -> TokenLogprobs:
        logprobs = sorted((-self._chance.expovariate(1.0) for _ in range(number)), reverse=True)
        token_ids = range(token_id, token_id + number)
        return TokenLogprobs(token_id, logprobs[0], 1, tuple(token_ids), tuple(logprobs))


class AnyText:
    """A grammar that allows every text, and its compiler.

    A row with a grammar waits for its last token before its next step is planned, as with any other
    grammar. Compiling and masks take no time.
    """

    is_finished = False

    def compile(self, grammar: str, domain: str = "") -> AnyText:
        """See `GrammarSource`."""
        return self

    def prepare(self) -> None:
        """See `GrammarSource`; there is nothing to prepare."""

    def start(self) -> AnyText:
        """See `StartableGrammar`."""
        return self

    def consume(self, token_ids: Sequence[int]) -> None:
        """See `FollowedGrammar`."""

    def mask(self) -> bytes:
        """See `FollowedGrammar`. The runner reads no mask."""
        return b""

    def forced_tokens(self, most: int) -> Sequence[int]:
        """See `FollowedGrammar`. It forces nothing."""
        return ()

    def copy(self) -> AnyText:
        """See `FollowedGrammar`."""
        return self


class _TimedScheduler(Scheduler):
    """Calls `pass_time` with the outputs of each result, before the engine reads the clock."""

    pass_time: Callable[[list[SequenceOutput]], None]

    def apply(self, result: StepResult) -> list[SequenceOutput]:
        """See `Scheduler`."""
        outputs = super().apply(result)
        self.pass_time(outputs)
        return outputs


class VirtualEngine(Generic[T]):
    """An engine on a clock of its own, and a queue of arrivals, which are values of type T.

    Invariant: every arrival in the queue is later than those that were passed to `arrive`.
    """

    def __init__(
        self,
        shape: EngineShape,
        costs: VirtualCosts,
        *,
        pacer: StepPacer | None = None,
        tokens: Iterator[int] | None = None,
        secret: bytes = b"virtual",
    ) -> None:
        """`pacer` sets the token budgets of steps; None means no pacing. The engine samples
        `tokens` in turn; None means that all tokens differ. `secret` keys the hashes of blocks.
        Raises ConfigurationError if the disk tier is too small for a block."""
        # First the memory and the scheduler, then the engine around them and a counting runner.
        self.clock = VirtualClock()
        wait_until, tiers = self.clock.wait_until, None
        if shape.disk is not None:
            tiers = VirtualDisk(shape.disk, shape.groups, shape.num_blocks, self.clock, wait_until)
        self.memory = KVCacheManager(
            KVCacheConfig(
                shape.groups,
                shape.num_blocks,
                shape.block_size,
                shape.enable_prefix_caching,
                secret=secret,
                eviction=shape.eviction,
                tiers=tiers,
            )
        )
        adapters = None
        if shape.max_loras:  # all are in the host's memory
            adapters = FakeAdapters(random.Random(0), self.clock, wait_until, max_read_s=0.0)
        # Contents of prompts are ready at once: no encoder is simulated.
        chance = random.Random(0)
        contents = FakeSource(chance, self.clock, wait_until, _NO_DIGEST, max_read_s=0.0)
        self.scheduler = _TimedScheduler(
            SchedulerConfig(
                shape.max_num_seqs, shape.max_num_batched_tokens, shape.num_lookahead_blocks
            ),
            self.memory,
            POLICIES.make(shape.scheduling_policy),
            adapters=None if adapters is None else Residency(shape.max_loras, adapters),
            contents=Residency(NUM_CONTENT_SLOTS, contents),
        )
        self.scheduler.pass_time = self._end_sequences
        tokens = count(FIRST_NEW_TOKEN) if tokens is None else tokens
        self.engine = Engine(
            self.scheduler,
            CountingRunner(shape.block_size, self.clock, costs.step_s, tokens),
            ModelLimits(VOCABULARY, shape.max_model_len, max_content_tokens=shape.max_model_len),
            clock=self.clock,
            overlap=shape.overlap,
        )
        if pacer is not None:
            self.scheduler.pacer = pacer
            self.engine.tier_work.expect(
                pacer.model, shape.max_num_batched_tokens, shape.max_model_len
            )
        self.engine.grammars = GrammarWork(
            AnyText(), (), threads=InlineExecutor(), clock=self.clock
        )
        self.engine.adapters = AdapterWork(self.scheduler, adapters)
        self.engine.contents = ContentWork(self.scheduler, simulated=contents)
        self._costs = costs
        self._lengths: dict[str, int] = {}
        self._coming: list[tuple[float, int, T]] = []
        self._num_coming = count()

    def expect(self, at_s: float, arrival: T) -> None:
        """Add an arrival; among arrivals at one time, the first added comes first."""
        heapq.heappush(self._coming, (at_s, next(self._num_coming), arrival))

    def add(self, request: Request) -> None:
        """See `Engine.add`."""
        self.engine.add(request)
        length = len(request.prompt_token_ids) + request.params.max_tokens
        self._lengths[request.request_id] = length

    def run(
        self,
        arrive: Callable[[T], object],
        receive: Callable[[list[SequenceOutput]], object],
        until_s: float = float("inf"),
    ) -> None:
        """Serve until nothing arrives any more and every request has ended, or until a time.

        `arrive` is called with each arrival when its time has come, and `receive` after each step
        with its outputs. Both may add arrivals and requests, and abort requests.
        """
        engine, clock, coming = self.engine, self.clock, self._coming
        while clock.now_s < until_s:
            while coming and coming[0][0] <= clock.now_s:
                arrive(heapq.heappop(coming)[2])
            began_s, num_steps = clock.now_s, self.scheduler.stats.num_steps
            has_work = engine.has_work()
            if has_work:
                receive(engine.step())
            elif not coming:
                break
            # Without a step, wait for what comes first: an arrival, or a turn for the tiers.
            has_stepped = self.scheduler.stats.num_steps > num_steps
            if has_stepped or self.scheduler.num_steps_in_flight or clock.now_s > began_s:
                continue
            turn_s = WAIT_S if has_work else engine.tier_work.advance_idle()
            next_s = [coming[0][0]] if coming else []
            next_s += [] if turn_s is None else [began_s + turn_s]
            clock.wait_until(min(next_s, default=began_s))

    def _end_sequences(self, outputs: list[SequenceOutput]) -> None:
        lengths = [self._lengths[output.request_id] for output in outputs if output.finish_reason]
        if lengths:
            self.clock.now_s += self._costs.ending_s(len(lengths), sum(lengths))
