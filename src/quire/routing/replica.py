"""What the router knows of one replica.

That are its engine's facts and the load that it was given. The load is counted where it is given
out, when a request is placed, when its first token comes and when it ends: what a replica reports
of itself is always some requests old.
"""

import math
from dataclasses import dataclass

from quire.core.scheduling.cost_model import StepCostModel, StepLoad

# Attention is linear in its pairs: any two points give the slope.
_MANY_PAIRS = 1_000_000

# Speeds count as equal where short and long prompts take the same in steps of 4.4%.
_STEPS_PER_OCTAVE = 16
_SHORT_TOKENS, _LONG_TOKENS = 1_000, 32_000
_LEAST_S = 1e-9

# From half to eight times as long, in half octaves: each grade of the fleet is looked at by itself.
_SLOWNESS_STEPS = (-2, 6)
_OTHER_GRADE = 0.75


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """An engine as far as routing depends on it.

    num_blocks: of its pool, in blocks of the router's block_size. cost_model: what its steps take.
    max_num_batched_tokens, max_num_seqs: as its scheduler has them.
    """

    num_blocks: int
    cost_model: StepCostModel
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """What prompts take, computed in full steps: token_s a token, pair_s for each pair of tokens of
    which one attends to the other."""

    token_s: float
    pair_s: float

    @classmethod
    def of(cls, facts: ReplicaFacts) -> "PrefillSpeed":
        """By the cost model."""
        model, size = facts.cost_model, facts.max_num_batched_tokens
        full_s = model.predict_s(StepLoad(num_chunk_tokens=size))
        pairs_s = model.predict_s(StepLoad(num_chunk_tokens=size, num_chunk_pairs=_MANY_PAIRS))
        return cls(full_s / size, (pairs_s - full_s) / _MANY_PAIRS)

    def seconds(self, num_tokens: int, num_cached_tokens: int) -> float:
        """A prompt of num_tokens of which the first are cached."""
        new = num_tokens - num_cached_tokens
        pairs = new * num_cached_tokens + 0.5 * new * (new + 1)
        return self.token_s * new + self.pair_s * pairs

    def slowed(self, slowness: float) -> "PrefillSpeed":
        """Of a replica that takes so many times as long."""
        return PrefillSpeed(slowness * self.token_s, slowness * self.pair_s)

    @property
    def grade(self) -> tuple[int, int]:
        """Equal for speeds that count as equal."""
        short, long = [
            round(_STEPS_PER_OCTAVE * math.log2(max(_LEAST_S, self.seconds(size, 0))))
            for size in (_SHORT_TOKENS, _LONG_TOKENS)
        ]
        return short, long


def graded_slowness(measured: float, before: float) -> float:
    """The power of the square root of 2 by which a replica counts that takes so many times as long
    as it said. before: as it counted; it stays so unless it is clearly another one."""
    steps, last = 2 * math.log2(max(measured, _LEAST_S)), round(2 * math.log2(before))
    if abs(steps - last) > _OTHER_GRADE:
        last = round(steps)
    fastest, slowest = _SLOWNESS_STEPS
    return math.pow(2.0, min(slowest, max(fastest, last)) / 2)


