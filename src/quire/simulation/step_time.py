"""Draws the durations of steps on the virtual clock, and fits cost models to them."""

import random

from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample

STEP_BASE_S = 0.01
STEP_TOKEN_S = 0.0005
SLOW_FACTOR = 5.0


class StepTime:
    """Draws step durations: a base time plus a time per token; random steps are slower."""

    def __init__(
        self,
        slow_rate: float,
        seed: int,
        base_s: float = STEP_BASE_S,
        token_s: float = STEP_TOKEN_S,
    ) -> None:
        """`slow_rate` is the share of steps that take SLOW_FACTOR times as long."""
        self._base_s = base_s
        self._token_s = token_s
        self._slow_rate = slow_rate
        self._random = random.Random(f"slow steps of {seed}")

    def draw_s(self, num_tokens: int) -> float:
        """Draw the seconds of the next step, which computes num_tokens tokens."""
        seconds = self._base_s + self._token_s * num_tokens
        if self._slow_rate and self._random.random() < self._slow_rate:
            return SLOW_FACTOR * seconds
        return seconds

    def make_model(self, predicted_ratio: float = 1.0) -> StepCostModel:
        """A model fitted to samples in which prompt tokens take predicted_ratio times their true
        time."""
        samples = []
        for size in (1, 2, 4, 8, 16, 32, 64, 128):
            decodes_s = self._base_s + self._token_s * size
            samples.append(StepSample(StepLoad(size, size), decodes_s))
            chunk_s = self._base_s + self._token_s * (1 + predicted_ratio * size)
            samples.append(StepSample(StepLoad(1, 1).with_chunk(0, size), chunk_s))
        return StepCostModel.fit(samples)
