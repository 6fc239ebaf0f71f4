"""Counts tokens, and measures how long requests wait, compute their prompts and decode."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from typing import Any

from quire.core.request import PhaseTimes, SequenceOutput
from quire.core.sequence import Sequence, counted_as
from quire.observability.histogram import Histogram


class RequestTimes:
    """Durations of requests' phases: how long they wait, compute their prompts and decode.

            arrival ──queue──> first scheduled ──prefill──> first token ──decode──> end

    Queue and prefill are counted once for each request, when its first token comes: the times of
    the branch that returned the token, whose work the other branches share. Decode is counted for
    each branch. A preemption lengthens the phase in which it happens. A request that was resumed
    after a crash counts from its second arrival. An aborted request counts with the phases that it
    completed.

    Keeps histograms and counts since the engine began, in fixed memory except for one number for
    each branch that decodes. Invariant: `_first_tokens` has a request exactly while one of its
    branches has returned a token and the engine still knows the request.
    """

    def __init__(self) -> None:
        self.queue_s = Histogram()
        self.prefill_s = Histogram()
        self.decode_s = Histogram()
        self.step_s = Histogram()
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        #: Number of requests, by the reason why the cache had no more of their prompts.
        self.prefix_misses: Counter[str] = Counter()
        # Engine time of the first token, by request and branch.
        self._first_tokens: dict[str, dict[int, float]] = {}

    def on_step(self, elapsed_s: float, num_tokens: int) -> None:
        """Record a step that succeeded, took elapsed_s in all and computed num_tokens, without
        rejected drafts."""
        self.step_s.observe(elapsed_s)
        self.num_computed_tokens += num_tokens

    def on_outputs(
        self,
        outputs: list[SequenceOutput],
        places: Tokens[int],
        requests: Mapping[str, list[Sequence]],
        now_s: float,
    ) -> int:
        """Record the outputs of a step, and put `phases` into those that begin or end a sequence.
        Returns the number of their tokens.

        places: the indices of all outputs that may begin or end a branch. Each of the others has
        one token. requests: the branches of all known requests, including those that have just
        ended. now_s: engine time.
        """
        num_tokens = len(outputs) + sum([len(outputs[at].token_ids) - 1 for at in places])
        self.num_generated_tokens += num_tokens
        first_tokens = self._first_tokens
        for at in places:
            output = outputs[at]
            request_id, branch_index = output.request_id, output.branch_index
            begun, is_end = first_tokens.get(request_id), output.finish_reason is not None
            if begun is not None and branch_index in begun and not is_end:
                continue
            if not output.token_ids and output.pooled is None:
                continue
            is_first = begun is None
            if begun is None:
                begun = first_tokens[request_id] = {}
                self._begin(requests[request_id], branch_index, now_s)
            if branch_index not in begun:
                begun[branch_index] = now_s
            elif is_end:
                self.decode_s.observe(now_s - begun[branch_index])
            if is_first or is_end:
                branch = _branch(requests[request_id], branch_index)
                phases = _phases(branch, min(begun.values()), begun[branch_index], now_s)
                outputs[at] = output._replace(phases=phases)
        return num_tokens

    def first_token_s(self, request_id: str, branch_index: int) -> float | None:
        """Engine time of a branch's first token; None before it, and for forgotten requests."""
        return self._first_tokens.get(request_id, {}).get(branch_index)

    def forget(self, request_id: str) -> None:
        """Forget a request that the engine no longer knows."""
        self._first_tokens.pop(request_id, None)

    def as_dict(self) -> dict[str, Any]:
        """The histograms by name, as msgpack can hold them."""
        return {
            "queue_s": self.queue_s.as_dict(),
            "prefill_s": self.prefill_s.as_dict(),
            "decode_s": self.decode_s.as_dict(),
            "step_s": self.step_s.as_dict(),
        }

    def _begin(self, branches: list[Sequence], branch_index: int, now_s: float) -> None:
        """Count a request's first token.

        A beam search returns all of its tokens at its end, so its prefill and decoding can't be
        told apart: only its queue time is counted.
        """
        first = _branch(branches, branch_index)
        if first.miss is not None:
            self.prefix_misses[counted_as(first.miss.reason).value] += 1
        if first.first_scheduled_s is None:
            return
        self.queue_s.observe(first.first_scheduled_s - first.arrival_s)
        if not first.is_beam:
            self.prefill_s.observe(now_s - first.first_scheduled_s)


def _branch(branches: list[Sequence], branch_index: int) -> Sequence:
    """The branch with this index if it is in the list, else the first branch."""
    return next((each for each in branches if each.branch_index == branch_index), branches[0])


def _phases(
    branch: Sequence, first_token_s: float, own_first_token_s: float, now_s: float
) -> PhaseTimes | None:
    """The phases of a branch. `first_token_s` is the time of the request's first token,
    `own_first_token_s` of the branch's."""
    if branch.is_beam or branch.first_scheduled_s is None:
        return None
    # A branch that was forked has its parent's time, which may be after the request's first token.
    prefill_s = max(0.0, first_token_s - branch.first_scheduled_s)
    queue_s = branch.first_scheduled_s - branch.arrival_s
    return PhaseTimes(queue_s, prefill_s, now_s - own_first_token_s)
