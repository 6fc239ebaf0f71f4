"""What the model runner asks of a sampler: tokens that nobody has to wait for at once.

Two kinds: `HostStepSampler` has finished when `sample` returns; `device_sampler.DeviceSampler` has
put the work in the device's queue, where the sampled tokens also stay for the next step.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.core.step import TokenLogprobs, TokenMasks
from quire.sampling.host.history import Ints, TokenHistory
from quire.sampling.host.sampler import Rows, SampledTokens, Sampler, SamplingRows


class PendingSample(Protocol):
    """What one `sample` call will have found."""

    def fetch(self) -> SampledTokens:
        """The tokens; waits for the device."""
        ...


class PendingLogprobs(Protocol):
    """What one `prompt_logprobs` call will have found."""

    def fetch(self) -> list[TokenLogprobs]:
        """One entry for each position; waits for the device."""
        ...


class StepSampler(Protocol):
    """Samples the rows of a step from their logits.

    rows: the options of all rows, which the runner sets and clears.
    """

    rows: SamplingRows

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: TokenMasks | None = None
    ) -> PendingSample:
        """One token for each of `rows`, all different, at position num_tokens[row] of the history
        that the sampler was made with.

        logits: [R, V] fp32 on the sampler's device, line i for rows[i]; overwritten.
        """
        ...

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        """Entries for the tokens that follow the positions of logits [C, V], with k best tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Found:
    """Nobody has to wait for these."""

    tokens: SampledTokens

    def fetch(self) -> SampledTokens:
        return self.tokens


@dataclass(frozen=True, slots=True)
class _FoundLogprobs:
    """Nor for these."""

    entries: list[TokenLogprobs]

    def fetch(self) -> list[TokenLogprobs]:
        return self.entries


class HostStepSampler:
    """A `Sampler` with the history that it reads. See `StepSampler`."""

    def __init__(self, sampler: Sampler, history: TokenHistory) -> None:
        self.rows = sampler.rows
        self._sampler = sampler
        self._history = history

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: TokenMasks | None = None
    ) -> PendingSample:
        return _Found(self._sampler.sample(logits, rows, self._history, masks))

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        return _FoundLogprobs(self._sampler.prompt_logprobs(logits, next_token_ids, k))
