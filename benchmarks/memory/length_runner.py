"""A runner without a model: counts a step's cost, draws tokens.

It keeps only how long each row is, believes every plan (the simulation is what checks plans) and
has no probabilities, hence no beams. So hours of serving pass in seconds, under the real scheduler
and memory. Used by `study`.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from quire.core.step import StepPlan, StepResult, TokenMasks
from quire.errors import ConfigurationError

VOCAB_SIZE = 50_272  # of OPT
_SEED = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long a step takes: base_s, token_s for each token that it computes, and context_token_s
    for each token in the contexts of the rows that compute.

    The defaults are twice the floors of OPT-13B in half precision on an A100 of 40 GB, that is half
    of the peak bandwidth (1,555 GB/s) and half of the peak arithmetic (312 TFLOP/s): 26 GB of
    weights read once a step, 26 GFLOP a token, 819,200 bytes of keys and values read for each token
    of context (40 layers of 5,120, K and V). A batch of 30 then takes 50 ms a token; the published
    30.4 running requests at 2 requests/s mean 45 ms, by Little's law.
    """

    base_s: float = 0.0334
    token_s: float = 0.000167
    context_token_s: float = 1.05e-6

    def __post_init__(self) -> None:
        """Raises ConfigurationError that names the option."""
        for name in ("base_s", "token_s", "context_token_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be at least 0")
        if self.base_s == 0 and self.token_s == 0:
            raise ConfigurationError("base_s and token_s are 0: no step would take any time")

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Of a step that computes num_tokens tokens in rows of so much context together."""
        return self.base_s + self.token_s * num_tokens + self.context_token_s * num_context_tokens


class VirtualClock:
    """A time in seconds from 0, which only its methods move."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def wait_until(self, at_s: float) -> None:
        """Jump forward; never back."""
        self._now_s = max(self._now_s, at_s)


@dataclass(slots=True)
class _Lengths:
    num_tokens: int
    num_computed: int


class LengthRunner:
    """See the module's text. Implements `core.step.Runner`."""

    def __init__(self, cost: StepCost, clock: VirtualClock) -> None:
        self._cost = cost
        self._clock = clock
        self._rows: dict[int, _Lengths] = {}
        self._executed: tuple[int, list[int]] | None = None
        self._results: deque[StepResult] = deque()
        self._tokens = np.random.default_rng(_SEED)

    def execute(self, plan: StepPlan) -> None:
        joins_only = all(fork.joins_step for fork in plan.forks)
        assert joins_only and not plan.token_edits, "beams need a model"
        for row in plan.release:
            del self._rows[row]
        for admission in plan.admit:
            num_tokens, num_computed = len(admission.token_ids), admission.num_computed_tokens
            self._rows[admission.row] = _Lengths(num_tokens, num_computed)
        chunks = dict(plan.chunks)
        sampling: list[int] = []
        num_context = 0
        for row, lengths in self._rows.items():
            num_new_tokens = chunks.get(row, 1)
            if num_new_tokens:
                lengths.num_computed += num_new_tokens
                num_context += lengths.num_computed
                if lengths.num_computed == lengths.num_tokens:
                    lengths.num_tokens += 1
                    sampling.append(row)
        for fork in plan.forks:
            source = self._rows[fork.source_row]
            self._rows[fork.row] = _Lengths(source.num_tokens, source.num_computed)
            sampling.append(fork.row)
        self._executed = plan.step_id, sampling
        self._clock.advance(self._cost.seconds(plan.num_tokens, num_context))

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert self._executed is not None, "sample before execute"
        step_id, rows = self._executed
        self._executed = None
        drawn = self._tokens.integers(0, VOCAB_SIZE, len(rows)).tolist()
        self._results.append(StepResult(step_id, rows, [(token,) for token in drawn]))

    def result(self) -> StepResult:
        return self._results.popleft()

    def reset(self) -> None:
        self._rows.clear()
        self._results.clear()
        self._executed = None
