"""A memory manager with sequences and steps in flight, beside a plain model of what it holds.

`test_memory_machine` drives a `World` as the scheduler does, but in any order: admit, write, fork,
take blocks back, fail. A step's copies and writes happen when it lands, as on a device
that lags.
"""

from collections.abc import Iterable
from itertools import count

from tests.core.harness import make_groups
from tests.core.memory.memory_truth import Step, Tokens, Truth, make_spans, positions

from quire.core.kv_groups import KVGroup
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling import invariants
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import HOLE_BLOCK

MAX_NUM_TOKENS = 24
MAX_STEPS_IN_FLIGHT = 2
RUNNING, PREEMPTED = SequenceState.RUNNING, SequenceState.PREEMPTED


class World:
    """Sequences over few tokens, so that prefixes are often equal, in a pool that is often full.

    live: with state RUNNING or PREEMPTED. waiting: forks that share nothing yet.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: int | tuple[KVGroup, ...], caching: bool
    ) -> None:
        """groups: how many that keep all tokens, or which."""
        if isinstance(groups, int):
            groups = make_groups(groups)
        self.memory = KVCacheManager(
            KVCacheConfig(groups, num_blocks, block_size, caching, b"secret")
        )
        self.memory.snapshots.interval = 2 * block_size
        self.size = block_size
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.truth = Truth(self.memory)
        self.in_flight: list[Step] = []
        self.draft = PlanBuilder()  # of the step to come, for its copies
        self.next_step_id = 0
        self._names = (f"r{number}" for number in count(1))
        self._watch()

    def _watch(self) -> None:
        """Note all that becomes findable, and look at all that is given out."""
        prefixes, pool = self.memory.prefixes, self.memory.pool
        publish, publish_tail, take = prefixes.publish, prefixes.publish_tail, pool.take

        def publish_and_note(sequence: Sequence, num_confirmed_tokens: int) -> None:
            publish(sequence, num_confirmed_tokens)
            self.truth.note(sequence, num_confirmed_tokens)

        def publish_tail_and_note(sequence: Sequence) -> None:
            self.truth.note(sequence, sequence.num_confirmed_tokens)
            publish_tail(sequence)

        def take_and_look(count: int) -> tuple[list[int], list[tuple[int, bytes]]]:
            taken, evicted = take(count)
            in_use = {block for step in self.in_flight for block in step.touched()}
            in_use |= {block for copy in self.draft.copies for block in copy}
            assert not in_use & set(taken), "a block is given out that a step still uses"
            return taken, evicted

        prefixes.publish = publish_and_note  # type: ignore[method-assign]
        prefixes.publish_tail = publish_tail_and_note  # type: ignore[method-assign]
        pool.take = take_and_look  # type: ignore[method-assign]

    # ---- coming in --------------------------------------------------------------------------

    def new(
        self,
        token_ids: list[int],
        domain: str,
        prompt_logprobs: bool = False,
        spans: Iterable[tuple[int, int, int]] = (),
    ) -> Sequence:
        """The sequence of a new request; spans: as `make_spans` takes them."""
        params = DecodingParams(MAX_NUM_TOKENS, prompt_logprobs=0 if prompt_logprobs else None)
        root = self.memory.prefixes.start_chain(domain)
        made = Sequence(
            next(self._names), token_ids, params, max_num_tokens=MAX_NUM_TOKENS, chain_root=root
        )
        made.content_spans = make_spans(list(spans), len(token_ids))
        return made

    def _branch(self, parent: Sequence) -> Sequence:
        child = parent.branch(1, parent.params)
        child.request_id = next(self._names)
        return child

    def resting(self) -> list[Sequence]:
        """Those without a row."""
        return [*self.waiting, *(sequence for sequence in self.live if sequence.state is PREEMPTED)]

    def fork_waiting(self, parent: Sequence) -> None:
        """A fork of a sequence, to be admitted later."""
        child = self._branch(parent)
        child.fork_from(parent)
        self.waiting.append(child)

    def admit(self, sequence: Sequence) -> bool:
        """Let a sequence without a row go on, if there is room."""
        memory = self.memory
        match = memory.match(sequence)
        self.truth.check_match(sequence, match)
        num_free, needed = memory.pool.num_free, memory.num_blocks_to_admit(sequence, match)
        if needed > num_free:
            return False
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.stop_waiting_for_fork()
        self.draft.copy(memory.admit(sequence, match, self.next_step_id))
        assert memory.pool.num_free == num_free - needed, "not as many blocks as predicted"
        assert sequence.num_computed_tokens == match.num_tokens
        sequence.row = 0
        sequence.move_to(RUNNING)
        if sequence not in self.live:
            self.live.append(sequence)
        return True

    # ---- going on ---------------------------------------------------------------------------

    def make_writable(self, sequence: Sequence, num_extra: int) -> bool:
        """A slot for the next token, in a block of its own; False: none is free."""
        memory, computed = self.memory, sequence.num_computed_tokens
        if memory.snapshots.awaits(sequence):
            return False
        if sequence.num_tokens - computed != 1 and not memory.growth.bounded:
            return True  # its tables were complete when it was admitted
        if memory.pool.num_free < memory.copy_on_write.num_blocks([sequence]):
            return False
        if memory.copy_on_write.is_due(sequence):
            self.draft.copy(memory.copy_on_write.copy(sequence, self.next_step_id)[1])
            num_extra = 0  # for which there may be no room, and what is copied has to compute
        return memory.grow(sequence, computed + 1, num_extra) is not None

    def launch(
        self, chunks: dict[int, int], num_extra: int = 0, newcomers: Iterable[Sequence] = ()
    ) -> None:
        """A step in which the sequences live[index] compute up to so many tokens, and those of the
        newcomers that find room compute too. Two steps may be in flight."""
        if len(self.in_flight) == MAX_STEPS_IN_FLIGHT:
            return
        writers: dict[Sequence, int] = {}
        for sequence in self.live:
            if sequence.state is RUNNING:
                self.memory.forget_passed(sequence)
        for index, chunk in chunks.items():
            sequence = self.live[index % len(self.live)]
            gap = sequence.num_tokens - sequence.num_computed_tokens
            if sequence.state is not RUNNING or not gap or sequence.num_tokens == MAX_NUM_TOKENS:
                continue
            if self.make_writable(sequence, num_extra):
                writers[sequence] = chunk_of(self.memory, sequence, chunk)
        for index, sequence in enumerate(newcomers):
            is_early = sequence.num_pending_tokens or sequence.num_tokens == MAX_NUM_TOKENS
            if not is_early and self.admit(sequence):
                writers[sequence] = chunk_of(self.memory, sequence, 1 + 3 * index)
        step = Step(self.next_step_id, self.draft.copies)
        self.draft.clear()
        self.next_step_id += 1
        sources, targets = (
            {source for source, _ in step.copies},
            [target for _, target in step.copies],
        )
        assert len(targets) == len(set(targets)) and not sources & set(targets)
        for sequence, chunk in writers.items():
            self._compute(step, sequence, chunk)
        self.in_flight.append(step)

    def _compute(self, step: Step, sequence: Sequence, chunk: int) -> None:
        first = sequence.num_computed_tokens
        sequence.num_computed_tokens = end = first + chunk
        sequence.last_step_id = step.step_id
        if end == sequence.num_tokens:
            sequence.num_pending_tokens += 1
        step.ends.append((sequence, sequence.num_admissions, end))
        named = [
            block for sequence in self.live for table in sequence.block_tables for block in table
        ]
        for rule in self.memory.growth.rules:
            group, table = rule.group, sequence.block_tables[rule.group]
            for place, page in enumerate(() if rule.has_slots else table):
                assert named.count(page) == 1, "a write into a shared state"
                step.states.append((page, (group, place), sequence, first, end))
            last = -(-end // self.size) if rule.has_slots else 0
            for index in range(rule.first_needed(first), last):
                assert table[index] != HOLE_BLOCK, "a hole is read"
                entry = table[index], group, sequence, min(end, (index + 1) * self.size)
                step.context.append(entry)
                if (index + 1) * self.size > first:
                    assert named.count(table[index]) == 1, "a write into a shared block"
                    step.writes.append(entry)
                    step.starts[table[index]] = max(first, index * self.size)

    def land(self, token_ids: list[int]) -> None:
        """The oldest step ends; sequences that closed their gap get tokens of token_ids in turn."""
        step, memory = self.in_flight.pop(0), self.memory
        self.truth.carry_out(step)
        memory.end_step(step.step_id)
        for index, (sequence, num_admissions, end) in enumerate(step.ends):
            if sequence.is_finished:
                continue
            if sequence.state is RUNNING and sequence.num_admissions == num_admissions:
                sequence.num_confirmed_tokens = end
                memory.publish(sequence, end)
            if end == len(sequence.token_ids) and sequence.num_pending_tokens:
                sequence.num_pending_tokens -= 1
                sequence.append(token_ids[index % len(token_ids)])

    def join(self, parent: Sequence) -> None:
        """A fork that goes on with its parent: in the step in flight in which that closes its gap,
        or, as a beam, from its next one on."""
        has_gap = parent.num_tokens - parent.num_computed_tokens > 1
        has_reserve = parent.num_slots - parent.num_computed_tokens >= self.size
        has_reserve &= bool(self.memory.growth.growing)
        last = self.in_flight[-1].step_id if self.in_flight else -1
        is_late = parent.num_pending_tokens > 0 and parent.last_step_id != last
        is_new = not parent.num_computed_tokens  # or has lost all to a failed step
        if has_gap or has_reserve or is_late or is_new or parent.num_pending_tokens > 1:
            return
        child = self._branch(parent)
        self.memory.fork(child, parent)
        child.num_admissions, child.row = 1, 0
        child.num_pending_tokens = parent.num_pending_tokens
        child.last_step_id = parent.last_step_id
        child.move_to(RUNNING)
        self.live.append(child)
        if child.num_pending_tokens:
            self.in_flight[-1].ends.append((child, 1, child.num_computed_tokens))

    def refork(self, dead: Sequence, parent: Sequence) -> None:
        """`dead`, a beam, becomes a fork of `parent`, another one; not while a step is planned."""
        if self.draft.copies:
            return
        self.memory.fork(dead, parent)
        dead.token_ids[:] = parent.token_ids

    # ---- giving back ------------------------------------------------------------------------

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a step in flight computes it; the manager must say the same."""
        is_there = any(step.step_id == sequence.last_step_id for step in self.in_flight)
        assert self.memory.deferred.is_in_flight(sequence.last_step_id) is is_there
        return is_there

    def truncate(self, sequence: Sequence, num_cut: int) -> None:
        """Preempt it, if it runs, and take so many of its last blocks of each group."""
        num_used = -(-sequence.num_computed_tokens // self.size)
        num_kept, memory = max(0, num_used - num_cut), self.memory
        expected = sum(
            memory.pool.ref_count[block] == 1
            for table in sequence.block_tables
            for block in table[num_kept:]
            if block != HOLE_BLOCK
        )
        num_now_free = memory.pool.num_free + (0 if self.is_in_flight(sequence) else expected)
        num_freed = memory.truncate(sequence, num_kept)
        if not memory.growth.bounded:  # else it may have to give up all
            assert num_freed == expected and memory.pool.num_free == num_now_free
        if sequence.state is RUNNING:
            sequence.row = None
            sequence.move_to(PREEMPTED)

    def cut_reserve(self, sequence: Sequence) -> None:
        """Take the blocks that it does not need yet."""
        if sequence.state is RUNNING:
            num_used = -(-sequence.num_tokens // self.size)
            self.memory.truncate(sequence, num_used)

    def free(self, sequence: Sequence) -> None:
        """It ends; its forks no longer wait for it."""
        self.live.remove(sequence)
        self.memory.free(sequence)
        sequence.row = None
        sequence.move_to(SequenceState.FINISHED)
        for child in list(sequence.forks):
            child.stop_waiting_for_fork()

    def recover(self) -> None:
        """All steps in flight fail: their blocks hold anything, and all rows are lost."""
        memory = self.memory
        for step in self.in_flight:
            self.truth.spoil(step)
        self.in_flight = []
        memory.end_step(self.next_step_id - 1, has_failed=True)
        for sequence in self.live:
            sequence.num_pending_tokens = 0
            memory.truncate(sequence, 0 if memory.growth.states else sequence.num_published_blocks)
            if sequence.state is RUNNING:
                sequence.row = None
                sequence.move_to(PREEMPTED)

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """All laws, and the model: findable blocks hold what they are found by, and sequences find
        in their tables what they have written."""
        memory, truth = self.memory, self.truth
        invariants.check_memory(memory, self.live)
        to_come = {block for step in self.in_flight for block in step.to_come()}
        for block, key in enumerate(memory.pool.content):
            assert key is None or truth.holds(block, key), "a wrong content"
        for sequence in self.live:
            invariants.check_sequence(sequence, self.memory.growth)
            for rule in memory.growth.growing if sequence.block_tables else ():
                group, table = rule.group, sequence.block_tables[rule.group]
                first = rule.first_needed(sequence.num_computed_tokens)
                for index in range(first, -(-sequence.num_confirmed_tokens // self.size)):
                    end = min(sequence.num_confirmed_tokens, (index + 1) * self.size)
                    prefix = positions(sequence)[:end]
                    if table[index] not in to_come:
                        assert truth.begins(table[index], group, prefix), "a wrong table"

    def finish(self) -> None:
        """Everything ends; nothing is held then."""
        for sequence in list(self.live):
            self.free(sequence)
        while self.in_flight:
            self.land([0])
            self.check()
        assert self.memory.pool.num_held == 0
        assert not self.memory.deferred.num_copied_from
        assert not self.memory.prefixes._computing, "a sequence that ended is said to compute"


def chunk_of(memory: KVCacheManager, sequence: Sequence, most: int) -> int:
    """What it computes of `most` tokens: as far as its tables go, and its state's next stop."""
    computed = sequence.num_computed_tokens
    most = min(most, sequence.num_tokens - computed, sequence.num_slots - computed)
    return memory.snapshots.tokens_to_stop(sequence, most)


def beam_pairs(world: World) -> list[tuple[Sequence, Sequence]]:
    """(dead, parent): those of one request that wait for nothing, the second one with a row."""
    idle = [
        sequence
        for sequence in world.live
        if not sequence.num_pending_tokens
        and sequence.num_tokens - sequence.num_computed_tokens <= 1
        and not world.is_in_flight(sequence)
    ]
    return [
        (dead, parent)
        for parent in idle
        for dead in idle
        if dead is not parent
        and parent.state is RUNNING
        and parent.num_computed_tokens
        and not dead.forks
        # Beams have the chain's root and the prompt in common.
        and dead.chain_root == parent.chain_root
        and prompt_of(dead) == prompt_of(parent)
    ]


def prompt_of(sequence: Sequence) -> Tokens:
    return positions(sequence)[: sequence.num_prompt_tokens]
