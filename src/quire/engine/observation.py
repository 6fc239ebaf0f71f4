"""Describes an engine as it is now, for the operator's page and `quire top`.

Answers the message Observe between two steps. Each part tells how long it took, so that the caller
can ask for a costly part less often. Called by `engine_process.engine_loop`.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from quire.core.memory.block_records import OwnerSlots, block_records
from quire.core.memory.prefix_tree import prefix_tree
from quire.core.sequence import Sequence as LiveSequence
from quire.engine.engine import Engine, totals
from quire.engine.watch import describe

MAX_NODES = 200
"""Number of runs of cached blocks in the part `prefixes`."""


class Observation:
    """Makes the parts of the description of one engine.

    Invariant: a live request keeps its slot from one call to the next, see `OwnerSlots`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots = OwnerSlots()
        self._makers: dict[str, Callable[[], Any]] = {
            "stats": self._stats,
            "requests": self._requests,
            "memory": self._memory,
            "blocks": self._blocks,
            "prefixes": self._prefixes,
        }

    def observe(
        self, parts: Collection[str], since: int, table_of: str | None = None
    ) -> dict[str, Any]:
        """The named parts, and the engine's time `now_s`. Unknown parts are left out.

        The part `events` has the steps and ended requests after event number `since`
        (`watch.Watch`); events are collected from the first call with this part on. `table_of` adds
        the block tables of a request as `table`. `seconds` has the processor time of each
        other part.
        """
        engine = self._engine
        found: dict[str, Any] = {"now_s": round(engine.clock(), 6), "seconds": {}}
        if "events" in parts:
            engine.watch.renew(engine.clock(), totals(engine))
            found["last_event"], found["events"] = engine.watch.events_after(since)
        if table_of is not None:
            found["table"] = self._table(table_of)
        for part in parts:
            if part in self._makers:
                began_s = time.thread_time()
                found[part] = self._makers[part]()
                found["seconds"][part] = time.thread_time() - began_s
        return found

    def _stats(self) -> dict[str, Any]:
        return asdict(self._engine.stats())

    def _memory(self) -> dict[str, Any]:
        return self._engine.memory_report().as_dict()

    def _requests(self) -> list[dict[str, Any]]:
        """All sequences of the scheduler, those that run first."""
        times, live = self._engine.times, self._live()
        slots = self._slots.update([branch.request_id for branch in live])
        return [
            {
                **describe(branch, times.first_token_s(branch.request_id, branch.branch_index)),
                "slot": slots[branch.request_id],
            }
            for branch in live
        ]

    def _blocks(self) -> dict[str, Any]:
        """The records of all blocks (`core.memory.block_records`), and the owners by slot."""
        memory, live = self._engine.scheduler.memory, self._live()
        slots = self._slots.update([branch.request_id for branch in live])
        return {
            "num_blocks": memory.pool.num_blocks,
            "block_size": memory.block_size,
            "kinds": [group.kind.value for group in memory.config.groups],
            "block_bytes": memory.config.groups[0].bytes_per_block,
            "owners": {str(slot): name for name, slot in slots.items()},
            "records": block_records(memory, live, slots),
        }

    def _prefixes(self) -> list[dict[str, Any]]:
        nodes = prefix_tree(self._engine.scheduler.memory, MAX_NODES)
        return [node._asdict() for node in nodes]

    def _table(self, request_id: str) -> list[dict[str, Any]]:
        """The blocks of each branch of a request, by KV group and in logical order, with HOLE_BLOCK
        where a window has passed. Empty once the request has ended."""
        return [
            {
                "branch": branch.branch_index,
                "num_tokens": len(branch.token_ids),
                "num_computed_tokens": branch.num_computed_tokens,
                "groups": [list(table) for table in branch.block_tables],
            }
            for branch in self._live()
            if branch.request_id == request_id
        ]

    def _live(self) -> Sequence[LiveSequence]:
        scheduler = self._engine.scheduler
        return [*scheduler.running, *scheduler.waiting]
