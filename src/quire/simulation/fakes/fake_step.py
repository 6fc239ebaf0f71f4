"""A step of the fake runner, from its plan to its result.

Only `fake_runner` uses it.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.core.step import RowAdmission, StepPlan, TokenLogprobs
from quire.simulation.fakes.fake_model import FakeModel, Fingerprints, fake_logprobs, fake_pooled
from quire.simulation.fakes.fake_rows import Ints


@dataclass(slots=True)
class FakeStep:
    """A step whose forward pass has not run yet.

    In shapes, R is the number of computing rows, W of written tokens, and S of sampling rows.
    """

    plan: StepPlan
    #: Rows that compute, [R].
    rows: Ints
    #: Number of computed tokens of these rows before the step, [R].
    starts: Ints
    #: Number of computed tokens of these rows after the step, drafts included, [R].
    ends: Ints
    #: Number of drafts among the computed tokens of these rows, [R].
    num_drafts: Ints
    #: The row of each written token, [W].
    write_rows: Ints
    #: The position of each written token in its row, [W].
    write_positions: Ints
    #: Rows that sample, [S].
    sampling: Ints
    #: For each sampling row, the index in `rows` of the row whose logits it samples, [S]. This is
    #: the source row for a fork that joins, and the row itself otherwise.
    sources: Ints
    #: The `branch_salt` of each sampling row, [S].
    salts: Fingerprints
    #: The epoch of each sampling row, [S]. If the row has another epoch at the result, its token is
    #: dropped.
    epochs: Ints
    #: Rows that fail, or whose result is more than a token, such as log-probabilities. Entries are
    #: (index in `rows`, index in `sampling` or -1, admission). A fork that joins has the index of
    #: its source row, but computes no prompt.
    special: list[tuple[int, int, RowAdmission]]
    #: For each group with slots, the slot of each written token, [W].
    write_slots: dict[int, Ints] = field(default_factory=dict)
    #: For each group with slots, the slots of each row's tokens, [R, longest].
    read_slots: dict[int, Ints] = field(default_factory=dict)
    #: For each group of states, the pages that each row reads and writes, [R, pages of a state].
    pages: dict[int, Ints] = field(default_factory=dict)
    #: For each group with a window, the tokens of the window.
    windows: dict[int, int] = field(default_factory=dict)
    #: For each row with masks, a bitmask of the tokens that may be sampled at each position.
    masks: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    #: The fingerprint after each token, [R, longest]; None until the previous step's tokens are
    #: known.
    fingerprints: Fingerprints | None = None
    #: The fingerprint after each written token, [W]; None while `fingerprints` is None.
    written: Fingerprints | None = None

    @property
    def longest(self) -> int:
        """The most tokens that any row has computed after the step."""
        return int(self.ends.max())

    @property
    def num_tokens(self) -> Ints:
        """The number of tokens of each sampling row without drafts, [S]."""
        found: Ints = (self.ends - self.num_drafts)[self.sources]
        return found

    def last_fingerprints(self) -> Fingerprints:
        """The fingerprint of all tokens of each sampling row without drafts, [S]."""
        assert self.fingerprints is not None
        return self.fingerprints[self.sources, self.num_tokens - 1]

    def touched_blocks(self, block_size: int) -> npt.NDArray[np.bool_] | Ints:
        """All blocks that the step reads, writes or copies; a block may occur several times."""
        parts = [
            slots[self.in_context(group)] // block_size for group, slots in self.read_slots.items()
        ]
        parts += [pages.reshape(-1) for pages in self.pages.values()]
        copied = [block for copy in self.plan.copies for block in copy]
        return np.concatenate([*parts, np.array(copied, dtype=np.int64)])

    def in_context(self, group: int) -> npt.NDArray[np.bool_]:
        """Whether each row reads or writes each position in a group with slots, [R, longest]."""
        positions = np.arange(self.longest)
        found = positions < self.ends[:, None]
        if group in self.windows:
            found &= positions > self.starts[:, None] - self.windows[group]
        return found


def verified(
    model: FakeModel, step: FakeStep, sample: int, first_token_id: int
) -> list[tuple[int, int]]:
    """The tokens that a row with drafts samples, each with the fingerprint of the tokens before it.

    sample: the row's index in `step.sampling`. first_token_id: the token sampled at the row's last
    token.
    """
    assert step.fingerprints is not None
    row, index = int(step.sampling[sample]), int(step.sources[sample])
    drafts = next(chunk.draft_token_ids for chunk in step.plan.chunks if chunk.row == row)
    masks = step.masks.get(row)
    last = int(step.num_tokens[sample]) - 1
    found = [(int(step.fingerprints[index, last]), first_token_id)]
    for count, draft in enumerate(drafts, 1):
        if found[-1][1] != draft:
            break
        prefix = int(step.fingerprints[index, last + count])
        mask = None if masks is None else masks[count]
        found.append((prefix, model.next_token(prefix, int(step.salts[sample]), mask)))
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


def prompt_logprobs_of(
    step: FakeStep, index: int, admission: RowAdmission
) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of the prompt tokens that the step's computed positions predict."""
    count = admission.params.prompt_logprobs
    if count is None or admission.row != step.rows[index]:
        return ()
    assert step.fingerprints is not None
    start, end = int(step.starts[index]), int(step.ends[index])
    return tuple(
        fake_logprobs(
            int(step.fingerprints[index, position - 1]), admission.token_ids[position], count
        )
        for position in range(start + 1, min(end + 1, admission.num_prompt_tokens))
    )


def pooled_rows(step: FakeStep) -> dict[int, bytes]:
    """The results of pooling rows that have computed their whole prompt, by row."""
    last = step.last_fingerprints()
    return {
        admission.row: fake_pooled(last[sample])
        for _, sample, admission in step.special
        if admission.params.pooling is not None and sample >= 0
    }


def failed_rows(step: FakeStep, nan_token_id: int | None) -> dict[int, str]:
    """The errors, by row, of the rows that fail instead of sampling; other rows succeed."""
    return {
        admission.row: f"NaN in the logits of row {admission.row}"
        for _, sample, admission in step.special
        if nan_token_id in admission.token_ids and sample >= 0
    }
