"""A speculator that knows the fake model's next tokens, and makes errors at random positions."""

import random
from collections.abc import Sequence as Tokens

from quire.core.draft_stops import TYPICAL_PROBABILITIES, DraftStop
from quire.core.scheduling.proposals import Proposal
from quire.core.sequence import Sequence
from quire.core.step import Drafted
from quire.engine.token_masks import GrammarConstraint
from quire.simulation.fakes.fake_model import (
    FakeModel,
    adapter_start,
    branch_salt,
    extend,
    fingerprints_of,
)

LEAST_CHANCE = 0.1


class FakeSpeculator:
    """Proposes what a running sequence will get, and at some positions another token.

    It is a `core.scheduling.proposals.Speculator`. Each call draws new random numbers.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        most: int,
        error_rate: float,
        seed: int,
    ) -> None:
        """most: the largest number of drafts. error_rate: the share of wrong drafts.

        The chances that it gives are at least LEAST_CHANCE, so that wrong drafts are verified.
        """
        self.has_proposers = True
        self._model = model
        self._most = most
        self._error_rate = error_rate
        self._rng = random.Random(f"drafts of {seed}")

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`."""
        salt = branch_salt(sequence.params.seed, sequence.branch_index)
        start = adapter_start(sequence.adapter)
        fingerprint = int(fingerprints_of(sequence.token_ids, start)[-1])
        constraint = None
        if isinstance(sequence.constraint, GrammarConstraint):
            constraint = sequence.constraint.copy(sequence.params)
        drafts: list[int] = []
        for _ in range(min(most, self._rng.randint(0, self._most))):
            mask = None if constraint is None else constraint.mask()
            token_id = self._model.next_token(fingerprint, salt, mask)
            is_wrong = self._rng.random() < self._error_rate
            drafts.append((token_id + is_wrong) % self._model.vocab_size)
            if constraint is not None and constraint.accept_token(token_id):
                break
            fingerprint = extend(fingerprint, token_id)
        chance = max(LEAST_CHANCE, 1 - self._error_rate)
        survival = [chance**count for count in range(1, len(drafts) + 1)]
        return Proposal(tuple(drafts), tuple(survival), "fake")

    def expect(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`. Sometimes nothing is expected, so that plain steps come between."""
        count = min(most, self._rng.randint(0, self._most))
        return Proposal((), (0.9,) * count, "fake drafter")

    def stop(self, sequence: Sequence) -> DraftStop:
        """See `Speculator`. Sometimes few drafts are worth their verification."""
        num_grades = len(TYPICAL_PROBABILITIES)
        return DraftStop((self._rng.random(),) * num_grades, (1.0,) * num_grades)

    def learn_drafter(
        self,
        sequence: Sequence,
        ordered: Proposal,
        drafted: Drafted,
        num_verified: int,
        token_ids: Tokens[int],
    ) -> None:
        """See `Speculator`. Checks the counts, and learns nothing."""
        num_accepted = len(token_ids) - 1
        num_drafts = min(len(ordered.survival), len(drafted.token_ids))
        assert 0 <= num_accepted <= num_verified <= num_drafts, (ordered, drafted, token_ids)

    def learn(self, sequence: Sequence, proposal: Proposal, num_accepted: int) -> None:
        """See `Speculator`. Checks the count, and learns nothing."""
        assert 0 <= num_accepted <= len(proposal.token_ids), (proposal, num_accepted)

    def end(self, sequence: Sequence) -> None:
        """See `Speculator`."""
