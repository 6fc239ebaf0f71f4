"""Beam search in the scheduler: carries out the search's choices by forking sequences.

Each beam is a sequence that computes its next step when it can. When the last beam has reported its
candidates, `search` chooses the next beams. The first child of a beam continues in its parent's
sequence. Each further child reuses the sequence of a pruned beam: it replaces the pruned beam's
last blocks by references to its parent's blocks, and copies the partly filled block before it
writes to it. Only the scheduler uses this file.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.request import SequenceOutput
from quire.core.scheduling.beams.search import BeamSearch
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.policy import Policy
from quire.core.scheduling.running_set import AppendSlots, RunningSet, rank_of
from quire.core.scheduling.step_results import failure
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import TokenLogprobs


@dataclass(slots=True)
class BeamGroup:
    """One request's beams, best first, and the candidates that they have reported for the next
    token.

    Invariant: all members have the same number of tokens. `reported` holds the members that have
    computed all their tokens and wait for the others.
    """

    search: BeamSearch
    #: The search's first beam.
    leader: Sequence
    members: list[Sequence]
    #: Candidates of each member that has reported, with the token that the runner took.
    reported: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    #: Number of beams made since the start, which is the branch_index of the next new beam.
    num_made: int = 1


class BeamOutcome(NamedTuple):
    """Outputs to return and sequences to end after a beam has reported."""

    #: The outputs of the search, if it is done; else empty.
    outputs: list[SequenceOutput]
    #: Sequences to end.
    ended: list[Sequence]


NOTHING = BeamOutcome([], [])


class BeamScheduling:
    """All running beam searches, by request id."""

    def __init__(
        self,
        policy: Policy,
        memory: KVCacheManager,
        running_set: RunningSet,
        slots: AppendSlots,
        builder: PlanBuilder,
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._running_set = running_set
        self._slots = slots
        self._builder = builder
        self._groups: dict[str, BeamGroup] = {}

    def start(self, leader: Sequence) -> None:
        """Start a search with `leader`, which computes the prompt, as its only beam."""
        params = leader.params
        search = BeamSearch(
            params.beam_width,
            params.length_penalty,
            num_prompt_tokens=leader.num_prompt_tokens,
            max_num_tokens=leader.max_num_tokens,
            end_token_ids=params.end_token_ids,
            stop_token_ids=params.stop_token_ids,
        )
        self._groups[leader.request_id] = BeamGroup(search, leader, [leader])

    def is_searching(self, request_id: str) -> bool:
        """Whether the request's beam search is still running."""
        return request_id in self._groups

    def members_with(self, sequence: Sequence) -> list[Sequence]:
        """All beams of a beam's search; for a sequence that is no beam, only that sequence."""
        group = self._groups.get(sequence.request_id) if sequence.is_beam else None
        return [sequence] if group is None else list(group.members)

    def forget(self, sequence: Sequence) -> None:
        """Forget the search of a beam, because it has ended; other sequences are ignored."""
        if sequence.is_beam:
            self._groups.pop(sequence.request_id, None)

    # ---- planning ---------------------------------------------------------------------------

    def has_reported(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for the other beams of its search."""
        return sequence.is_beam and sequence in self._groups[sequence.request_id].reported

    def ready_with(self, sequence: Sequence) -> list[Sequence]:
        """The running beams of a sequence's search that decode next and whose tokens are all
        known."""
        return [
            beam
            for beam in self._groups[sequence.request_id].members
            if beam.state is SequenceState.RUNNING
            and not beam.num_pending_tokens
            and beam.num_tokens - beam.num_computed_tokens == 1
        ]

    def make_writable(self, sequence: Sequence, step_id: int) -> list[Sequence]:
        """Get slots for one more token for all beams of a sequence's search that compute next.

        Returns these beams, or none if blocks are missing.
        """
        ready = self.ready_with(sequence)
        copy_on_write = self._memory.copy_on_write
        num_wanted = copy_on_write.num_blocks(ready)
        # Take blocks on behalf of the last-ranked beam, so that no beam takes from another.
        running = [beam for beam in self.members_with(sequence) if beam.row is not None]
        if not ready or not self._slots.find_blocks(num_wanted, max(running, key=rank_of)):
            return []
        for beam in ready:
            if copy_on_write.is_due(beam) or beam.num_computed_tokens >= beam.num_slots:
                self._slots.append(beam, step_id)
        return ready

    # ---- results ----------------------------------------------------------------------------

    def add_candidates(self, sequence: Sequence, entry: TokenLogprobs) -> BeamOutcome:
        """Record a beam's candidates; when all beams have reported, choose the next beams."""
        group = self._groups[sequence.request_id]
        group.reported[sequence] = entry
        if len(group.reported) < len(group.members):
            return NOTHING
        reported, group.reported = group.reported, {}
        entries = [reported[member] for member in group.members]
        choices = group.search.advance(
            [list(zip(entry.top_token_ids, entry.top_logprobs, strict=True)) for entry in entries]
        )
        if not choices:
            return BeamOutcome(self._outputs(group), list(group.members))
        return self._continue(
            group, [(choice.parent, choice.token_id) for choice in choices], reported
        )

    def _continue(
        self,
        group: BeamGroup,
        choices: list[tuple[int, int]],
        reported: dict[Sequence, TokenLogprobs],
    ) -> BeamOutcome:
        """Make the next beams: (index of the parent, token) for each."""
        parents = [group.members[index] for index, _ in choices]
        living = set(parents)
        dying = [beam for beam in group.members if beam not in living]
        beams: list[Sequence] = []
        for parent in parents:
            if parent in living:  # the first child continues in its parent's place
                living.remove(parent)
                beams.append(parent)
            elif dying:
                beams.append(self._change_parent(dying.pop(), parent))
            else:
                beams.append(self._fork(group, parent))
        for beam, parent, (_, token_id) in zip(beams, parents, choices, strict=True):
            # The runner appended the likeliest token to the row, and to rows copied from it.
            if beam.row is not None and reported[parent].token_id != token_id:
                place = len(beam.token_ids)
                self._builder.edit_token(beam.row, place, token_id)
            beam.token_ids.append(token_id)
        group.members = beams
        return BeamOutcome([], dying)

    def _change_parent(self, dead: Sequence, parent: Sequence) -> Sequence:
        """Turn a pruned beam into a child of `parent`."""
        self._memory.fork(dead, parent)
        dead.token_ids[:] = parent.token_ids
        if dead.row is not None and parent.row is not None:
            self._builder.release(dead.row)
            self._builder.fork(dead, parent, joins_step=False)
        elif dead.row is not None:
            self._running_set.preempt_alone(dead, 0)
        return dead

    def _fork(self, group: BeamGroup, parent: Sequence) -> Sequence:
        """Make a child of `parent` as a new sequence, with a row if one is free."""
        child = parent.branch(group.num_made, parent.params)
        self._running_set.add_demand(child)
        child.order, child.arrival_s = parent.order, parent.arrival_s
        child.num_admissions, child.num_cached_tokens = 1, parent.num_cached_tokens
        self._policy.on_enter(child, self._memory.now_s)
        self._policy.rank_admitted(child)  # admitted with its parent; the group's rank is kept
        child.rank = (*group.leader.rank, group.num_made)
        group.num_made += 1
        self._memory.fork(child, parent)
        if parent.row is not None and self._running_set.free_rows:
            self._running_set.assign_row(child)
            self._builder.fork(child, parent, joins_step=False)
        else:
            self._running_set.add_preempted(child)
        return child

    def _outputs(self, group: BeamGroup) -> list[SequenceOutput]:
        """One output for each branch of the request, best first."""
        leader = group.leader
        outputs = [
            SequenceOutput(
                leader.request_id,
                index,
                hypothesis.token_ids,
                leader.num_cached_tokens,
                hypothesis.finish_reason,
                hypothesis.stop_reason,
                cumulative_logprob=hypothesis.cumulative_logprob,
            )
            for index, hypothesis in enumerate(group.search.hypotheses())
        ]
        num_lacking = leader.params.beam_width - len(outputs)
        message = f"there are only {len(outputs)} different continuations"
        return outputs + [
            failure(leader, message, len(outputs) + index) for index in range(num_lacking)
        ]
