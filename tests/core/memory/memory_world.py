"""A memory manager with sequences and steps in flight, beside a plain model of what it holds.

`test_memory_machine` drives a `World` as the scheduler does, but in any order: admit, write, fork,
take blocks back, fail. A step's copies and writes happen when it lands, as on a device
that lags.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from tests.core.harness import make_memory

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling import invariants
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import BlockCopy

DOMAINS = ("a", "b", PUBLIC_DOMAIN)
MAX_NUM_TOKENS = 24
MAX_STEPS_IN_FLIGHT = 2
RUNNING, PREEMPTED = SequenceState.RUNNING, SequenceState.PREEMPTED
Tokens = tuple[int, ...]


@dataclass
class Step:
    """copies: carried out first. writes, context: blocks that it fills, and that it reads when it
    has; with their group, whose tokens, and how many of them. starts: block -> tokens before the
    first that it writes there. ends: each sequence in it, its admissions then, and how many of its
    tokens are written when it has ended."""

    step_id: int
    copies: list[BlockCopy]
    writes: list[tuple[int, int, Sequence, int]] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    context: list[tuple[int, int, Sequence, int]] = field(default_factory=list)
    ends: list[tuple[Sequence, int, int]] = field(default_factory=list)

    def touched(self) -> set[int]:
        """All blocks that it reads or writes."""
        return {block for copy in self.copies for block in copy} | {
            entry[0] for entry in self.context
        }


class Truth:
    """What blocks and digests truly stand for.

    stored: block -> KV group, and all tokens up to the last one written in it. prefixes: digest ->
    domain, and all tokens up to the end of its block.
    """

    def __init__(self, memory: KVCacheManager) -> None:
        self.memory = memory
        self.size = memory.block_size
        self.stored: dict[int, tuple[int, Tokens]] = {}
        self.prefixes: dict[bytes, tuple[str, Tokens]] = {}
        self.roots = {memory.cache.root(domain): domain for domain in DOMAINS}

    def domain(self, sequence: Sequence) -> str:
        return self.roots[sequence.chain_root]

    def begins(self, block: int, group: int, prefix: Tokens) -> bool:
        """Whether a block has these tokens, and maybe more after them."""
        stored = self.stored.get(block)
        if stored is None or stored[0] != group:
            return False
        same_place = (len(stored[1]) - 1) // self.size == (len(prefix) - 1) // self.size
        return same_place and stored[1][: len(prefix)] == prefix

    def note(self, sequence: Sequence, num_tokens: int) -> None:
        """What the digests of its blocks stand for, computed anew."""
        cache, domain, token_ids = self.memory.cache, self.domain(sequence), sequence.token_ids
        chain: list[bytes] = []
        cache.extend_chain(chain, sequence.chain_root, token_ids[:num_tokens])
        for index, digest in enumerate(chain):
            self.prefixes[digest] = domain, tuple(token_ids[: (index + 1) * self.size])
        tail = token_ids[len(chain) * self.size : num_tokens]
        if tail:
            digest = cache.hash_tail(chain[-1] if chain else sequence.chain_root, tail)
            self.prefixes[digest] = domain, tuple(token_ids[:num_tokens])

    def carry_out(self, step: Step) -> None:
        """Copies, writes, and then every context is read."""
        copied = [(copy.target, self.stored.get(copy.source)) for copy in step.copies]
        for target, content in copied:
            assert content is not None, "a copy of nothing"
            self.stored[target] = content
        for block, group, sequence, end in step.writes:
            self.stored[block] = group, tuple(sequence.token_ids[:end])
        for block, group, sequence, end in step.context:
            prefix = tuple(sequence.token_ids[:end])
            assert self.begins(block, group, prefix) or sequence.is_finished, "a wrong token"

    def spoil(self, step: Step) -> None:
        """The step failed: what it should have written may be anything."""
        for copy in step.copies:
            self.stored.pop(copy.target, None)
        for block, start in step.starts.items():
            group, prefix = self.stored.pop(block, (0, ()))
            if start % self.size and prefix:
                self.stored[block] = group, prefix[:start]

    def check_match(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Nothing is matched that is not there, nothing of another domain, and nothing is missed
        (with one group; with more, a partly matching block may be lost in one of them)."""
        memory = self.memory
        assert match.num_tokens < len(sequence.token_ids)
        num_held = sequence.num_computed_tokens
        full, part = divmod(match.num_tokens, self.size)
        if num_held % self.size == 0:
            assert [len(ids) for ids in match.blocks] == [full - num_held // self.size] * (
                memory.num_groups
            )
            assert len(match.partial) == memory.num_groups * (part > 0)
        parent = sequence.parent
        theirs = set() if parent is None else {id for t in parent.block_tables for id in t}
        for block in [*match.partial, *(block for ids in match.blocks for block in ids)]:
            key = memory.pool.content[block]
            if block not in theirs:
                assert key is not None
                assert self.prefixes[key[1]][0] in (self.domain(sequence), PUBLIC_DOMAIN)
        if memory.num_groups == 1 and not sequence.needs_prompt_logprobs:
            num_findable = self.num_findable_tokens(sequence)
            found = memory.prefixes.match(sequence)  # before a part is left out for want of room
            assert found.num_tokens >= num_findable, f"{found}, but {num_findable} of {sequence}"
            assert match.num_tokens in (found.num_tokens, found.num_written_tokens)

    def num_findable_tokens(self, sequence: Sequence) -> int:
        """The longest prefix that the cache has for it, by a look at each block of it."""
        held, token_ids = sequence.num_computed_tokens, tuple(sequence.token_ids)
        if held % self.size:
            return held
        found = {
            self.prefixes[digest][1]
            for digest in self.memory.cache.entries(0)
            if self.prefixes[digest][0] in (self.domain(sequence), PUBLIC_DOMAIN)
        }
        while held + self.size < len(token_ids) and token_ids[: held + self.size] in found:
            held += self.size
        nexts = [tokens for tokens in found if tokens[:held] == token_ids[:held]]
        agreeing = (
            num_common(tokens, token_ids[:-1])
            for tokens in nexts
            if len(tokens) - held <= self.size
        )
        return max(agreeing, default=held)


