"""Properties and current load of one replica of the engine, as counted by the router.

The router updates the load when it places a request, when the first token comes, and when the
request ends. Load reports from the replica would always lag by some requests.
"""

import math
from dataclasses import dataclass

from quire.core.scheduling.cost_model import StepCostModel, StepLoad

# Attention time is linear in the number of attended pairs, so any two predictions give the slope.
_MANY_PAIRS = 1_000_000

# Two speeds count as equal if their times for a short and a long prompt round to the same 4.4%
# steps.
_STEPS_PER_OCTAVE = 16
_SHORT_TOKENS, _LONG_TOKENS = 1_000, 32_000
_LEAST_S = 1e-9

# Slowness ranges from 0.5 to 8 in powers of sqrt(2), given here as exponents. There are few steps
# because a policy searches the replicas of each speed separately.
_SLOWNESS_STEPS = (-2, 6)
_OTHER_GRADE = 0.75


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """The properties of an engine that routing depends on."""

    #: Number of blocks in its pool, in blocks of the router's block_size.
    num_blocks: int
    #: Predicts the duration of the replica's steps.
    cost_model: StepCostModel
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """The time to compute a prompt (prefill), per token and per attended pair."""

    #: Seconds for each token.
    token_s: float
    #: Seconds for each pair of a token and a token that it attends to.
    pair_s: float

    @classmethod
    def of(cls, facts: ReplicaFacts) -> "PrefillSpeed":
        """The speed that the replica's cost model predicts."""
        model, size = facts.cost_model, facts.max_num_batched_tokens
        full_s = model.predict_s(StepLoad(num_chunk_tokens=size))
        pairs_s = model.predict_s(StepLoad(num_chunk_tokens=size, num_chunk_pairs=_MANY_PAIRS))
        return cls(full_s / size, (pairs_s - full_s) / _MANY_PAIRS)

    def seconds(self, num_tokens: int, num_cached_tokens: int) -> float:
        """Seconds for a prompt of `num_tokens` tokens of which the first `num_cached_tokens` are
        cached."""
        new = num_tokens - num_cached_tokens
        pairs = new * num_cached_tokens + 0.5 * new * (new + 1)
        return self.token_s * new + self.pair_s * pairs

    def slowed(self, slowness: float) -> "PrefillSpeed":
        """The speed of a replica that takes `slowness` times as long."""
        return PrefillSpeed(slowness * self.token_s, slowness * self.pair_s)

    @property
    def grade(self) -> tuple[int, int]:
        """A key that two speeds share if they count as equal."""
        short, long = [
            round(_STEPS_PER_OCTAVE * math.log2(max(_LEAST_S, self.seconds(size, 0))))
            for size in (_SHORT_TOKENS, _LONG_TOKENS)
        ]
        return short, long


def graded_slowness(measured: float, before: float) -> float:
    """Round a measured slowness to a power of the square root of 2. Returns `before`, the last
    rounded value, unless the measurement is clearly nearer to another power."""
    steps, last = 2 * math.log2(max(measured, _LEAST_S)), round(2 * math.log2(before))
    if abs(steps - last) > _OTHER_GRADE:
        last = round(steps)
    fastest, slowest = _SLOWNESS_STEPS
    return math.pow(2.0, min(slowest, max(fastest, last)) / 2)


