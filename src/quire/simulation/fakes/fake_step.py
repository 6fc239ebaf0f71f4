"""A step of the fake runner, from its plan to its result.

Only `fake_runner` uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.step import BlockCopy, RowAdmission, TokenLogprobs
from quire.simulation.fakes.fake_model import (
    FakeModel,
    Fingerprints,
    branch_salt,
    fake_logprobs,
)
from quire.simulation.plan_rows import PlanRow

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class RowStep:
    """The work of a row that computes tokens in a step, and its accesses to the KV cache."""

    row: PlanRow
    #: Number of computed tokens before the step.
    start: int
    #: Number of computed tokens after the step, drafts included.
    end: int
    #: The last of these tokens, which the step verifies.
    drafts: tuple[int, ...]
    #: At [i], the fingerprint of the row's tokens 0 to i. The sequence's own array, to which later
    #: tokens are added.
    fingerprints: Fingerprints
    #: For each group with slots, the slots of the tokens that the row reads, up to the last one
    #: that it writes.
    slots: dict[int, Ints] = field(default_factory=dict)
    #: For each group of states, the pages that the row reads and writes.
    pages: dict[int, Ints] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens after the step, without drafts."""
        return self.end - len(self.drafts)

    def written_slots(self, group: int) -> Ints:
        """The slots of the tokens that the step computes in a group with slots."""
        return self.slots[group][self.start - self.end :]


class SamplingRow(NamedTuple):
    """A row that samples in a step."""

    row: PlanRow
    #: The row from whose logits it samples: the source row for a fork that joins, and the row
    #: itself otherwise.
    source: RowStep
    #: See `RowStep`.
    fingerprints: Fingerprints


@dataclass(slots=True)
class FakeStep:
    """A step whose forward pass has not run yet."""

    step_id: int
    copies: tuple[BlockCopy, ...]
    #: The rows that compute: decoding rows by number, then the rows of chunks.
    rows: list[RowStep] = field(default_factory=list)
    sampling: list[SamplingRow] = field(default_factory=list)
    #: All blocks that the step reads, writes or copies.
    touched_blocks: set[int] = field(default_factory=set)
    #: For each row with masks, a bitmask of the tokens that may be sampled at each position.
    masks: dict[int, tuple[bytes, ...]] = field(default_factory=dict)


def sampled_tokens(
    model: FakeModel, sampler: SamplingRow, masks: Sequence[bytes] | None
) -> list[tuple[int, int]]:
    """The tokens that a row samples, each with the fingerprint of the tokens before it. A row with
    drafts samples until a token differs from its draft.

    `masks` has a bitmask of the allowed tokens for each position; None allows all.
    """
    admission, source = sampler.row.admission, sampler.source
    fingerprints, last = sampler.fingerprints, source.num_tokens - 1
    if admission.params.beam_width:
        prefix = int(fingerprints[last])
        return [(prefix, model.beam_candidates(prefix, 1)[0][0])]
    salt = branch_salt(admission.params.seed, admission.branch_index)
    found: list[tuple[int, int]] = []
    for count in range(1 + len(source.drafts)):
        prefix = int(fingerprints[last + count])
        mask = None if masks is None else masks[count]
        found.append((prefix, model.next_token(prefix, salt, mask)))
        if count < len(source.drafts) and found[-1][1] != source.drafts[count]:
            break
    return found


def logprobs_of(
    model: FakeModel, admission: RowAdmission, sampled: list[tuple[int, int]]
) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities at a row's sampled tokens: of a beam's candidates, or of as many tokens
    as the request asks for. Empty if the request asks for none.

    `sampled` has the tokens with the fingerprints before them.
    """
    params = admission.params
    if params.beam_width:
        ((prefix, token_id),) = sampled
        candidates = model.beam_candidates(prefix, params.num_beam_candidates)
        token_ids, logprobs = zip(*candidates, strict=True)
        return (TokenLogprobs(token_id, logprobs[0], 1, token_ids, logprobs),)
    if params.logprobs is None:
        return ()
    return tuple(fake_logprobs(prefix, token_id, params.logprobs) for prefix, token_id in sampled)


def prompt_logprobs_of(step: RowStep) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of the prompt tokens that a row's computed positions predict. Empty if
    the request asks for none."""
    admission = step.row.admission
    count = admission.params.prompt_logprobs
    if count is None:
        return ()
    return tuple(
        fake_logprobs(int(step.fingerprints[position - 1]), admission.token_ids[position], count)
        for position in range(step.start + 1, min(step.end + 1, admission.num_prompt_tokens))
    )
