"""Bugs planted in the memory and the scheduler are caught by the runner, without any checker.

Each mutation is small and plausible. The accounting laws are switched off, so that what catches it
is that a row reads, or would write, something wrong.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from quire.core import scheduler as scheduler_module
from quire.core.block_pool import BlockPool
from quire.core.kv_cache_manager import KVCacheManager, PrefixMatch
from quire.core.prefix_cache import PrefixCache
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import Chunk
from quire.simulation.simulator import SimulationError, Simulator, run
from quire.simulation.workload import SimulationConfig

Patch = Callable[[pytest.MonkeyPatch], None]

CONFIG = SimulationConfig(
    seed=5,
    num_requests=60,
    num_blocks=24,
    num_groups=2,
    max_num_batched_tokens=16,
    logprobs_rate=0.3,
    overlap=1,
)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Put make(original) in the place of owner.name."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def free_at_once(original: Any) -> Any:
    def free(self: KVCacheManager, sequence: Sequence, after_step_id: int | None = None) -> None:
        original(self, sequence, None)

    return free


def release_for_all_holders(original: Any) -> Any:
    def release(self: BlockPool, block: int) -> None:
        while self.ref_count[block]:
            original(self, block)

    return release


def publish_too_early(original: Any) -> Any:
    def admit(self: KVCacheManager, sequence: Sequence, match: PrefixMatch) -> None:
        original(self, sequence, match)
        self.publish(sequence, len(sequence.token_ids))

    return admit


def match_one_block_too_many(original: Any) -> Any:
    def match(self: KVCacheManager, sequence: Sequence) -> PrefixMatch:
        found = original(self, sequence)
        more = found.num_tokens + self.block_size
        others = [
            {block for block, key in enumerate(self.pool.content) if key and key[0] == group}
            for group in range(self.num_groups)
        ]
        if not found.num_tokens or more >= sequence.num_tokens or not all(others):
            return found
        blocks = tuple((*ids, min(other)) for ids, other in zip(found.blocks, others, strict=True))
        held = sum(self.pool.ref_count[ids[-1]] == 0 for ids in blocks)
        return PrefixMatch(more, blocks, found.num_revived + held)

    return match


def forget_the_parent(original: Any) -> Any:
    def extend_chain(
        self: PrefixCache, chain: list[bytes], root: bytes, token_ids: list[int]
    ) -> None:
        while (len(chain) + 1) * self.block_size <= len(token_ids):
            first = len(chain) * self.block_size
            block: list[bytes] = []
            original(self, block, root, token_ids[first : first + self.block_size])
            chain.extend(block)

    return extend_chain


def same_root_for_all_groups(original: Any) -> Any:
    def find(self: PrefixCache, group: int, digest: bytes) -> int | None:
        return original(self, 0, digest)

    return find


def keep_evicted_content(original: Any) -> Any:
    def take(self: BlockPool, count: int) -> tuple[list[int], list[Any]]:
        taken, _ = original(self, count)
        return taken, []

    return take


def skip_every_fifth_edit(original: Any) -> Any:
    counter = [0]

    def append_edits(row: int, grown: Any) -> Any:
        counter[0] += 1
        return [] if counter[0] % 5 == 0 else original(row, grown)

    return append_edits


def swap_groups_in_edits(original: Any) -> Any:
    def append_edits(row: int, grown: Any) -> Any:
        edits = original(row, grown)
        ids = [edit.block_ids for edit in edits]
        return [edit._replace(block_ids=ids[-1 - at]) for at, edit in enumerate(edits)]

    return append_edits


def admit_with_reordered_tables(original: Any) -> Any:
    def admission(sequence: Sequence) -> Any:
        made = original(sequence)
        return made._replace(block_tables=tuple(table[::-1] for table in made.block_tables))

    return admission


def claim_one_more_computed_block(original: Any) -> Any:
    def admission(sequence: Sequence) -> Any:
        made = original(sequence)
        if made.num_computed_tokens or len(made.token_ids) <= 8:
            return made
        return made._replace(num_computed_tokens=4)

    return admission


def forget_a_release(original: Any) -> Any:
    def give_back(self: Scheduler, sequence: Sequence) -> None:
        original(self, sequence)
        if len(self._released_rows) > 1:
            self._released_rows.pop()

    return give_back


def leave_single_tokens_unnamed(original: Any) -> Any:
    def launch(self: Scheduler, chunks: dict[Sequence, int]) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in original(self, chunks) if chunk.num_new_tokens != 1)

    return launch


def drop_pauses(original: Any) -> Any:
    def launch(self: Scheduler, chunks: dict[Sequence, int]) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in original(self, chunks) if chunk.num_new_tokens)

    return launch


def swap_two_tokens(original: Any) -> Any:
    def admission(sequence: Sequence) -> Any:
        made = original(sequence)
        if sequence.num_admissions < 2:
            return made
        ids = list(made.token_ids)
        return made._replace(token_ids=[*ids[:-2], ids[-1], ids[-2]])

    return admission


MUTATIONS: dict[str, Patch] = {
    "blocks in flight are freed at once": replace(KVCacheManager, "free", free_at_once),
    "a block is released for all its holders": replace(
        BlockPool, "release", release_for_all_holders
    ),
    "blocks are published before they are written": replace(
        KVCacheManager, "admit", publish_too_early
    ),
    "a match has a wrong last block": replace(KVCacheManager, "match", match_one_block_too_many),
    "a hash does not cover its parent": replace(PrefixCache, "extend_chain", forget_the_parent),
    "groups share their blocks": replace(PrefixCache, "find", same_root_for_all_groups),
    "evicted content can still be found": replace(BlockPool, "take", keep_evicted_content),
    "an edit is lost": replace(scheduler_module, "append_edits", skip_every_fifth_edit),
    "edits go to the wrong group": replace(scheduler_module, "append_edits", swap_groups_in_edits),
    "tables are in the wrong order": replace(
        scheduler_module, "_admission", admit_with_reordered_tables
    ),
    "a block counts as computed that is not": replace(
        scheduler_module, "_admission", claim_one_more_computed_block
    ),
    "a row is not released": replace(Scheduler, "_give_back", forget_a_release),
    "a chunk of one token is left out": replace(Scheduler, "_launch", leave_single_tokens_unnamed),
    "a pause is left out": replace(Scheduler, "_launch", drop_pauses),
    "tokens change at a preemption": replace(scheduler_module, "_admission", swap_two_tokens),
}

WORLDS = {
    "a hash does not cover its parent": {"vocab_size": 3, "block_size": 2},
    "a chunk of one token is left out": {"max_num_batched_tokens": 9, "num_blocks": 48},
}
"""What a mutation needs to show itself, beyond CONFIG."""

NOT_BY_THE_RUNNER = {"tokens change at a preemption"}
"""The runner believes what it is told; the comparison with the output alone catches these."""


@pytest.fixture(autouse=True)
def no_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "_check", lambda self: None)


def test_without_a_mutation_all_is_well() -> None:
    report = run(CONFIG)
    assert report.num_preemptions > 0 and report.num_hit_tokens > 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, **WORLDS.get(name, {}))
    run(config)
    MUTATIONS[name](monkeypatch)
    with pytest.raises(SimulationError) as caught:
        run(config)
    message = str(caught.value)
    assert message.startswith("seed 5, after ")
    assert ("the last plans, for " in message) is (name not in NOT_BY_THE_RUNNER), message
