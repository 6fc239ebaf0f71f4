"""The sequences that decode one token in every step, and their rows.

Most rows of most steps belong to such sequences. So a step looks at none of them: their
counts are changed once for all (`StepCounts`), and they are listed anew only if one joined
or left. `scheduler` is the only user of `PlainSequences`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

from quire.core.request import SequenceOutput
from quire.core.scheduling.running_set import rank_of
from quire.core.sequence import Sequence
from quire.core.sequence_counts import NO_STEPS, StepCounts

# An output's fields after `num_cached_tokens` if the sequence continues, each repeated endlessly.
OTHER_FIELDS = [repeat(value) for value in SequenceOutput._field_defaults.values()][1:]

# new_output(SequenceOutput, fields) takes 65% of the time of the constructor.
new_output = tuple.__new__
OUTPUT_CLASS = repeat(SequenceOutput)


class PlainRows(NamedTuple):
    """The rows of a step whose sequences only append a token, unless it is an end token.

    Most rows of most steps are such rows, so they are kept as columns of equal length, and a result
    is applied to all of them at once. Their sequences have sampled before.
    """

    #: In ascending order, like the decoding rows of a result.
    rows: list[int]
    sequences: list[Sequence]
    #: The sequences' own lists of tokens.
    token_ids: list[list[int]]
    nums_admissions: list[int]
    end_token_ids: list[frozenset[int]]
    request_ids: list[str]
    branch_indices: list[int]
    nums_cached_tokens: list[int]
    #: The union of `end_token_ids`.
    all_end_token_ids: frozenset[int]

    def changed(self, gone: Iterable[Sequence], new: Iterable[Sequence]) -> "PlainRows":
        """A copy without the sequences in `gone`, and with those in `new`, which are running."""
        columns: list[list[Any]] = [list(column) for column in self[:-1]]
        rows, sequences, _, _, end_token_ids, *_ = columns
        for sequence in gone:
            place = sequences.index(sequence)
            for column in columns:
                del column[place]
        for sequence in new:
            row, *values = _values_of(sequence)
            place = bisect_left(rows, row)
            for column, value in zip(columns, (row, sequence, *values), strict=True):
                column.insert(place, value)
        return PlainRows._make([*columns, frozenset().union(*set(end_token_ids))])

    def outputs(self, token_ids: Tokens[Tokens[int]]) -> list[SequenceOutput]:
        """The outputs of a step that sampled these tokens."""
        changing = (self.request_ids, self.branch_indices, token_ids, self.nums_cached_tokens)
        # `repeat` has no end, so the columns differ in length.
        fields = zip(*changing, *OTHER_FIELDS, strict=False)
        return list(map(new_output, OUTPUT_CLASS, fields))


NO_PLAIN_ROWS = PlainRows([], [], [], [], [], [], [], [], frozenset())

# The values of a sequence in the columns of `PlainRows`, except for the sequence itself.
_values_of = attrgetter(
    "row",
    "token_ids",
    "num_admissions",
    "end_token_ids",
    "request_id",
    "branch_index",
    "num_cached_tokens",
)


class PlainSequences:
    """The sequences that decode a token in the coming step without a check.

    Invariant: after each plan, the members are running, and have computed fewer tokens than their
    `plain_end`. Their numbers of tokens include `counts`. `_ends` lists each under the number of
    launched steps at which it has computed `plain_end` tokens.
    """

    def __init__(self) -> None:
        self._counts = StepCounts()
        self._members: set[Sequence] = set()
        self._ends: dict[int, set[Sequence]] = {}
        #: The rows of the last step, and the sequences that joined and left since.
        self._rows = NO_PLAIN_ROWS
        self._new: set[Sequence] = set()
        self._gone: set[Sequence] = set()
        #: The sequences that would be members in the step that is planned, but may get drafts.
        self._drafting: list[Sequence] = []
        #: The tokens that the members have computed without `_counts`; None if it is not known.
        self._num_before: int | None = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """In no order."""
        return iter(self._members)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens that all members have computed."""
        num_counted = len(self._members) * self._counts.num_launched
        if self._num_before is None:
            computed = [sequence.num_computed_tokens for sequence in self._members]
            self._num_before = sum(computed) - num_counted
        return self._num_before + num_counted

    def others(self, running: list[Sequence], due: Iterable[Sequence] = ()) -> list[Sequence]:
        """Return the running sequences that are not members, and those of `due`, which are.
        `running` contains all members and is sorted by rank, and so is the result."""
        if len(running) == len(self._members):
            return sorted(due, key=rank_of)
        members = self._members.difference(due)
        return [sequence for sequence in running if sequence not in members]

    def find_others(
        self, running: list[Sequence], checks_all: bool
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Begin to plan a step. Returns the members that must be checked, for `settle`, and all
        running sequences that must be checked, by rank."""
        self.pop_changed()
        if checks_all:
            return list(self._members), list(running)
        due = self.pop_due()
        return due, self.others(running, due)

    def settle(
        self,
        due: list[Sequence],
        decoding: list[Sequence],
        chunks: dict[Sequence, int],
        *,
        may_stay: bool,
    ) -> None:
        """Let the sequences of `decoding` be members if they may stay, and those of `due` only if
        they are among them. Adds the others of `decoding` to `chunks`."""
        # Some may have lost reserved blocks, or their rows, since they were checked.
        stays = [sequence for sequence in decoding if sequence.plain_end]
        self._drafting = [] if may_stay else stays
        stays = stays if may_stay else []
        self.leave(set(due).difference(stays))
        self.renew(stays)
        self.plan_changed(chunks)
        if len(stays) != len(decoding):
            others = [sequence for sequence in decoding if sequence not in self._members]
            chunks.update(dict.fromkeys([each for each in others if each.row is not None], 1))

    def rejoin(self, chunks: dict[Sequence, int]) -> None:
        """Let the sequences that `settle` added to `chunks` because they might get drafts be
        members, since none got one."""
        stays = [sequence for sequence in self._drafting if sequence.plain_end]
        for sequence in stays:
            del chunks[sequence]
        self.renew(stays)

    def plan_changed(self, chunks: dict[Sequence, int]) -> None:
        """Add to `chunks` the running sequences that were planned as members and no longer are."""
        for sequence in self.pop_changed():
            if sequence.row is not None:
                chunks.setdefault(sequence, 1)

    def pop_due(self) -> list[Sequence]:
        """The members that have reached their `plain_end`, in no order. Each must then be in a call
        of `renew` or `leave`."""
        counts = self._counts
        ended = self._ends.get(counts.num_launched, ())
        return [
            sequence
            for sequence in ended  # some have left since, or got another end
            if sequence.counts is counts and sequence.num_computed_tokens >= sequence.plain_end
        ]

    def pop_changed(self) -> list[Sequence]:
        """Remove and return the members for which `end_plain` was called."""
        if not self._counts.has_changed:
            return []
        self._counts.has_changed = False
        changed = [sequence for sequence in self._members if not sequence.plain_end]
        self.leave(changed)
        return changed

    def renew(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences that have a new `plain_end`, if they are not members already."""
        num_launched = self._counts.num_launched
        for sequence in sequences:
            if sequence not in self._members:
                self._members.add(sequence)
                sequence.share_counts(self._counts)
                self._note(sequence, self._new, self._gone)
            end = num_launched + sequence.plain_end - sequence.num_computed_tokens
            self._ends.setdefault(end, set()).add(sequence)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Remove members, whose numbers of tokens are then their own."""
        for sequence in sequences:
            self._members.remove(sequence)
            sequence.share_counts(NO_STEPS)
            self._note(sequence, self._gone, self._new)

    def leave_all(self) -> None:
        """Remove all members."""
        self.leave(list(self._members))

    def _note(self, sequence: Sequence, now: set[Sequence], before: set[Sequence]) -> None:
        self._num_before = None
        if sequence in before:
            before.remove(sequence)
        else:
            now.add(sequence)

    def launch(self, step_id: int) -> PlainRows:
        """Count a token of each member as computed, and return the rows of all members."""
        if self._gone or self._new:
            self._rows = self._rows.changed(self._gone, self._new)
            self._gone.clear()
            self._new.clear()
        # Plans that check all sequences do not call `pop_due`.
        self._ends.pop(self._counts.num_launched, None)
        self._counts.num_launched += 1
        self._counts.last_step_id = step_id
        return self._rows

    def apply(self, rows: PlainRows) -> None:
        """Count a token of each of `rows` as confirmed and no longer pending. They are the plain
        rows of the oldest step in flight, without those that do more than append a token."""
        self._counts.num_applied += 1
        if rows is self._rows and not self._gone and not self._new:
            return
        # The members have changed since the step was launched.
        applied = set(rows.sequences)
        for sequence in self._members - applied:
            sequence.num_confirmed_tokens -= 1
            sequence.num_pending_tokens += 1
        for sequence in applied - self._members:
            sequence.num_confirmed_tokens += 1
            sequence.num_pending_tokens -= 1
