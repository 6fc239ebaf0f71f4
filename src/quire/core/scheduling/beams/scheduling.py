"""Beam search in the scheduler: turns the search's choices into forks.

`search` chooses; this turns its choices into forks. Each beam is a sequence of its own that
computes its next step when it can; when the last of them has reported its candidates, the next
beams are chosen. The first child of a beam continues in its parent's slot. Each further child
reuses the slot of a beam that was pruned: it replaces that beam's last blocks by references to its
parent's, and copies the partly filled one when it writes. Used by the scheduler alone.
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
    """One request's beams, best first, and what they brought in this round. leader: the first one.

    Invariant: all members have the same number of tokens; `reported` are those of them that have
    computed all of theirs and wait for the others.
    """

    search: BeamSearch
    leader: Sequence
    members: list[Sequence]
    reported: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    num_made: int = 1


class BeamOutcome(NamedTuple):
    """What came of a beam's result: outputs if the search is done, and sequences to end."""

    outputs: list[SequenceOutput]
    ended: list[Sequence]


NOTHING = BeamOutcome([], [])


class BeamScheduling:
    """All beam searches under way, by request id."""

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
        """A search that begins with the prompt of `leader`, its only beam yet."""
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
        """Whether the request's beams are still under way."""
        return request_id in self._groups

    def members_with(self, sequence: Sequence) -> list[Sequence]:
        """All beams of the search that it is part of; itself alone if it is none."""
        group = self._groups.get(sequence.request_id) if sequence.is_beam else None
        return [sequence] if group is None else list(group.members)

    def forget(self, sequence: Sequence) -> None:
        """The search that it is part of, if it is, has ended."""
        if sequence.is_beam:
            self._groups.pop(sequence.request_id, None)

    # ---- planning ---------------------------------------------------------------------------

    def has_reported(self, sequence: Sequence) -> bool:
        """Whether it waits for the other beams of its search."""
        return sequence.is_beam and sequence in self._groups[sequence.request_id].reported

    def ready_with(self, sequence: Sequence) -> list[Sequence]:
        """Those running beams of its search that decode next; the tokens of all are known."""
        return [
            beam
            for beam in self._groups[sequence.request_id].members
            if beam.state is SequenceState.RUNNING
            and not beam.num_pending_tokens
            and beam.num_tokens - beam.num_computed_tokens == 1
        ]

    def make_writable(self, sequence: Sequence, step_id: int) -> list[Sequence]:
        """Slots for one more token each of those beams of its search that compute next; returns
        them, or none where blocks are missing."""
        ready = self.ready_with(sequence)
        copy_on_write = self._memory.copy_on_write
        num_wanted = copy_on_write.num_blocks(ready)
        # For the last-ranked that runs, so that none takes from another.
        running = [beam for beam in self.members_with(sequence) if beam.row is not None]
        if not ready or not self._slots.find_blocks(num_wanted, max(running, key=rank_of)):
            return []
        for beam in ready:
            if copy_on_write.is_due(beam) or beam.num_computed_tokens >= beam.num_slots:
                self._slots.append(beam, step_id)
        return ready

    # ---- results ----------------------------------------------------------------------------

    def take_in(self, sequence: Sequence, entry: TokenLogprobs) -> BeamOutcome:
        """A beam's candidates. When all beams have brought theirs, the next ones are chosen."""
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
        """Let the next beams go on: (index of the parent, token) of each."""
        parents = [group.members[index] for index, _ in choices]
        living = set(parents)
        dying = [beam for beam in group.members if beam not in living]
        beams: list[Sequence] = []
        for parent in parents:
            if parent in living:  # its first child goes on in its place
                living.remove(parent)
                beams.append(parent)
            elif dying:
                beams.append(self._rebase(dying.pop(), parent))
            else:
                beams.append(self._fork(group, parent))
        for beam, parent, (_, token_id) in zip(beams, parents, choices, strict=True):
            # The runner took the likeliest token, in the row that a fork is copied from too.
            if beam.row is not None and reported[parent].token_id != token_id:
                place = len(beam.token_ids)
                self._builder.edit_token(beam.row, place, token_id)
            beam.token_ids.append(token_id)
        group.members = beams
        return BeamOutcome([], dying)

    def _rebase(self, dead: Sequence, parent: Sequence) -> Sequence:
        """A child of `parent` in the place of a dead beam."""
        self._memory.fork(dead, parent)
        dead.token_ids[:] = parent.token_ids
        if dead.row is not None and parent.row is not None:
            self._builder.release(dead.row)
            self._builder.fork(dead, parent, joins_step=False)
        elif dead.row is not None:
            self._running_set.preempt_alone(dead, 0)
        return dead

    def _fork(self, group: BeamGroup, parent: Sequence) -> Sequence:
        """A child of `parent` as a new sequence, with a row if there is one."""
        child = parent.branch(group.num_made, parent.params)
        child.order, child.arrival_s = parent.order, parent.arrival_s
        child.num_admissions, child.num_cached_tokens = 1, parent.num_cached_tokens
        self._policy.on_enter(child, self._memory.now_s)
        self._policy.rank_admitted(child)  # it ran with its parent; it has its rank from the first
        child.rank = (*group.leader.rank, group.num_made)
        group.num_made += 1
        self._memory.fork(child, parent)
        if parent.row is not None and self._running_set.free_rows:
            self._running_set.enter(child)
            self._builder.fork(child, parent, joins_step=False)
        else:
            self._running_set.keep(child)
        return child

    def _outputs(self, group: BeamGroup) -> list[SequenceOutput]:
        """One for each branch of the request, best first."""
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
