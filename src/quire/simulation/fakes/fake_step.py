"""A step of the fake runner, from its plan to its result.

Knows rows only by number; used by `fake_runner` alone.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.core.step import RowAdmission, StepPlan, TokenLogprobs
from quire.simulation.fakes.fake_model import FakeModel, Fingerprints, fake_logprobs, fake_pooled
from quire.simulation.fakes.fake_rows import Ints


@dataclass(slots=True)
class FakeStep:
    """A step whose forward pass is still to come. R: rows that compute, W: tokens written,
    S: rows that sample.

    rows, starts, ends: [R]. write_rows, write_positions: [W]. By group with slots: write_slots [W]
    and read_slots [R, longest]; by group of states: pages [R, pages of a state], read and written.
    windows: by group, how far back it is read, where that is not all the way.
    sampling, sources, salts, epochs: [S]: the row, the index into `rows` of the one whose logits
    it samples from (its own, but for a fork that joins), and the epoch of its owner, to know late
    tokens. special: (index into rows, index into sampling or -1, admission) of those that need more
    than tokens or fail. A fork that joins has the index of its source, but computes no prompt
    itself.
    masks: by row, the tokens that may be sampled for it.
    fingerprints: [R, longest], known once the tokens of the step before are.
    """

    plan: StepPlan
    rows: Ints
    starts: Ints
    ends: Ints
    write_rows: Ints
    write_positions: Ints
    sampling: Ints
    sources: Ints
    salts: Fingerprints
    epochs: Ints
    special: list[tuple[int, int, RowAdmission]]
    write_slots: dict[int, Ints] = field(default_factory=dict)
    read_slots: dict[int, Ints] = field(default_factory=dict)
    pages: dict[int, Ints] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    masks: dict[int, bytes] = field(default_factory=dict)
    fingerprints: Fingerprints | None = None
    written: Fingerprints | None = None

    @property
    def longest(self) -> int:
        """The most tokens that a row has after it."""
        return int(self.ends.max())

    def last_fingerprints(self) -> Fingerprints:
        """[S]: of all tokens of each sampling row."""
        assert self.fingerprints is not None
        return self.fingerprints[self.sources, self.ends[self.sources] - 1]

    def touched_blocks(self, block_size: int) -> npt.NDArray[np.bool_] | Ints:
        """All blocks that it reads, writes or copies, each once or more."""
        parts = [
            slots[self.in_context(group)] // block_size for group, slots in self.read_slots.items()
        ]
        parts += [pages.reshape(-1) for pages in self.pages.values()]
        copied = [block for copy in self.plan.copies for block in copy]
        return np.concatenate([*parts, np.array(copied, dtype=np.int64)])

    def in_context(self, group: int) -> npt.NDArray[np.bool_]:
        """[R, longest]: the positions that each row reads or writes in a group with slots."""
        positions = np.arange(self.longest)
        found = positions < self.ends[:, None]
        if group in self.windows:
            found &= positions > self.starts[:, None] - self.windows[group]
        return found


def logprobs_of(
    model: FakeModel, admission: RowAdmission, prefix: int, token_id: int
) -> TokenLogprobs | None:
    """What a sampled token comes with: candidates for a beam, or what its request asked for."""
    params = admission.params
    if params.beam_width:
        candidates = model.beam_candidates(prefix, params.num_beam_candidates)
        token_ids, logprobs = zip(*candidates, strict=True)
        return TokenLogprobs(token_id, logprobs[0], 1, token_ids, logprobs)
    if params.logprobs is None:
        return None
    return fake_logprobs(prefix, token_id, params.logprobs)


def prompt_logprobs_of(
    step: FakeStep, index: int, admission: RowAdmission
) -> tuple[TokenLogprobs, ...]:
    """Entries for the prompt positions that follow those computed in this step."""
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
    """What the rows get that pool and close their gap."""
    last = step.last_fingerprints()
    return {
        admission.row: fake_pooled(last[sample])
        for _, sample, admission in step.special
        if admission.params.pooling is not None and sample >= 0
    }


def failed_rows(step: FakeStep, nan_token_id: int | None) -> dict[int, str]:
    """The rows that fail alone instead of sampling."""
    return {
        admission.row: f"NaN in the logits of row {admission.row}"
        for _, sample, admission in step.special
        if nan_token_id in admission.token_ids and sample >= 0
    }
