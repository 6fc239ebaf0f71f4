"""Beam search over token chains: which continuations live on, and which have ended.

Pure bookkeeping for one request: it gets each live beam's best continuations and returns the beams
that follow. It uses no model, blocks or rows; `scheduling` calls it.

The search equals that of transformers 5 (`generate(num_beams=k, do_sample=False,
early_stopping=False)`), down to the rounding of scores to fp32:

    score of a live beam     sum of its log-probabilities
    score of a hypothesis    that sum, end token included, / num_generated_tokens ** length_penalty
    a continuation ends      with an end token, or at the length limit
    it becomes a hypothesis  if it is among the beam_width best continuations of the step
    live beams               the beam_width best continuations that do not end
    done                     at the length limit; or when beam_width hypotheses exist, none of them
                             worse than the best live beam would be if it ended now

Ties, which transformers leaves to `torch.topk`, go to the earlier hypothesis, to the better-placed
beam, and to the candidate named first.
"""

import ctypes
import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Optional

from quire.core.request import FinishReason

Candidate = tuple[int, float]
"""A continuation of a beam by one token: token id, log-probability."""

_IMPOSSIBLE = float("-inf")


class BeamStep(NamedTuple):
    """A live beam: beam `parent` of the previous step, continued by token_id."""

    parent: int
    token_id: int
    #: Sum over all tokens generated so far.
    cumulative_logprob: float


class Hypothesis(NamedTuple):
    """A continuation of the prompt that has ended."""

    #: The generated tokens, including the end or stop token.
    token_ids: tuple[int, ...]
    #: cumulative_logprob / len(token_ids) ** length_penalty.
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason
    #: The client's stop token that ended it; None for an end token and for LENGTH.
    stop_reason: int | None


class _Node(NamedTuple):
    """The last token of a chain, linked to the tokens before it, so that beams share their past."""

    before: Optional["_Node"]
    token_id: int


class _Beam(NamedTuple):
    node: _Node | None
    cumulative_logprob: float


class _Ended(NamedTuple):
    score: float
    cumulative_logprob: float
    node: _Node


class BeamSearch:
    """The live beams and the best hypotheses of one request.

    Invariant: there are at most beam_width hypotheses, best first, and at most beam_width live
    beams, best first and of equal length. No beam is live if and only if the search is done.
    """

    def __init__(
        self,
        beam_width: int,
        length_penalty: float,
        *,
        num_prompt_tokens: int,
        max_num_tokens: int,
        end_token_ids: Collection[int] = (),
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """max_num_tokens: most tokens of a chain, its prompt included; above num_prompt_tokens."""
        assert beam_width >= 1, f"beam_width is {beam_width}"
        assert max_num_tokens > num_prompt_tokens, (
            f"{max_num_tokens} tokens leave no room after a prompt of {num_prompt_tokens}"
        )
        self._beam_width = beam_width
        self._length_penalty = length_penalty
        self._num_left = max_num_tokens - num_prompt_tokens
        self._num_generated = 0
        self._end_token_ids = frozenset(end_token_ids)
        self._stop_token_ids = frozenset(stop_token_ids) - self._end_token_ids
        self._live = [_Beam(None, 0.0)]
        self._ended: list[_Ended] = []

    @property
    def num_live(self) -> int:
        """Number of beams whose continuations `advance` wants next: one at first, none when
        done."""
        return len(self._live)

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[BeamStep]:
        """Return the beams that live on, best first; none when the search is done.

        candidates: the continuations of each live beam, best first: all of them, or at least
        beam_width plus one for each end and stop token. A continuation with log-probability -inf is
        ignored. Fewer than beam_width beams follow only if there are fewer continuations.
        """
        assert len(candidates) == self.num_live, (
            f"continuations of {len(candidates)} beams, but {self.num_live} live"
        )
        self._num_generated += 1
        self._num_left -= 1
        steps = self._choose(candidates)
        if not self._may_improve(steps):
            steps = []
        self._live = [self._continued(step) for step in steps]
        return steps

    def hypotheses(self) -> list[Hypothesis]:
        """The hypotheses so far, best first: the result once the search is done.

        There are beam_width hypotheses in the result, unless fewer continuations exist.
        """
        return [self._hypothesis(ended) for ended in self._ended]

    def _choose(self, candidates: Sequence[Sequence[Candidate]]) -> list[BeamStep]:
        """The best continuations that do not end; ended continuations become hypotheses if good
        enough."""
        ends_here = self._end_token_ids | self._stop_token_ids
        living: list[BeamStep] = []
        for place, (negative_sum, parent, token_id) in enumerate(self._best_first(candidates)):
            step = BeamStep(parent, token_id, -negative_sum)
            if self._num_left == 0 or token_id in ends_here:
                if place < self._beam_width:
                    self._end(step)
            else:
                living.append(step)
            if len(living) == self._beam_width or (
                self._num_left == 0 and place + 1 == self._beam_width
            ):
                break
        return living

    def _best_first(
        self, candidates: Sequence[Sequence[Candidate]]
    ) -> Iterator[tuple[float, int, int]]:
        """Yield all continuations in order, as (-sum of log-probabilities, beam, token id)."""

        def of_beam(index: int) -> Iterator[tuple[float, int, int]]:
            so_far = self._live[index].cumulative_logprob
            for token_id, logprob in candidates[index]:
                if logprob > _IMPOSSIBLE:
                    yield -_to_fp32(so_far + logprob), index, token_id

        return heapq.merge(*(of_beam(index) for index in range(len(candidates))))

    def _end(self, step: BeamStep) -> None:
        node = _Node(self._live[step.parent].node, step.token_id)
        score = self._score(step.cumulative_logprob)
        self._ended.append(_Ended(score, step.cumulative_logprob, node))
        self._ended.sort(key=lambda ended: -ended.score)  # stable: of equal ones the earlier leads
        del self._ended[self._beam_width :]

    def _may_improve(self, steps: Sequence[BeamStep]) -> bool:
        """Whether the best live beam, if it ended now, would enter the hypotheses."""
        if not steps:
            return False
        if len(self._ended) < self._beam_width:
            return True
        return self._score(steps[0].cumulative_logprob) > self._ended[-1].score

    def _score(self, cumulative_logprob: float) -> float:
        """The score of a chain of the present length with this sum."""
        return hypothesis_score(cumulative_logprob, self._num_generated, self._length_penalty)

    def _continued(self, step: BeamStep) -> _Beam:
        node = _Node(self._live[step.parent].node, step.token_id)
        return _Beam(node, step.cumulative_logprob)

    def _hypothesis(self, ended: _Ended) -> Hypothesis:
        last = ended.node.token_id
        stop_reason = last if last in self._stop_token_ids else None
        stopped = stop_reason is not None or last in self._end_token_ids
        return Hypothesis(
            _chain(ended.node),
            ended.score,
            ended.cumulative_logprob,
            FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_reason,
        )


def hypothesis_score(
    cumulative_logprob: float, num_generated_tokens: int, length_penalty: float
) -> float:
    """The score that ranks hypotheses; higher is better."""
    return _to_fp32(cumulative_logprob / _to_fp32(float(num_generated_tokens) ** length_penalty))


def _to_fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _chain(node: _Node | None) -> tuple[int, ...]:
    tokens = []
    while node is not None:
        tokens.append(node.token_id)
        node = node.before
    return tuple(reversed(tokens))
