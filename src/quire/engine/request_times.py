"""How long requests wait, compute their prompts and decode; what the steps cost in between.

    arrival ──queue──> first scheduled ──prefill──> first token ──decode──> end

Queue and prefill are a request's, counted once with its first token: those of the branch that
brought it, while the others share its work. Decode is each branch's own. A preemption lengthens the
part that it falls into. A request that was resumed after a crash counts as one that arrived then.
Whatever is aborted counts with what it had reached.

Pure bookkeeping in fixed memory, but for one number per branch that decodes: no clock of its own,
no locks. Called by `engine.engine`, told by `engine.stats`.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from quire.core.memory.prefix_miss import counted_as
from quire.core.request import SequenceOutput
from quire.core.sequence import Sequence
from quire.observability.histogram import Histogram


class RequestTimes:
    """Durations in buckets, and counts, since the engine began.

    Invariant: `_first_tokens` has a request exactly while some branch of it has brought a token and
    the engine still knows the request.
    """

    def __init__(self) -> None:
        self.queue_s = Histogram()
        self.prefill_s = Histogram()
        self.decode_s = Histogram()
        self.step_s = Histogram()
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        self.prefix_misses: Counter[str] = Counter()
        self._first_tokens: dict[str, dict[int, float]] = {}  # request -> branch -> when

    def on_step(self, elapsed_s: float, num_tokens: int) -> None:
        """A step that succeeded: how long it took in all, how many tokens it computed."""
        self.step_s.observe(elapsed_s)
        self.num_computed_tokens += num_tokens

    def on_outputs(
        self,
        outputs: SequenceOf[SequenceOutput],
        requests: Mapping[str, SequenceOf[Sequence]],
        now_s: float,
    ) -> None:
        """What a step brought. requests: the branches of all that the engine knows, those that have
        just ended included. now_s: on the clock by which they arrived."""
        for output in outputs:
            num_tokens = len(output.token_ids)
            if not num_tokens:
                continue
            self.num_generated_tokens += num_tokens
            request_id, branch_index = output.request_id, output.branch_index
            begun = self._first_tokens.get(request_id)
            if begun is None:
                begun = self._first_tokens[request_id] = {}
                self._begin(requests[request_id], branch_index, now_s)
            if branch_index not in begun:
                begun[branch_index] = now_s
            elif output.finish_reason is not None:
                self.decode_s.observe(now_s - begun[branch_index])

    def forget(self, request_id: str) -> None:
        """The engine knows the request no longer."""
        self._first_tokens.pop(request_id, None)

    def as_dict(self) -> dict[str, Any]:
        """The histograms by name, as msgpack can hold them."""
        return {
            "queue_s": self.queue_s.as_dict(),
            "prefill_s": self.prefill_s.as_dict(),
            "decode_s": self.decode_s.as_dict(),
            "step_s": self.step_s.as_dict(),
        }

    def _begin(self, branches: SequenceOf[Sequence], branch_index: int, now_s: float) -> None:
        """A request's first token. A beam search brings all of its tokens with its end, so what was
        prefill and what was decoding can't be told apart: it counts in the queue only."""
        first = next((one for one in branches if one.branch_index == branch_index), branches[0])
        if first.miss is not None:
            self.prefix_misses[counted_as(first.miss.reason).value] += 1
        if first.first_scheduled_s is None:
            return
        self.queue_s.observe(first.first_scheduled_s - first.arrival_s)
        if not first.is_beam:
            self.prefill_s.observe(now_s - first.first_scheduled_s)
