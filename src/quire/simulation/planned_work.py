"""Counts the work of each step from its plan alone.

The same code counts the work of measured steps (beside the real runner) and of predicted steps (in
`virtual_engine`).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from quire.core.scheduling.cost_model import StepLoad
from quire.core.step import StepPlan
from quire.simulation.plan_rows import PlanRows, count_changes

#: After a step with _FEW prompt tokens or less, the processor's caches are almost unchanged. After
#: _MOST or more, the content of the caches is replaced. In between, the additional time of the next
#: step grows with the logarithm of the number of prompt tokens, as measured for 10 to 1,000 tokens.
_FEW, _MOST = 32, 1024
#: After each further step, this share of the coldness (see `PlannedWork`) remains, as measured.
_WARMING = 1 / 3
#: A smaller coldness counts as 0.
_WARM = 0.001

NO_BEAMS: Mapping[int, int] = {}


class PlannedWork(NamedTuple):
    """The work of one step. "Tokens", "rows" and "blocks" below are counts."""

    #: The numbers of rows and tokens that the step computes.
    load: StepLoad
    #: The length of the longest row that the step computes, in tokens after the step.
    longest: int
    #: Numbers of the rows that get a token.
    sampled: tuple[int, ...]
    #: Live rows.
    num_rows: int = 0
    #: Blocks that entered block tables.
    num_new_blocks: int = 0
    #: Sequences that entered rows, forks included.
    num_admissions: int = 0
    #: Tokens of the admitted sequences, except forks.
    num_admitted_tokens: int = 0
    #: Rows that became free.
    num_releases: int = 0
    #: Sequences that end with the step. The plan does not name them: after the result, the caller
    #: sets `num_ended` and `num_ended_tokens`.
    num_ended: int = 0
    #: Tokens of the sequences that end.
    num_ended_tokens: int = 0
    #: The share (0 to 1) of the processor's caches that prompts of earlier steps have overwritten.
    #: A cold step of a small model takes longer, because weights and KV must be read from memory.
    coldness: float = 0.0
    #: Tokens whose K and V the decoding rows read from memory; shared blocks count once.
    num_read: int = 0
    #: The sum of the lengths of the rows that the step computes, in tokens after the step.
    num_context: int = 0
    #: New blocks in the tables of rows that were live before the step.
    num_appended_blocks: int = 0
    #: For each row of a beam search among `sampled`, the number of candidates in its result.
    beams: Mapping[int, int] = NO_BEAMS


class PlannedWorkCounter:
    """Applies plans to rows of its own, and counts the work of each."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows = PlanRows(block_size)
        self._coldness = 0.0

    def reset(self) -> None:
        """Drop all rows."""
        self._rows.reset()
        self._coldness = 0.0

    def count(self, plan: StepPlan) -> PlannedWork:
        """Apply a plan and return its step's work. Every plan must be given once and in order.

        Raises AssertionError if the plan contradicts the rows. Results are not counted, so a row
        that verified drafts can't compute again.
        """
        # First, apply the plan, and count what its step computes.
        rows = self._rows
        rows.change(plan)
        step = rows.compute(plan)
        contexts = [row.num_computed for row in step.decodes]
        num_decodes, num_pairs = len(contexts), sum(contexts)
        load = StepLoad(num_decodes, num_pairs)
        for chunk in step.chunks.values():
            load = load.with_chunk(chunk.start, chunk.end - chunk.start)
            contexts.append(chunk.end)
        num_read = num_pairs - self._block_size * rows.num_common[0]
        # `num_common` also counts rows with prompts, so it may be too large for the decoding rows:
        # these read at least the tokens of one mean context.
        num_read = max(num_read, -(-num_pairs // max(1, num_decodes)))
        # Then, update the coldness for the next step.
        coldness = self._coldness
        self._coldness = coldness * _WARMING if coldness > _WARM else 0.0
        if load.num_chunk_tokens:
            self._coldness = max(_coldness_after(load.num_chunk_tokens), self._coldness)
        # Finally, count the changes.
        counts = count_changes(plan)
        return PlannedWork(
            load,
            max(contexts),
            tuple([row.number for row in step.sampling]),
            len(rows.live),
            counts.num_admitted_blocks + counts.num_appended_blocks,
            counts.num_admissions,
            counts.num_admitted_tokens,
            counts.num_releases,
            coldness=coldness,
            num_read=num_read,
            num_context=sum(contexts),
            num_appended_blocks=counts.num_appended_blocks,
            beams={
                row.number: row.admission.params.num_beam_candidates
                for row in step.sampling
                if row.admission.params.beam_width
            },
        )


def _coldness_after(num_tokens: int) -> float:
    """The coldness (see `PlannedWork`) that a step with num_tokens prompt tokens leaves."""
    return math.log1p(min(num_tokens, _MOST) / _FEW) / math.log1p(_MOST / _FEW)
