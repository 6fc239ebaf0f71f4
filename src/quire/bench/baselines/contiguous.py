"""Baseline KV memory: one run of adjacent blocks per sequence.

At admission, a sequence reserves the memory that it may need until its end, so it never grows,
shares or caches blocks. Kwon et al. (SOSP 2023, section 6.1) model Orca's memory like this. A run
is a block table with adjacent ids, so every runner can use it. Lengths are rounded up to whole
blocks. So a sequence wastes at most block_size - 1 slots more than with allocation by single slots.
The scheduler uses the manager as its `KVCacheManager`. `benchmarks/memory` measures this baseline.
To use one in an engine, pass its factory:

    from quire.bench.baselines.contiguous import contiguous
    LLM(kv_allocator=contiguous("max"))
"""

from collections.abc import Callable

from quire.bench.baselines.run_allocators import find_placement, next_power_of_two
from quire.core.memory.kv_cache_manager import (
    KVCacheConfig,
    KVCacheManager,
    KVManagerFactory,
    paged_manager,
)
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.sequence import Sequence
from quire.core.step import BlockCopy, TableEdit
from quire.errors import ConfigurationError, InvalidRequestError

Reservation = Callable[[Sequence, int], int]
"""Maps (sequence, max_model_len) to the number of slots to reserve for the sequence."""


def reserve_max(sequence: Sequence, max_model_len: int) -> int:
    """Reserve the length limit of the model for every sequence."""
    return max_model_len


def reserve_power_of_two(sequence: Sequence, max_model_len: int) -> int:
    """Reserve the prompt plus the output's true length, the latter rounded up to a power of two."""
    num_output_tokens = sequence.max_num_tokens - sequence.num_prompt_tokens
    wanted = sequence.num_prompt_tokens + next_power_of_two(num_output_tokens)
    return min(max_model_len, wanted)


def reserve_oracle(sequence: Sequence, max_model_len: int) -> int:
    """Reserve the prompt and the output's true length, which real engines don't know in advance.

    The request's length limit is used as the true length. That is exact if end tokens are ignored,
    else an upper bound.
    """
    return sequence.max_num_tokens


RESERVATIONS: dict[str, Reservation] = {
    "max": reserve_max,
    "pow2": reserve_power_of_two,
    "oracle": reserve_oracle,
}

PAGED = "paged"
KV_ALLOCATORS = (*(f"contiguous_{name}" for name in RESERVATIONS), PAGED)


