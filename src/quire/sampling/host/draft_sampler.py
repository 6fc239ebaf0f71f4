"""Samples a drafter's tokens with the noise that the model's sampler will use at these positions.

A draft is accepted if it equals the token that the model's logits give. With the same noise, both
choose the same token wherever their distributions agree well enough; with independent noise, a
sampled token would rarely be met. Options that change logits, and grammars, are left out.

The probability of a draft says how sure the drafter is. This probability follows from the logits
alone, at temperature 1, whatever the sampling options of the row are.
"""

from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.cpu.sampling import LOGPROB_ROW, Float32s, NativeSampling
from quire.sampling.host import choice, noise
from quire.sampling.host.sampler import NO_TOKEN, Rows, SamplingRows


class SampledDrafts(NamedTuple):
    """One draft for each of some rows."""

    #: [R]; NO_TOKEN where the logits are not usable.
    token_ids: Rows
    #: [R]: the probabilities of the drafts; any number where there is none.
    probabilities: Float32s


class DraftSampler:
    """Samples the rows of `SamplingRows` from a drafter's logits."""

    def __init__(self, rows: SamplingRows, native: NativeSampling | None = None) -> None:
        """`native` chooses tokens; if it is None, torch does."""
        self._rows = rows
        self._native = native

    def sample(self, logits: torch.Tensor, rows: Rows, positions: Rows) -> SampledDrafts:
        """One token for each of `rows` at its position, all different rows.

        `logits` [R, D] fp32 has line i for rows[i]. Its first tokens are those of the model's
        vocabulary; further ones are never chosen.
        """
        logits = logits[:, : self._rows.vocab_size]
        draws = self._rows.draws[rows]
        if self._native is not None:
            token_ids, largest = self._native.bind(draws).run(logits, positions)
            asked = np.zeros(len(rows), LOGPROB_ROW)
            asked["line"], asked["token_id"] = np.arange(len(rows)), token_ids
            logprobs = self._native.token_logprobs(logits, asked)[0][:, 0]
            return SampledDrafts(
                np.where(np.isfinite(largest), token_ids, NO_TOKEN), np.exp(logprobs)
            )
        best = choice.first_argmax(logits)
        index = torch.from_numpy(best).unsqueeze(1)
        top = logits.gather(1, index).squeeze(1)
        is_usable = np.isfinite(top.numpy())
        lines = np.flatnonzero((draws["temperature"] > 0) & is_usable)
        if len(lines):
            state, chosen = draws[lines], torch.from_numpy(lines)
            draw = choice.Draw(
                keys=noise.row_keys(state["stream"], positions[lines]),
                temperature=state["temperature"],
                log_min_p=state["log_min_p"],
                top_k=state["top_k"],
                top_p=state["top_p"],
            )
            best[lines] = choice.sample(logits[chosen], top[chosen], draw)
        of_drafts = logits.gather(1, torch.from_numpy(best).unsqueeze(1))
        shares = (of_drafts - logits.logsumexp(1, keepdim=True)).exp()
        return SampledDrafts(np.where(is_usable, best, NO_TOKEN), shares.squeeze(1).numpy())
