"""A proposer that knows the fake model's next tokens, and makes errors at random positions."""

import random
from collections.abc import Callable, Iterable, Sequence

from quire.core.sequence import Sequence as Branch
from quire.engine.token_masks import GrammarConstraint
from quire.simulation.fakes.fake_model import (
    FakeModel,
    adapter_start,
    branch_salt,
    extend,
    fingerprints_of,
)


class FakeProposer:
    """Proposes what a running sequence will get, and at some positions another token.

    It is a `core.scheduling.drafts.Proposer`. Each call draws new random numbers.
    """

    def __init__(
        self,
        model: FakeModel,
        running: Callable[[], Iterable[Branch]],
        *,
        most: int,
        error_rate: float,
        seed: int,
    ) -> None:
        """running: returns the running sequences, among which a call finds the one whose tokens it
        is given. most: the largest number of drafts. error_rate: the share of wrong drafts."""
        self._model = model
        self._running = running
        self._most = most
        self._error_rate = error_rate
        self._rng = random.Random(f"drafts of {seed}")

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        branch = next(each for each in self._running() if each.token_ids is token_ids)
        salt = branch_salt(branch.params.seed, branch.branch_index)
        fingerprint = int(fingerprints_of(token_ids, adapter_start(branch.adapter))[-1])
        constraint = None
        if isinstance(branch.constraint, GrammarConstraint):
            constraint = branch.constraint.copy(branch.params)
        drafts: list[int] = []
        for _ in range(min(most, self._rng.randint(0, self._most))):
            mask = None if constraint is None else constraint.mask()
            token_id = self._model.next_token(fingerprint, salt, mask)
            is_wrong = self._rng.random() < self._error_rate
            drafts.append((token_id + is_wrong) % self._model.vocab_size)
            if constraint is not None and constraint.accept_token(token_id):
                break
            fingerprint = extend(fingerprint, token_id)
        return drafts
