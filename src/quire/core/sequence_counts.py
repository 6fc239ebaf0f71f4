"""The counts of a sequence's tokens that every step changes.

Sequences that decode in every step share a part of these counts, so that a step changes a few
numbers and not those of each sequence. `sequence.Sequence` has the counts, and
`scheduling.plain_rows` shares them.
"""


class StepCounts:
    """The steps in which many sequences decode a token each, counted once for all of them."""

    __slots__ = ("has_changed", "last_step_id", "num_applied", "num_launched")

    def __init__(self) -> None:
        #: Number of steps that were launched.
        self.num_launched = 0
        #: Number of steps whose results were applied.
        self.num_applied = 0
        #: Id of the last step that was launched; -1 before the first.
        self.last_step_id = -1
        #: Whether `end_plain` was called for one of the sequences.
        self.has_changed = False


# Stands for shared counts in sequences without any. It never changes.
NO_STEPS = StepCounts()


class SequenceCounts:
    """The counts of one sequence, each the sum of its own number and a shared one.

    The numbers that its properties return and take are the sums.
    """

    __slots__ = (
        "_last_step_id",
        "_num_computed_tokens",
        "_num_confirmed_tokens",
        "_num_pending_tokens",
        "counts",
        "plain_end",
    )

    counts: StepCounts
    plain_end: int

    @property
    def last_step_id(self) -> int:
        """Id of the last step that computes for it; -1 before the first."""
        return max(self._last_step_id, self.counts.last_step_id)

    @last_step_id.setter
    def last_step_id(self, step_id: int) -> None:
        self._last_step_id = step_id

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose K and V are written once the steps in flight have ended."""
        return self._num_computed_tokens + self.counts.num_launched

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self._num_computed_tokens = count - self.counts.num_launched

    @property
    def num_confirmed_tokens(self) -> int:
        """Number of leading tokens that are confirmed, and whose K and V are written by steps that
        have ended. Only their blocks are published, stored in tiers, or passed by windows."""
        return self._num_confirmed_tokens + self.counts.num_applied

    @num_confirmed_tokens.setter
    def num_confirmed_tokens(self, count: int) -> None:
        self._num_confirmed_tokens = count - self.counts.num_applied

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that the steps in flight will append to token_ids, without drafts."""
        counts = self.counts
        return self._num_pending_tokens + counts.num_launched - counts.num_applied

    @num_pending_tokens.setter
    def num_pending_tokens(self, count: int) -> None:
        counts = self.counts
        self._num_pending_tokens = count - counts.num_launched + counts.num_applied

    def share_counts(self, counts: StepCounts) -> None:
        """Let `counts` be added to the sequence's own from now on. Changes no number."""
        last_step_id, num_computed = self.last_step_id, self.num_computed_tokens
        num_confirmed, num_pending = self.num_confirmed_tokens, self.num_pending_tokens
        self.counts = counts
        self.last_step_id, self.num_computed_tokens = last_step_id, num_computed
        self.num_confirmed_tokens, self.num_pending_tokens = num_confirmed, num_pending

    def end_plain(self) -> None:
        """Let the next step check the sequence before it computes a token of it."""
        self.plain_end = 0
        if self.counts is not NO_STEPS:
            self.counts.has_changed = True
