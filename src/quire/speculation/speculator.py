"""Chooses between the guesses of several proposers; implements `core`'s `Speculator`.

The chance that a guess is accepted depends on its proposer and grade, and on the outcomes of the
sequence's last drafts. A text that repeats an earlier text usually continues to repeat it. A text
in which drafts were rejected several times in a row is likely to reject the next ones, too.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from enum import Enum, IntEnum
from itertools import chain, takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary

from quire.core.draft_stops import TYPICAL_PROBABILITIES, DraftStop, grade_of
from quire.core.scheduling.proposals import NO_PROPOSAL, Proposal
from quire.core.sequence import Sequence
from quire.core.step import Drafted
from quire.speculation.earlier_answers import HistoryProposer
from quire.speculation.proposer import Guess, Proposer
from quire.speculation.survival import Survival

DRAFTER_CHANCE = 0.6
"""The chance that a draft of the runner's drafter is accepted if those before it are, until that
was learned."""


class DraftOf(Enum):
    """Kinds of the drafter's drafts whose chances are learned by grades of its probabilities."""

    #: A draft of the grade.
    GRADE = 0
    #: A draft behind an accepted draft of the grade.
    NEXT_GRADE = 1


class LastOutcome(IntEnum):
    """The outcome of a sequence's last drafts."""

    UNKNOWN = 0
    ALL_REJECTED = 1
    SOME_ACCEPTED = 2
    ALL_ACCEPTED = 3


MOST_DOUBLINGS = 4
"""Rejections in a row are told apart up to two to this power, less one."""


class OutcomeRecord(NamedTuple):
    """The last outcome of a sequence's drafts, and its rejections in a row."""

    last: LastOutcome = LastOutcome.UNKNOWN
    #: The number of times in a row that all drafts were rejected.
    num_rejections: int = 0

    def after(self, num_verified: int, num_accepted: int) -> "OutcomeRecord":
        """The record with one more outcome."""
        if not num_accepted:
            return OutcomeRecord(LastOutcome.ALL_REJECTED, self.num_rejections + 1)
        is_whole = num_accepted == num_verified
        return OutcomeRecord(LastOutcome.ALL_ACCEPTED if is_whole else LastOutcome.SOME_ACCEPTED)

    def kind(self) -> tuple[int, int]:
        """A key under which chances are learned. Records with 1, 2 to 3, 4 to 7, and more
        rejections in a row have different keys."""
        return self.last, min(self.num_rejections.bit_length(), MOST_DOUBLINGS)


NO_OUTCOMES = OutcomeRecord()


class BestGuess:
    """Proposes the guess of which the most tokens are expected to be accepted."""

    def __init__(self, proposers: Mapping[str, Proposer], drafter: str = "") -> None:
        """proposers: by name. Among equally good guesses, the first proposer's is taken. drafter:
        the name under which the runner's drafter is counted, if there is one."""
        self.has_proposers = bool(proposers)
        self._drafter = drafter
        self._proposers = dict(proposers)
        self._survival = Survival()
        self._outcomes: WeakKeyDictionary[Sequence, OutcomeRecord] = WeakKeyDictionary()
        #: The placeholder ids of each sequence whose prompt has contents, such as images.
        self._placeholders: WeakKeyDictionary[Sequence, frozenset[int]] = WeakKeyDictionary()

    @property
    def max_answer_bytes(self) -> int:
        """The most bytes that earlier answers take."""
        found = self._proposers.values()
        return sum(each.max_bytes for each in found if isinstance(each, HistoryProposer))

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`."""
        best, most_expected = NO_PROPOSAL, 0.0
        for name, proposer in self._proposers.items():
            guess = proposer.propose(sequence, most)
            if guess is not None and sequence.content_spans:
                guess = self._before_placeholders(sequence, guess)
            if guess is None or not guess.token_ids:
                continue
            outcome = self._outcomes.get(sequence, NO_OUTCOMES).kind()
            kind = (name, guess.grade, outcome)
            survival = self._survival.estimate(kind, len(guess.token_ids), guess.chance)
            expected = sum(survival)
            if expected > most_expected:
                most_expected = expected
                best = Proposal(tuple(guess.token_ids), survival, name, kind)
        return best

    def _before_placeholders(self, sequence: Sequence, guess: Guess) -> Guess:
        """The tokens of a guess before the first placeholder of a content. A text that continues
        like the prompt does so up to its next image, which no answer has."""
        known = self._placeholders.get(sequence)
        if known is None:
            tokens, spans = sequence.token_ids, sequence.content_spans
            found = (tokens[span.first_position : span.end] for span in spans)
            known = self._placeholders[sequence] = frozenset(chain.from_iterable(found))
        if known.isdisjoint(guess.token_ids):
            return guess
        kept = takewhile(lambda token_id: token_id not in known, guess.token_ids)
        return guess._replace(token_ids=tuple(kept))

    def expect(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`."""
        kind = (self._drafter, 0, self._outcomes.get(sequence, NO_OUTCOMES).kind())
        survival = self._survival.estimate(kind, most, DRAFTER_CHANCE)
        return Proposal((), survival, self._drafter, kind)

    def stop(self, sequence: Sequence) -> DraftStop:
        """See `Speculator`."""
        is_sampled = sequence.params.temperature > 0

        def chances(kind: DraftOf) -> tuple[float, ...]:
            estimate = self._survival.estimate
            return tuple(
                estimate((kind, grade, is_sampled), 1, probability)[0]
                for grade, probability in enumerate(TYPICAL_PROBABILITIES)
            )

        return DraftStop(chances(DraftOf.GRADE), chances(DraftOf.NEXT_GRADE))

    def learn_drafter(
        self,
        sequence: Sequence,
        ordered: Proposal,
        drafted: Drafted,
        num_verified: int,
        token_ids: Tokens[int],
    ) -> None:
        """See `Speculator`."""
        # The sampled tokens tell whether each draft is right up to the first one that is wrong,
        # also of a draft that was not verified.
        grades = [grade_of(probability) for probability in drafted.probabilities]
        is_sampled = sequence.params.temperature > 0
        for place, (draft, token_id) in enumerate(zip(drafted.token_ids, token_ids, strict=False)):
            is_right = draft == token_id
            self._survival.learn((DraftOf.GRADE, grades[place], is_sampled), 1, is_right)
            if place:
                kind = (DraftOf.NEXT_GRADE, grades[place - 1], is_sampled)
                self._survival.learn(kind, 1, is_right)
            if not is_right:
                break
        # A draft that was ordered and not accepted has brought nothing, whatever the reason is. But
        # a sequence that has ended leaves open what its next drafts had brought.
        num_accepted, num_ordered = len(token_ids) - 1, len(ordered.survival)
        if sequence.is_finished:
            num_ordered = num_accepted
        self._survival.learn(ordered.kind, num_ordered, num_accepted)
        if num_verified:
            outcomes = self._outcomes.get(sequence, NO_OUTCOMES)
            self._outcomes[sequence] = outcomes.after(num_verified, num_accepted)

    def learn(self, sequence: Sequence, proposal: Proposal, num_accepted: int) -> None:
        """See `Speculator`."""
        num_verified = len(proposal.token_ids)
        self._survival.learn(proposal.kind, num_verified, num_accepted)
        outcomes = self._outcomes.get(sequence, NO_OUTCOMES)
        self._outcomes[sequence] = outcomes.after(num_verified, num_accepted)

    def end(self, sequence: Sequence) -> None:
        """See `Speculator`."""
        self._outcomes.pop(sequence, None)
        self._placeholders.pop(sequence, None)
        for proposer in self._proposers.values():
            proposer.end(sequence)
