"""A speculator and a drafter's sampler that know the answers, and lie about them in many ways.

Each sequence has one way: it is right now and then, right for a while and wrong from then on, one
token late, or tells another request's answer. Whatever it says, no output may change.
"""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from enum import IntEnum
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from quire.core.draft_stops import TYPICAL_PROBABILITIES, DraftStop
from quire.core.scheduling.proposals import Proposal
from quire.core.sequence import Sequence
from quire.core.step import Drafted
from quire.runtime.batch import RowBatch
from quire.sampling.host.draft_sampler import DraftSampler, SampledDrafts
from quire.sampling.host.sampler import Rows

Key: TypeAlias = tuple[tuple[int, ...], int | None, int]
"""The prompt's tokens, the seed, and the index of the branch."""

ERROR_RATE = 0.15
SPECIAL_TOKENS = (0, 1, 2)
"""Tokens that end answers or are no text are a part of the noise."""


class Way(IntEnum):
    """How a sequence's drafts differ from its answer."""

    TRUE = 0
    NOISE = 1
    WRONG_HERE_AND_THERE = 2
    RIGHT_UNTIL_A_TURN = 3
    WRONG_UNTIL_A_TURN = 4
    ONE_LATE = 5
    THE_LAST_ONE_AGAIN = 6
    OF_ANOTHER = 7


class Lie(NamedTuple):
    """The way in which a speculator errs for one sequence."""

    way: Way
    #: Number of the answer's tokens at which the way turns.
    turn: int
    #: The answer of another request.
    other: Tokens[int]


def key_of(sequence: Sequence) -> Key:
    """The key of a sequence's answer."""
    prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
    return prompt, sequence.params.seed, sequence.branch_index


class Liar:
    """A `Speculator` of the scheduler."""

    has_proposers = True

    def __init__(
        self, rng: random.Random, answers: Mapping[Key, Tokens[int]], vocab_size: int
    ) -> None:
        self._rng = rng
        self._answers = answers
        self._all = list(answers.values())
        self._vocab_size = vocab_size
        self._lies: WeakKeyDictionary[Sequence, Lie] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`."""
        rng = self._rng
        lie = self._lies.get(sequence)
        if lie is None:
            lie = Lie(rng.choice(list(Way)), rng.randrange(1, 30), rng.choice(self._all))
            self._lies[sequence] = lie
        answer = self._answers.get(key_of(sequence))
        if answer is None:  # a branch that was forked from a running one
            answer = rng.choice(self._all)
        count = min(most, rng.choice((1, 2, most, most)))
        drafts = tuple(self._drafts(lie, answer, sequence.num_output_tokens, count))
        survival = sorted((rng.random() for _ in drafts), reverse=True)
        return Proposal(drafts, tuple(survival), "liar")

    def expect(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`. Often nothing is expected, so that the known drafts are taken."""
        rng = self._rng
        survival = sorted((rng.random() for _ in range(rng.randint(0, most))), reverse=True)
        return Proposal((), tuple(survival), "drafter")

    def stop(self, sequence: Sequence) -> DraftStop:
        """See `Speculator`. Any chances, which need not fit together."""
        rng = self._rng
        chances, following = (
            tuple(rng.random() ** 0.3 for _ in TYPICAL_PROBABILITIES) for _ in range(2)
        )
        return DraftStop(chances, following)

    def learn_drafter(
        self,
        sequence: Sequence,
        ordered: Proposal,
        drafted: Drafted,
        num_verified: int,
        token_ids: Tokens[int],
    ) -> None:
        """See `Speculator`. Learns nothing."""

    def learn(self, sequence: Sequence, proposal: Proposal, num_accepted: int) -> None:
        """See `Speculator`. Learns nothing."""

    def end(self, sequence: Sequence) -> None:
        """See `Speculator`."""
        self._lies.pop(sequence, None)

    def _drafts(self, lie: Lie, answer: Tokens[int], place: int, count: int) -> list[int]:
        """At most `count` drafts of the tokens from `place` of the answer on."""
        way, turn = lie.way, lie.turn
        if way is Way.NOISE:
            return self._noise(count)
        if way is Way.ONE_LATE:
            return list(answer[place + 1 : place + 1 + count])
        if way is Way.THE_LAST_ONE_AGAIN:
            return list(answer[max(0, place - 1) : place]) * count
        if way is Way.OF_ANOTHER:
            return list(lie.other[place : place + count])
        known = list(answer[place : place + count])
        told = known + self._noise(count - len(known))  # any tokens may follow the end
        if way is Way.WRONG_HERE_AND_THERE:
            return [token ^ (self._rng.random() < ERROR_RATE) for token in told]
        if way is Way.RIGHT_UNTIL_A_TURN:
            return [token ^ (at >= turn) for at, token in enumerate(told, place)]
        if way is Way.WRONG_UNTIL_A_TURN:
            return [token ^ (at < turn) for at, token in enumerate(told, place)]
        return told

    def _noise(self, count: int) -> list[int]:
        rng = self._rng
        return [
            rng.choice((*SPECIAL_TOKENS, rng.randrange(self._vocab_size))) for _ in range(count)
        ]


class LyingSampler:
    """Stands for a drafter's sampler: where it knows a token that follows a row's tokens, it mostly
    takes that one. So drafts of random heads and models are accepted, too."""

    def __init__(
        self,
        sampler: DraftSampler,
        rows: RowBatch,
        answers: Mapping[Key, Tokens[int]],
        rng: random.Random,
    ) -> None:
        self._sampler = sampler
        self._rows = rows
        self._rng = rng
        #: All tokens of a request up to some token of an answer -> that token.
        self._next = {
            (*prompt, *answer[:place]): answer[place]
            for (prompt, _, _), answer in answers.items()
            for place in range(len(answer))
        }

    def sample(self, logits: torch.Tensor, rows: Rows, positions: Rows) -> SampledDrafts:
        """See `DraftSampler`. Probabilities are lies."""
        found = self._sampler.sample(logits, rows, positions).token_ids.copy()
        for line, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            known = self._next.get(tuple(self._rows.token_ids[row, :position].tolist()))
            if known is not None and self._rng.random() > ERROR_RATE:
                found[line] = known
        lies = np.array([self._rng.random() ** 0.3 for _ in found], np.float32)
        return SampledDrafts(found, lies)