class Replica:
    """One replica's facts and load. Policies read it; `ReplicaRouter` alone changes it.

    Invariant: all counts and seconds are at least 0, and what `start_decoding` or `end` takes off
    is what `take` put on.

    index: a small number that no other replica has now; bit `index` stands for it in masks.
    speed: of its prompts; the same object for all replicas whose speeds count as equal.
    slowness: how many times as long as its cost model says its steps take; a power of the square
        root of 2.
    accepts: whether new requests may be placed here.
    num_requests: placed here and not ended. num_prompts: of them, those whose first token is yet to
        come; num_uncached_tokens: of their prompts, what no cache has; prefill_s: what that takes.
    num_decodes, num_decode_tokens: sequences that generate, and the tokens that they attend to.
    """

    def __init__(self, name: str, index: int, facts: ReplicaFacts, speed: PrefillSpeed) -> None:
        self.name = name
        self.index = index
        self.facts = facts
        self.speed = speed
        self.slowness = 1.0
        self.accepts = True
        self.num_requests = 0
        self.num_uncached_tokens = 0
        self.prefill_s = 0.0
        self.num_decodes = 0
        self.num_decode_tokens = 0
        self._prompts: dict[str, float] = {}  # request -> prefill_s, in the order of their arrival
        self._progress_s = 0.0  # when the first of them is known to have begun at the latest
        # As the cost model says, whatever `slowness` is: only their ratios are used.
        model, rows = facts.cost_model, facts.max_num_seqs
        self._step_s = PrefillSpeed.of(facts).token_s * facts.max_num_batched_tokens
        self._base_s = model.predict_s(StepLoad(1))
        self._row_s = (model.predict_s(StepLoad(rows)) - self._base_s) / max(1, rows - 1)
        many_s = model.predict_s(StepLoad(1, _MANY_PAIRS))
        self._pair_s = (many_s - self._base_s) / _MANY_PAIRS

    def __repr__(self) -> str:
        return f"Replica({self.name!r})"

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def decode_s(self) -> float:
        """What the sequences that generate here add to each step."""
        return self._row_s * self.num_decodes + self._pair_s * self.num_decode_tokens

    @property
    def decode_ratio(self) -> float:
        """How many times as long as that of a single sequence a step without prompts takes, less
        one."""
        return self.decode_s / max(_LEAST_S, self._base_s)

    @property
    def fill(self) -> float:
        """The sequences here, by how many run at once; above 1 some wait."""
        return (self.num_decodes + len(self._prompts)) / self.facts.max_num_seqs

    @property
    def excess(self) -> float:
        """By how much the sequences here are more than run at once: 0.5 for one and a half times
        as many."""
        num_sequences = self.num_decodes + len(self._prompts) + 1
        return max(0.0, num_sequences / self.facts.max_num_seqs - 1.0)

    def wait_s(self, now_s: float) -> float:
        """Until the prompts that are here are computed, beside the sequences that generate.

        The first of them is taken to go on since the last sign of progress, but not to end before
        its first token has come.
        """
        if not self._prompts:
            return 0.0
        slowdown = 1.0 + self.decode_s / max(_LEAST_S, self._step_s)
        first_s = slowdown * next(iter(self._prompts.values()))
        progress_s = min(max(0.0, now_s - self._progress_s), first_s)
        return max(0.0, slowdown * self.prefill_s - progress_s)

    # ---- what the router reports ------------------------------------------------------------

    def take_speed(self, slowness: float, speed: PrefillSpeed) -> None:
        """Steps take so many times as long as the cost model says, from now on."""
        change, self.slowness, self.speed = slowness / self.slowness, slowness, speed
        self._prompts = {name: change * seconds for name, seconds in self._prompts.items()}
        self.prefill_s *= change

    def take(
        self, request_id: str, num_uncached_tokens: int, prefill_s: float, now_s: float
    ) -> None:
        """A request was placed here."""
        if not self._prompts:
            self._progress_s = now_s
        self._prompts[request_id] = prefill_s
        self.num_requests += 1
        self.num_uncached_tokens += num_uncached_tokens
        self.prefill_s += prefill_s

    def start_decoding(
        self,
        request_id: str,
        num_uncached_tokens: int,
        num_sequences: int,
        num_tokens: int,
        now_s: float,
    ) -> None:
        """A prompt is computed, and its sequences generate, which attend to so many tokens."""
        self._progress_s = now_s
        self._end_prompt(request_id, num_uncached_tokens)
        self.num_decodes += num_sequences
        self.num_decode_tokens += num_tokens

    def end_decoding(self, num_sequences: int, num_tokens: int) -> None:
        """Sequences of a request, and the request, have ended or left."""
        self.num_requests -= 1
        self.num_decodes -= num_sequences
        self.num_decode_tokens -= num_tokens

    def drop_prompt(self, request_id: str, num_uncached_tokens: int) -> None:
        """A request has ended or left before its first token."""
        self.num_requests -= 1
        self._end_prompt(request_id, num_uncached_tokens)

    def _end_prompt(self, request_id: str, num_uncached_tokens: int) -> None:
        prefill_s = self._prompts.pop(request_id)
        self.num_uncached_tokens -= num_uncached_tokens
        # A sum of floats that is taken apart in another order does not come back to 0 by itself.
        self.prefill_s = max(0.0, self.prefill_s - prefill_s) if self._prompts else 0.0
