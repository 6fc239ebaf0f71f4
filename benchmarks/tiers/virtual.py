"""A server in virtual time: the engine, over a machine and a disk that are only modelled.

Steps take what a straight line says; nothing is computed, and tokens are numbers. The disk is the
one of `simulation.virtual_disk`: a queue of reads and one of writes, at one rate for both.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.tiers.load_rule import ComputeTime
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_disk import DiskShape, DiskSpeeds
from quire.simulation.virtual_engine import VOCABULARY, EngineShape, VirtualEngine
from quire.tiers.disk.load_rate import NO_SPEED, LoadSpeed

EVERYTHING = 1 << 50
"""Bytes of a disk that forgets nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of llama-160m in bf16 on two cores, about. A step takes base_s, token_s for each
    token, and pair_s for each token that one attends to. token_bytes: of K and V. noise: steps take
    up to this share longer or shorter."""

    base_s: float = 0.013
    token_s: float = 0.00045
    pair_s: float = 1e-8
    token_bytes: int = 12 << 10
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Disk:
    """bytes_per_s: of reads, and of writes. num_bytes: that it keeps; None: all."""

    bytes_per_s: float
    latency_s: float = 0.0005
    num_bytes: int | None = None

    def shape(self, *, reads: bool) -> DiskShape:
        """The disk tier; reads: whether anything may be loaded from it."""
        s_per_byte = 1 / self.bytes_per_s
        speed = LoadSpeed(self.latency_s, s_per_byte) if reads else NO_SPEED
        num_bytes = EVERYTHING if self.num_bytes is None else self.num_bytes
        return DiskShape(speeds=DiskSpeeds(speed, speed, s_per_byte), num_bytes=num_bytes)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: when, the prompt's tokens, how many tokens of an answer."""

    at_s: float
    prompt: tuple[int, ...]
    num_answer_tokens: int
    session: int = -1


@dataclass(slots=True)
class Figures:
    """The counts of a run. Prompt tokens are counted by their source: memory, disk, computed."""

    memory_tokens: int = 0
    disk_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    virtual_s: float = 0.0
    busy_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_loaded_tokens: int = 0
    num_loads: int = 0
    num_declined: int = 0
    num_late: int = 0
    written_bytes: int = 0

    def percent(self, num_tokens: int) -> float:
        return 100 * num_tokens / max(1, self.prompt_tokens)

    def first_token(self, share: float) -> float:
        """A percentile, in seconds."""
        ordered = sorted(self.first_token_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.virtual_s


class _AlwaysLoad(ComputeTime):
    """Knows nothing, so that whatever is kept is loaded."""

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Served:
    """A request under way, and the tokens of its answer so far."""

    ask: Ask
    answer: list[int] = field(default_factory=list)


class VirtualServer:
    """Serves requests until all are answered; also the costs of its engine.

    next_ask: called with (session, history, now) when a request has ended; what that session asks
    next, if anything.
    """

    def __init__(
        self,
        machine: Machine,
        num_blocks: int,
        disk: Disk | None,
        *,
        decides: str = "rule",
        next_ask: Callable[[int, tuple[int, ...], float], Ask | None] | None = None,
        seed: int = 0,
    ) -> None:
        """decides: "rule", "load" whatever is kept, or "compute" all the same."""
        self.figures = Figures()
        self._machine = machine
        self._next_ask = next_ask
        self._noise = random.Random(seed)
        block_bytes = machine.token_bytes * machine.block_size
        shape = EngineShape(
            groups=(KVGroup((0,), KVKind.FULL, block_bytes),),
            num_blocks=num_blocks,
            block_size=machine.block_size,
            max_model_len=VOCABULARY,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            disk=None if disk is None else disk.shape(reads=decides != "compute"),
        )
        self._virtual: VirtualEngine[Ask] = VirtualEngine(shape, self, tokens=count(1 << 30))
        self._clock = self._virtual.clock
        self.memory = self._virtual.memory
        if self.memory.moves is not None and decides == "load":
            self.memory.moves.loads.compute_time = _AlwaysLoad()
        self._numbers = count()
        self._served: dict[str, _Served] = {}

    def run(self, asks: Iterable[Ask], until_s: float = float("inf")) -> Figures:
        """Serve until all are answered, or until a time."""
        for ask in asks:
            self._virtual.expect(ask.at_s, ask)
        self._virtual.run(self._add, self._receive, until_s)
        return self._finish()

    def step_s(self, work: PlannedWork) -> float:
        """See `VirtualCosts`."""
        machine, load = self._machine, work.load
        num_tokens = load.num_decodes + load.num_chunk_tokens
        seconds = machine.base_s + machine.token_s * num_tokens + machine.pair_s * work.num_context
        seconds *= self._noise.uniform(1 - machine.noise, 1 + machine.noise)
        self.figures.busy_s += seconds
        return seconds

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """See `VirtualCosts`."""
        return 0.0

    def _add(self, ask: Ask) -> None:
        request_id, params = str(next(self._numbers)), DecodingParams(ask.num_answer_tokens)
        self._served[request_id] = _Served(ask)
        self._virtual.add(Request(request_id, ask.prompt, params))

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        figures, now_s = self.figures, self._clock.now_s
        for output in outputs:
            served = self._served[output.request_id]
            figures.output_tokens += len(output.token_ids)
            if not served.answer:
                figures.first_token_s.append(now_s - served.ask.at_s)
                figures.prompt_tokens += len(served.ask.prompt)
                figures.memory_tokens += output.num_cached_tokens
            served.answer += output.token_ids
            if output.finish_reason is not None:
                del self._served[output.request_id]
                self._continue(served)

    def _continue(self, served: _Served) -> None:
        """Let the session of an ended request ask again."""
        if self._next_ask is None:
            return
        history = (*served.ask.prompt, *served.answer)
        following = self._next_ask(served.ask.session, history, self._clock.now_s)
        if following is not None:
            self._virtual.expect(following.at_s, following)

    def _finish(self) -> Figures:
        figures, stats = self.figures, self._virtual.scheduler.running_set.stats
        figures.virtual_s = self._clock.now_s
        figures.num_preemptions = stats.num_preemptions
        figures.num_recomputed_tokens = stats.num_recomputed_tokens
        if self.memory.moves is not None:
            loads = self.memory.moves.loads.stats
            figures.disk_tokens = loads.num_hit_tokens
            figures.memory_tokens -= loads.num_hit_tokens
            figures.num_loaded_tokens = loads.num_loaded_tokens
            figures.num_loads, figures.num_declined = loads.num_loads, loads.num_declined
            figures.num_late = loads.num_late
            stored = self.memory.moves.tiers.counts()["disk"]["stored_bytes"]
            figures.written_bytes = int(stored)
        return figures