class ContiguousKVCacheManager(KVCacheManager):
    """Gives each sequence one run of blocks at admission, and takes back the whole run at once.

    Invariant: a sequence has a run if and only if it has slots. The sequence's tables are the run's
    first blocks, one group after the other. The last blocks of the run are padding that the
    placement (the run allocator) added by rounding up: free in the pool, but taken in the
    placement.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        reservation: str,
        max_model_len: int,
        placement: str = "buddy",
    ) -> None:
        """`reservation` is a key of RESERVATIONS, `placement` a key of `run_allocators.PLACEMENTS`.

        Raises ConfigurationError for other names, for a prefix cache, and if a sequence of
        max_model_len tokens would not fit, because a request could then wait for ever.
        """
        if config.enable_prefix_caching:
            raise ConfigurationError(
                "enable_prefix_caching is True, but contiguous memory shares no blocks; leave it"
                " out, or set it to False"
            )
        super().__init__(config)
        self.num_blocks_to_grow = 0  # a sequence has all slots from its admission on
        if reservation not in RESERVATIONS:
            known = ", ".join(sorted(RESERVATIONS))
            raise ConfigurationError(f"reservation is {reservation!r}, but must be one of {known}")
        self._reserve = RESERVATIONS[reservation]
        self._max_model_len = max_model_len
        self._line = find_placement(placement)(config.num_blocks)
        self._runs: dict[Sequence, range] = {}
        #: (id of the step that may still read the run, run) for each run whose sequence is gone.
        self._leaving: list[tuple[int, range]] = []
        most = self.blocks_for(max_model_len)
        if not self._line.fits(most):
            longest = max(map(len, self._line.holes()))
            raise ConfigurationError(
                f"a sequence of max_model_len={max_model_len} tokens needs {most} adjacent KV"
                f" blocks, but {placement} placement in {config.num_blocks} blocks has runs of at"
                f" most {longest}; give the engine more kv_cache_memory, or lower max_model_len"
            )

    # ---- for the ledger ---------------------------------------------------------------------

    def is_fragmented_for(self, sequence: Sequence) -> bool:
        """Whether enough blocks are free for a sequence's reservation, but not in one run."""
        count = self._num_reserved_blocks(sequence)
        return count <= self._line.num_free and not self._line.fits(count)

    # ---- requests ---------------------------------------------------------------------------

    def share_prompt(self, branches: list[Sequence]) -> None:
        """Do nothing, since each branch computes the prompt itself."""

    def check_fits(self, sequence: Sequence, *, is_fork: bool = False) -> None:
        """Refuses forks, and beam search, which forks in each step."""
        if is_fork or sequence.params.beam_width > 1:
            what = "nothing can fork" if is_fork else "it searches no beams"
            raise InvalidRequestError(
                f"this KV allocator shares no blocks, so {what}; leave kv_allocator out"
            )
        super().check_fits(sequence)

    # ---- getting and giving back ------------------------------------------------------------

    def match(self, sequence: Sequence) -> PrefixMatch:
        """An empty match, since this memory has no cached prefixes."""
        return PrefixMatch(0, 0, ((),) * self.num_groups)

    def num_blocks_to_admit(self, sequence: Sequence, match: PrefixMatch) -> int:
        """The number of blocks that the sequence's reservation takes.

        If no hole is long enough, returns at least one more than the number of free blocks, so that
        the sequence waits. How many blocks must be freed for it depends on their positions.
        """
        count = self._num_reserved_blocks(sequence)
        granted = self._line.granted(count)
        return granted if self._line.fits(count) else max(granted, self.pool.num_free + 1)

    def admit(self, sequence: Sequence, match: PrefixMatch, step_id: int) -> list[BlockCopy]:
        """Reserve a run and make the sequence's block tables from it. Returns no copies."""
        sequence.num_admissions += 1
        count = self._num_reserved_blocks(sequence)
        run = self._line.take(count)
        assert run is not None, "admit without a hole that is long enough"
        self._runs[sequence] = run
        self.padding[sequence] = len(run) - count
        for block in run[:count]:
            self.pool.share(block, is_use=False)
        num_blocks = count // self.num_groups
        starts = run[:count:num_blocks]
        sequence.block_tables = tuple(list(range(at, at + num_blocks)) for at in starts)
        sequence.num_slots = num_blocks * self.block_size
        self._count_padding()
        return []

    def grow(
        self, sequence: Sequence, num_tokens: int, num_extra_blocks: int = 0
    ) -> list[TableEdit] | None:
        """Return no edits, since the sequence has had all its slots from its admission on."""
        assert num_tokens <= sequence.num_slots, f"{sequence} outgrows its reservation"
        return []

    def num_kept_blocks(self, sequence: Sequence, num_wanted: int) -> int:
        """Always 0, because a sequence gives back its whole run."""
        return 0

    def truncate(self, sequence: Sequence, num_kept: int) -> int:
        """Take the sequence's whole run back, unless it has at most num_kept blocks in each group.

        Returns the number of blocks that are now free, or will be after the step that reads them.
        """
        if num_kept * self.block_size >= sequence.num_slots:
            return 0
        run = self._runs.pop(sequence)
        del self.padding[sequence]
        if self.deferred.is_in_flight(sequence.last_step_id):
            self._leaving.append((sequence.last_step_id, run))
        else:
            self._line.give_back(run)
        num_freed = super().truncate(sequence, 0)
        self._count_padding()
        return num_freed

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Release the runs that steps up to step_id could read."""
        super().end_step(step_id, has_failed=has_failed)
        for held_by, run in self._leaving:
            if held_by <= step_id:
                self._line.give_back(run)
        self._leaving = [entry for entry in self._leaving if entry[0] > step_id]
        self._count_padding()

    def _count_padding(self) -> None:
        """Update the number of blocks that the placement added by rounding up."""
        self.num_padding_blocks = self.pool.num_free - self._line.num_free

    def _num_reserved_blocks(self, sequence: Sequence) -> int:
        return self.blocks_for(self._reserve(sequence, self._max_model_len))


def contiguous(reservation: str, placement: str = "buddy") -> KVManagerFactory:
    """A factory for `LLM(kv_allocator=...)` and `build_engine`.

    Wrong arguments raise ConfigurationError only when the factory is called.
    """
    return lambda config, max_model_len: ContiguousKVCacheManager(
        config, reservation, max_model_len, placement
    )


def find_allocator(name: str, placement: str = "buddy") -> KVManagerFactory:
    """The factory for a name in KV_ALLOCATORS. `placement` applies to contiguous runs only.

    Raises ConfigurationError for other names.
    """
    if name not in KV_ALLOCATORS:
        known = ", ".join(sorted(KV_ALLOCATORS))
        raise ConfigurationError(f"kv_allocator is {name!r}, but must be one of {known}")
    if name == PAGED:
        return paged_manager
    return contiguous(name.removeprefix("contiguous_"), placement)
