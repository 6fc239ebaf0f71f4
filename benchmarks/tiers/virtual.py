"""A server in virtual time: the engine, over a machine and a disk that are only modelled.

Steps take what a straight line says; nothing is computed, and tokens are numbers. The disk is one
queue of reads and one of writes, at a rate each; what it keeps, and what it forgets when it is
full, is up to the disk tier's own `SegmentStore`, over files with records of a few bytes.
"""

import heapq
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.core.memory.tiers.load_rule import ComputeTime
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import (
    VOCABULARY,
    EngineShape,
    VirtualClock,
    VirtualEngine,
)
from quire.tiers.disk.files import Targets
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.record import record_bytes
from quire.tiers.disk.store import SegmentStore

PAYLOAD = bytes(8)  # stands for the bytes of a block


@dataclass(frozen=True, slots=True)
class Machine:
    """Of llama-160m in bf16 on two cores, about. A step takes base_s, token_s for each token, and
    pair_s for each token that one attends to. token_bytes: of K and V. noise: steps take up to this
    share longer or shorter."""

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


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: when, the prompt's tokens, how many tokens of an answer."""

    at_s: float
    prompt: tuple[int, ...]
    num_answer_tokens: int
    session: int = -1


@dataclass(slots=True)
class Figures:
    """What a run counted. Tokens of prompts by where they came from: memory, disk, computed."""

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


class VirtualDisk:
    """Implements `core.memory.tiers.contract.Tiers` for blocks of one group."""

    def __init__(self, disk: Disk, block_bytes: int, folder: Path, clock: VirtualClock) -> None:
        num_records = 10_000_000 if disk.num_bytes is None else disk.num_bytes // block_bytes
        self._cache_folder = CacheFolder.open(folder)
        self.store = SegmentStore(
            self._cache_folder,
            bytes(16),
            num_records * record_bytes(len(PAYLOAD)),
            segment_bytes=max(1 << 14, num_records * record_bytes(len(PAYLOAD)) // 64),
        )
        self.store.prepare_to_write()
        self.reads = True
        self.written_bytes = 0
        self._disk, self._block_bytes, self._clock = disk, block_bytes, clock
        self._read_s = block_bytes / disk.bytes_per_s
        self._free_s = {LoadOrder: 0.0, StoreOrder: 0.0}
        self._under_way: dict[int, StoreOrder | LoadOrder] = {}
        self._due: list[tuple[float, int]] = []

    def find(self, group: int, name: bytes) -> bool:
        return self.store.index.find(group, name)

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return self.store.index.tails(parent)

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        orders: list[StoreOrder | LoadOrder] = [*loads, *stores]
        for order in orders:
            kind = LoadOrder if isinstance(order, LoadOrder) else StoreOrder
            free_s = max(self._free_s[kind], self._clock.now_s) + self._read_s
            self._free_s[kind] = free_s
            self._under_way[order.order_id] = order
            heapq.heappush(self._due, (free_s + self._disk.latency_s, order.order_id))

    def cancel(self, order_ids: Iterable[int]) -> None:
        """What is read already comes; a queue is not shortened."""

    def ended(self) -> list[MoveEnd]:
        stores: list[StoreOrder] = []
        loads: list[LoadOrder] = []
        while self._due and self._due[0][0] <= self._clock.now_s:
            order = self._under_way.pop(heapq.heappop(self._due)[1])
            if isinstance(order, StoreOrder):
                stores.append(order)
            else:
                loads.append(order)
        if stores:
            self.store.append(stores, [memoryview(PAYLOAD)] * len(stores))
            self.written_bytes += len(stores) * self._block_bytes
        done: list[bool] = []
        if loads:
            keys = [(order.group, order.name) for order in loads]
            sizes = [len(PAYLOAD)] * len(loads)
            targets = Targets.in_turn(bytearray(sum(sizes)), sizes)
            done = self.store.read(keys, targets).done
        ends = [MoveEnd(order.order_id, True) for order in stores]
        return ends + [
            MoveEnd(order.order_id, came) for order, came in zip(loads, done, strict=True)
        ]

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        if not self.reads:
            return float("inf")
        ahead_s = max(0.0, self._free_s[LoadOrder] - self._clock.now_s)
        return ahead_s + self._disk.latency_s + len(contents) * self._read_s

    @property
    def takes_stores(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Move the clock to the end of the next move, if that is near."""
        end_s = self._clock.now_s + timeout_s
        self._clock.wait_until(min(self._due[0][0], end_s) if self._due else end_s)

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        return {"disk": {"written_bytes": self.written_bytes}}

    def clear(self) -> None:
        self.store.remove_all()

    def close(self) -> None:
        self.store.close()
        self._cache_folder.close()


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
        self._folder = tempfile.TemporaryDirectory(prefix="quire-virtual-")
        self._clock = VirtualClock()
        self.disk: VirtualDisk | None = None
        block_bytes = machine.token_bytes * machine.block_size
        if disk is not None:
            folder = Path(self._folder.name) / "cache"
            self.disk = VirtualDisk(disk, block_bytes, folder, self._clock)
            self.disk.reads = decides != "compute"
        shape = EngineShape(
            groups=(KVGroup((0,), KVKind.FULL, block_bytes),),
            num_blocks=num_blocks,
            block_size=machine.block_size,
            max_model_len=VOCABULARY,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
        )
        self._virtual: VirtualEngine[Ask] = VirtualEngine(
            shape, self, clock=self._clock, tiers=self.disk, tokens=count(1 << 30)
        )
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
        if self.disk is not None and self.memory.moves is not None:
            loads = self.memory.moves.loads.stats
            figures.disk_tokens = loads.num_hit_tokens
            figures.memory_tokens -= loads.num_hit_tokens
            figures.num_loaded_tokens = loads.num_loaded_tokens
            figures.num_loads, figures.num_declined = loads.num_loads, loads.num_declined
            figures.num_late = loads.num_late
            figures.written_bytes = self.disk.written_bytes
            self.disk.close()
        self._folder.cleanup()
        return figures
