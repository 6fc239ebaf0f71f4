"""Forces the outputs of an engine to known texts, as if its model were perfect.

The model computes logits and the sampler samples as always. Then the sampled tokens are replaced by
the tokens of the known answers, also after drafts. So a step costs what it costs, and the tokens
are those of a model that writes these texts.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from quire.sampling.host import noise
from quire.sampling.host.history import Ints
from quire.sampling.host.processors import RowMasks
from quire.sampling.host.sampler import (
    AheadSampler,
    HostStepSampler,
    PendingLogprobs,
    PendingSample,
    Rows,
    SampledNow,
)

if TYPE_CHECKING:
    from quire import LLM
    from quire.runtime.model_runner import ModelRunner


class KnownAnswers:
    """A `StepSampler` that samples, and returns the tokens of known answers instead.

    Invariant: rows whose seed has no answer keep the tokens that were sampled.
    """

    def __init__(self, sampler: HostStepSampler, num_prompt_tokens: Ints) -> None:
        """num_prompt_tokens: of each row of the runner, which changes it."""
        self.rows = sampler.rows
        self.ahead: AheadSampler | None = None if sampler.ahead is None else self
        self._sampler = sampler
        self._num_prompt_tokens = num_prompt_tokens
        #: Random stream of a seed -> the tokens of its answer.
        self._answers: dict[int, Sequence[int]] = {}

    def set_answers(self, answers: Mapping[int, Sequence[int]]) -> None:
        """Seed of a request -> the tokens of its answer, as many as it will ask for."""
        self._answers = {noise.stream(seed, 0): tokens for seed, tokens in answers.items()}

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: RowMasks | None = None
    ) -> PendingSample:
        """See `StepSampler`."""
        sampled = self._sampler.sample(logits, rows, masks).fetch()
        assert not sampled.failed, sampled.failed
        sampled.token_ids[:] = self._known(rows, np.zeros_like(rows), sampled.token_ids)
        return SampledNow(sampled)

    def sample_ahead(self, logits: torch.Tensor, rows: Rows, ahead: Rows) -> Rows:
        """See `AheadSampler`."""
        return self._known(rows, ahead, self._sampler.sample_ahead(logits, rows, ahead))

    def _known(self, rows: Rows, ahead: Rows, sampled: Rows) -> Rows:
        """The answers' tokens, or else the sampled ones."""
        places = self._sampler._history.num_tokens[rows] - self._num_prompt_tokens[rows] + ahead
        streams = self.rows.draws["stream"][rows].tolist()
        found = [
            self._answers[stream][place] if stream in self._answers else token_id
            for stream, place, token_id in zip(
                streams, places.tolist(), sampled.tolist(), strict=True
            )
        ]
        return np.array(found, np.int64)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> list[PendingLogprobs] | PendingLogprobs:
        """See `StepSampler`."""
        return self._sampler.prompt_logprobs(logits, next_token_ids, k)


def force(llm: "LLM") -> KnownAnswers:
    """Replace the sampler of an engine on the CPU by one that knows the answers."""
    runner = cast("ModelRunner", llm.engine._runner)
    sampler = cast("HostStepSampler", runner._sampler)
    known = KnownAnswers(sampler, cast("np.ndarray", runner._rows.num_prompt_tokens))
    runner._sampler = known
    return known