class World:
    """Sequences over few tokens, so that prefixes are often equal, in a pool that is often full.

    live: with state RUNNING or PREEMPTED. waiting: forks that share nothing yet.
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int, caching: bool) -> None:
        self.memory = make_memory(num_blocks, block_size, num_groups, caching)
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

        def publish_and_note(sequence: Sequence, num_written_tokens: int) -> None:
            publish(sequence, num_written_tokens)
            self.truth.note(sequence, num_written_tokens)

        def publish_tail_and_note(sequence: Sequence) -> None:
            self.truth.note(sequence, sequence.num_written_tokens)
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

    def new(self, token_ids: list[int], domain: str, prompt_logprobs: bool = False) -> Sequence:
        """The sequence of a new request."""
        params = DecodingParams(MAX_NUM_TOKENS, prompt_logprobs=0 if prompt_logprobs else None)
        root = self.memory.prefixes.start_chain(domain)
        return Sequence(
            next(self._names), token_ids, params, max_num_tokens=MAX_NUM_TOKENS, chain_root=root
        )

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
        sequence.leave_parent()
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
        memory = self.memory
        if sequence.num_tokens - sequence.num_computed_tokens != 1:
            return True  # its tables were complete when it was admitted
        if memory.copy_on_write.is_due(sequence):
            if memory.pool.num_free < memory.num_groups:
                return False
            self.draft.copy(memory.copy_on_write.copy(sequence, self.next_step_id)[1])
        return memory.grow(sequence, sequence.num_computed_tokens + 1, num_extra) is not None

    def launch(
        self, chunks: dict[int, int], num_extra: int = 0, newcomers: Iterable[Sequence] = ()
    ) -> None:
        """A step in which the sequences live[index] compute up to so many tokens, and those of the
        newcomers that find room compute too. Two steps may be in flight."""
        if len(self.in_flight) == MAX_STEPS_IN_FLIGHT:
            return
        writers: dict[Sequence, int] = {}
        for index, chunk in chunks.items():
            sequence = self.live[index % len(self.live)]
            gap = sequence.num_tokens - sequence.num_computed_tokens
            if sequence.state is not RUNNING or not gap or sequence.num_tokens == MAX_NUM_TOKENS:
                continue
            if self.make_writable(sequence, num_extra):
                writers[sequence] = min(gap, chunk)
        for index, sequence in enumerate(newcomers):
            is_early = sequence.num_pending_tokens or sequence.num_tokens == MAX_NUM_TOKENS
            if not is_early and self.admit(sequence):
                gap = sequence.num_tokens - sequence.num_computed_tokens
                writers[sequence] = min(gap, 1 + 3 * index)
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
        for group, table in enumerate(sequence.block_tables):
            for index in range(-(-end // self.size)):
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
                sequence.num_written_tokens = end
                memory.publish(sequence, end)
            if end == len(sequence.token_ids) and sequence.num_pending_tokens:
                sequence.num_pending_tokens -= 1
                sequence.append(token_ids[index % len(token_ids)])

    def join(self, parent: Sequence) -> None:
        """A fork that goes on with its parent: in the step in flight in which that closes its gap,
        or, as a beam, from its next one on."""
        has_gap = parent.num_tokens - parent.num_computed_tokens > 1
        has_reserve = parent.num_slots - parent.num_computed_tokens >= self.size
        last = self.in_flight[-1].step_id if self.in_flight else -1
        is_late = parent.num_pending_tokens > 0 and parent.last_step_id != last
        if has_gap or has_reserve or is_late or parent.num_pending_tokens > 1:
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
        """`dead`, a beam, becomes a fork of `parent`, another one."""
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
        expected = sum(
            self.memory.pool.ref_count[block] == 1
            for table in sequence.block_tables
            for block in table[max(0, num_used - num_cut) :]
        )
        num_now_free = self.memory.pool.num_free + (0 if self.is_in_flight(sequence) else expected)
        num_freed = self.memory.truncate(sequence, max(0, num_used - num_cut))
        assert num_freed == expected and self.memory.pool.num_free == num_now_free
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
            child.leave_parent()

    def recover(self) -> None:
        """All steps in flight fail: their blocks hold anything, and all rows are lost."""
        memory = self.memory
        for step in self.in_flight:
            self.truth.spoil(step)
        self.in_flight = []
        memory.end_step(self.next_step_id - 1, has_failed=True)
        for sequence in self.live:
            sequence.num_pending_tokens = 0
            memory.truncate(sequence, sequence.num_published_blocks)
            if sequence.state is RUNNING:
                sequence.row = None
                sequence.move_to(PREEMPTED)

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """All laws, and the model: findable blocks hold what they are found by, and sequences find
        in their tables what they have written."""
        memory, truth = self.memory, self.truth
        invariants.check_memory(memory, self.live)
        to_come = {block for step in self.in_flight for block, *_ in step.writes}
        to_come |= {copy.target for step in self.in_flight for copy in step.copies}
        for block, key in enumerate(memory.pool.content):
            if key is not None:
                assert truth.begins(block, key[0], truth.prefixes[key[1]][1]), "a wrong content"
        for sequence in self.live:
            invariants.check_sequence(sequence, self.memory.growth)
            for group, table in enumerate(sequence.block_tables):
                for index in range(-(-sequence.num_written_tokens // self.size)):
                    end = min(sequence.num_written_tokens, (index + 1) * self.size)
                    prefix = tuple(sequence.token_ids[:end])
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


def num_common(first: Tokens, second: Tokens) -> int:
    """How many leading tokens agree."""
    pairs = zip(first, second, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )


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
        and not dead.forks
        # Beams have the chain's root and the prompt in common.
        and dead.chain_root == parent.chain_root
        and prompt_of(dead) == prompt_of(parent)
    ]


def prompt_of(sequence: Sequence) -> Tokens:
    return tuple(sequence.token_ids[: sequence.num_prompt_tokens])