class Replica:
    """The properties and the load of one replica. Policies read it; only `ReplicaRouter` changes
    it.

    Invariant: all counts and seconds are at least 0. `start_decoding` and `drop_prompt` subtract
    exactly what `add_request` added.
    """

    def __init__(self, name: str, index: int, facts: ReplicaFacts, speed: PrefillSpeed) -> None:
        self.name = name
        #: A small number, unique among the present replicas; bit `index` of a mask stands for the
        #: replica.
        self.index = index
        self.facts = facts
        #: Prefill speed; replicas whose speeds count as equal share one object.
        self.speed = speed
        #: Ratio of measured step times to predicted step times, rounded to a power of the square
        #: root of 2.
        self.slowness = 1.0
        #: Whether new requests may be placed here.
        self.accepts = True
        #: Number of requests that were placed here and have not ended.
        self.num_requests = 0
        #: Number of uncached tokens in prompts whose first output token has not come yet.
        self.num_uncached_tokens = 0
        #: Seconds needed to compute the uncached tokens.
        self.prefill_s = 0.0
        #: Number of sequences that are generating.
        self.num_decodes = 0
        #: Number of tokens that the generating sequences attend to.
        self.num_decode_tokens = 0
        #: Maps each request without a first token to its prefill_s, in the order of arrival.
        self._prompts: dict[str, float] = {}
        #: The time of the last sign of progress: a first token, or the arrival of a prompt when
        #: none was pending.
        self._progress_s = 0.0
        # These come from the cost model and ignore `slowness`, since only their ratios are used.
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
        """Seconds that the generating sequences add to each step."""
        return self._row_s * self.num_decodes + self._pair_s * self.num_decode_tokens

    @property
    def decode_ratio(self) -> float:
        """Seconds that the generating sequences add to each step, relative to the duration of a
        step of one sequence."""
        return self.decode_s / max(_LEAST_S, self._base_s)

    @property
    def fill(self) -> float:
        """Number of this replica's sequences divided by its max_num_seqs. Above 1, some sequences
        wait to join the batch."""
        return (self.num_decodes + len(self._prompts)) / self.facts.max_num_seqs

    @property
    def excess(self) -> float:
        """Relative excess over max_num_seqs if one more sequence is added: 0.5 for 1.5 times
        max_num_seqs sequences, 0 if there is no excess."""
        num_sequences = self.num_decodes + len(self._prompts) + 1
        return max(0.0, num_sequences / self.facts.max_num_seqs - 1.0)

    def wait_s(self, now_s: float) -> float:
        """Seconds until this replica has computed its pending prompts while other sequences
        generate.

        Assumes that the first prompt has run since the last sign of progress, but has not ended,
        because its first token has not come.
        """
        if not self._prompts:
            return 0.0
        slowdown = 1.0 + self.decode_s / max(_LEAST_S, self._step_s)
        first_s = slowdown * next(iter(self._prompts.values()))
        progress_s = min(max(0.0, now_s - self._progress_s), first_s)
        return max(0.0, slowdown * self.prefill_s - progress_s)

    # ---- updates by the router --------------------------------------------------------------

    def set_speed(self, slowness: float, speed: PrefillSpeed) -> None:
        """Set the slowness and the speed, and rescale the pending prompts."""
        change, self.slowness, self.speed = slowness / self.slowness, slowness, speed
        self._prompts = {name: change * seconds for name, seconds in self._prompts.items()}
        self.prefill_s *= change

    def add_request(
        self, request_id: str, num_uncached_tokens: int, prefill_s: float, now_s: float
    ) -> None:
        """Count a request that is placed here."""
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
        """Move a request from the pending prompts to the generating sequences. Its sequences attend
        to `num_tokens` tokens in all."""
        self._progress_s = now_s
        self._end_prompt(request_id, num_uncached_tokens)
        self.num_decodes += num_sequences
        self.num_decode_tokens += num_tokens

    def end_decoding(self, num_sequences: int, num_tokens: int) -> None:
        """Remove a request that was generating."""
        self.num_requests -= 1
        self.num_decodes -= num_sequences
        self.num_decode_tokens -= num_tokens

    def drop_prompt(self, request_id: str, num_uncached_tokens: int) -> None:
        """Remove a request that ends or moves before its first token."""
        self.num_requests -= 1
        self._end_prompt(request_id, num_uncached_tokens)

    def _end_prompt(self, request_id: str, num_uncached_tokens: int) -> None:
        prefill_s = self._prompts.pop(request_id)
        self.num_uncached_tokens -= num_uncached_tokens
        # Floats subtracted in another order than they were added may not return to exactly 0.
        self.prefill_s = max(0.0, self.prefill_s - prefill_s) if self._prompts else 0.0
