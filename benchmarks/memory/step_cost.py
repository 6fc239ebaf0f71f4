"""The cost of a step on a GPU on which nothing runs, and a runner of such steps."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from quire.errors import ConfigurationError
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import CountingRunner, VirtualClock

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
        """The cost of a step that computes num_tokens tokens in rows with this context, in sum."""
        return self.base_s + self.token_s * num_tokens + self.context_token_s * num_context_tokens

    def step_s(self, work: PlannedWork) -> float:
        """The cost of a planned step."""
        num_tokens = work.load.num_decodes + work.load.num_chunk_tokens
        return self.seconds(num_tokens, work.num_context)


def counting_runner(cost: StepCost, clock: VirtualClock, block_size: int) -> CountingRunner:
    """A runner without a model, which draws its tokens."""
    return CountingRunner(block_size, clock, cost.step_s, _draw_tokens())


def _draw_tokens() -> Iterator[int]:
    rng = random.Random(_SEED)
    while True:
        yield rng.randrange(VOCAB_SIZE)
