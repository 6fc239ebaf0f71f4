"""Lists the drafts that decoding rows could get.

Called by `drafts`, which chooses among them.
"""

from typing import NamedTuple

from quire.core.scheduling.draft_lengths import Catching, DraftCandidate
from quire.core.scheduling.model_drafts import ModelDrafts
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.proposals import Proposal
from quire.core.sequence import Sequence


class DraftOption(NamedTuple):
    """Drafts that a row could get."""

    sequence: Sequence
    #: Without tokens, if the drafter would make the drafts.
    proposal: Proposal
    #: None if the drafts are known.
    catching: Catching | None


class DraftingRow(NamedTuple):
    """A decoding row that may have drafts."""

    sequence: Sequence
    #: The guess of a proposer; NO_PROPOSAL if there is none.
    known: Proposal
    #: The chances of the drafter's drafts; NO_PROPOSAL if it can't draft for the row.
    expected: Proposal


def with_drafter(
    model: ModelDrafts, rows: list[DraftingRow], budget: StepBudget
) -> list[DraftOption]:
    """The better drafts for each row: known ones, or those of the drafter."""
    found: list[DraftOption] = []
    num_rows = sum([bool(row.expected.survival) for row in rows])
    num_left = model.most_catch_up(budget)
    for sequence, known, expected in rows:
        num_known = sum(known.survival)
        gain = model.net_tokens(expected, budget, num_rows) if expected.survival else 0.0
        if gain > num_known and num_left > 0:
            catching = model.catching(sequence, expected, num_left)
            num_left -= catching.num_now
            found.append(DraftOption(sequence, expected, catching))
        elif known.token_ids:
            found.append(DraftOption(sequence, known, None))
    return found


def with_room(
    model: ModelDrafts, options: list[DraftOption], lengths: list[int], budget: StepBudget
) -> list[int]:
    """The lengths, with the drafter's raised to the longest that the step's limit allows: a drafter
    that is sure of its drafts continues for longer than expected."""
    chosen = [
        (length, len(option.proposal.survival))
        for option, length in zip(options, lengths, strict=True)
        if option.catching is not None and length
    ]
    if not chosen:
        return lengths
    longest, most = (max(numbers) for numbers in zip(*chosen, strict=True))
    longest = model.most_places(budget, longest, most, len(chosen))
    return [
        max(length, min(longest, len(option.proposal.survival)))
        if option.catching is not None and length
        else length
        for option, length in zip(options, lengths, strict=True)
    ]


def candidates_of(options: list[DraftOption], has_states: bool) -> list[DraftCandidate]:
    """The options as `choose_lengths` reads them.

    `has_states` says whether accepted drafts are computed again.
    """
    return [
        DraftCandidate(sequence.num_tokens - 1, proposal.survival, catching, has_states)
        for sequence, proposal, catching in options
    ]


def cut(proposal: Proposal, count: int) -> Proposal:
    """The proposal's first `count` tokens."""
    if count == len(proposal.survival):
        return proposal
    return proposal._replace(
        token_ids=proposal.token_ids[:count], survival=proposal.survival[:count]
    )


def num_useful(sequence: Sequence, drafts: tuple[int, ...]) -> int:
    """The number of leading drafts that do not end the sequence and that its grammar allows.

    A token that ends the sequence is sampled after the draft before it, and verifies no more.
    """
    ends = sequence.end_token_ids
    count = next((at for at, token_id in enumerate(drafts) if token_id in ends), len(drafts))
    if sequence.constraint is not None:
        count = sequence.constraint.allowed_prefix(drafts[:count])
    return count
