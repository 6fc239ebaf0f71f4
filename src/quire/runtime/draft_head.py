"""A drafter that is a head of the model: MTP or EAGLE-3.

A head computes a token together with the state before it, which comes from the model's hidden
states (`models.heads.draft_head`). A step of the model computes these once, so they are kept until
the head has computed the tokens after them. It does so when a block is full, so that whole blocks
always have the head's K and V and can be shared, and when drafts are ordered:

    tokens of the row     t0 ... t(r-1) | tr ... t(n-1)     the head has reached token r
    kept                        h(r-1)    ... h(n-2)        one before each further token
    first run             computes tr .. t(n-1)             state s1, draft d1
    run 2                 computes d1 with s1               state s2, draft d2
    ...

K and V of drafts are written after the row's tokens. For a right draft they were computed with a
state of the head, so the head computes its token again, with the state of the model.

After the reuse of a prefix, the state before the row's first own token is unknown, and replaced by
zeros, as at the start of a sequence.

If no drafts are ordered for a while, the head rests, and keeps no more states. When drafts of a row
that it missed are ordered, it catches up with zeros for the missing states: its K and V then know
the row's tokens alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, LayerKV
from quire.core.step import Drafted, DraftOrder
from quire.kernels.cpu.library import NativeKernels
from quire.models.heads.draft_head import DraftHead
from quire.models.interface import TextModel
from quire.runtime.batch import RowBatch, StepBatch
from quire.runtime.block_tables import Int64
from quire.runtime.draft_batch import DraftBatch
from quire.runtime.draft_runs import DraftRuns
from quire.runtime.drafters import Drafter
from quire.sampling.host.draft_sampler import DraftSampler

RESTS_AFTER = 64
"""The number of steps without orders after which the head rests."""

MOST_KEPT = 16
"""Maximum number of hidden states that are kept for a row."""


class HeadDrafter(Drafter):
    """A drafter made of a head.

    Invariant: unless a live row is `_missed`, the head has K and V of its first `_reached[row]`
    tokens. The first `_num_kept[row]` of `_kept[row]` are the model's hidden states before the
    tokens from there on.
    """

    needs_hidden = True

    def __init__(
        self,
        head: DraftHead,
        target: TextModel,
        backend: AttentionBackend,
        layers: tuple[LayerKV, ...],
        rows: RowBatch,
        sampler: DraftSampler,
        num_blocks: int,
        kernels: NativeKernels | None = None,
    ) -> None:
        """See `Drafter`. `target` must keep the inputs of the head's layers already."""
        batch = DraftBatch(rows, target.vocab_size)
        super().__init__(head, backend, layers, rows, batch, sampler, num_blocks, kernels)
        self.head = head
        self._target = target
        num_rows = len(rows.num_tokens)
        self._kept = torch.zeros(num_rows, MOST_KEPT, head.input_size, dtype=head.states.dtype)
        self._flat_kept = self._kept.view(-1, head.input_size)
        self._missed = np.zeros(num_rows, np.bool_)
        self._num_idle = 0  # steps without orders
        self._num_kept: Int64 = np.zeros(num_rows, np.int64)
        self._reached: Int64 = np.zeros(num_rows, np.int64)

    # ---- the rows -----------------------------------------------------------------------------

    def _admit(self, row: int, num_computed: int) -> None:
        self._forget_before(row, num_computed)
        self._missed[row] = self._blocks.num_reached(row, num_computed) < num_computed

    def reset(self) -> None:
        """See `Drafter`. Rows are admitted again."""

    def _forget_before(self, row: int, num_tokens: int) -> None:
        """Set a row back to its first `num_tokens` tokens, without a hidden state of the last."""
        self._reached[row], self._num_kept[row] = num_tokens, 1
        self._kept[row, 0] = 0

    def _cut(self, row: int, num_tokens: int) -> None:
        if num_tokens < self._reached[row]:
            self._forget_before(row, num_tokens)
        most = num_tokens - self._reached[row] + 1
        self._num_kept[row] = min(int(self._num_kept[row]), int(most))

    def _copy(self, row: int, source: int) -> None:
        self._reached[row], self._num_kept[row] = self._reached[source], self._num_kept[source]
        self._missed[row] = self._missed[source]
        count = int(self._num_kept[source])
        self._kept[row, :count] = self._kept[source, :count]

    # ---- after a step -------------------------------------------------------------------------

    def follow(self, step: StepBatch, hidden: torch.Tensor) -> None:
        """See `Drafter`."""
        self._num_idle += 1
        if self._num_idle > RESTS_AFTER:
            self._missed[step.rows] = self._missed[step.sample_rows] = True
            return
        kept_inputs = self._target.kept_inputs
        if kept_inputs is not None:
            hidden = kept_inputs.rows[: len(hidden)]
        rows, counts = step.rows, step.num_new_tokens
        if len(rows) == len(hidden) and self._keep_one_each(rows, step, hidden):
            return
        # The step computed the tokens [first, end) of each row, without rejected drafts.
        firsts = np.array(step.attention.context_lens_list, np.int64) - counts
        ends = np.minimum(firsts + counts, self._rows.num_tokens[rows] - 1)
        wanted = self._reached[rows] + self._num_kept[rows] - 1
        self._missed[rows] |= wanted < firsts
        starts = np.maximum(firsts, wanted)
        num_new = np.where(self._missed[rows], 0, np.maximum(0, ends - starts))
        lines = np.cumsum(counts) - counts + (starts - firsts)
        # Keep the hidden states of rows that fill no block.
        fills = ends // self._block_size > self._reached[rows] // self._block_size
        runs = (fills | (self._num_kept[rows] + num_new > MOST_KEPT)) & (num_new > 0)
        self._keep(rows[~runs], num_new[~runs], lines[~runs], hidden)
        # Compute the tokens of other rows.
        for index in np.flatnonzero(runs).tolist():
            first = int(lines[index])
            new = hidden[first : first + int(num_new[index])]
            self._advance(int(rows[index]), int(ends[index]), new)
        # Forks that joined the step continue from the same states as their sources.
        if len(step.joined_lines):
            joined = step.sample_rows[-len(step.joined_lines) :]
            sources = step.sample_rows[step.joined_lines.numpy()]
            for row, source in zip(joined.tolist(), sources.tolist(), strict=True):
                self._copy(row, source)

    def _keep_one_each(self, rows: Int64, step: StepBatch, hidden: torch.Tensor) -> bool:
        """Keep the hidden states of the most frequent steps, in which each row computes the token
        that is next, and fills no block. Returns whether it is such a step."""
        reached, num_kept = self._reached[rows], self._num_kept[rows]
        ends = np.array(step.attention.context_lens_list)
        is_plain = (
            ~self._missed[rows]
            & (reached + num_kept == ends)
            & (ends % self._block_size != 0)
            & (num_kept < MOST_KEPT)
            & (self._rows.num_tokens[rows] > ends)
        )
        if len(step.joined_lines) or not is_plain.all():
            return False
        self._flat_kept[torch.from_numpy(rows * MOST_KEPT + num_kept)] = hidden
        self._num_kept[rows] = num_kept + 1
        return True

    def _keep(self, rows: Int64, counts: Int64, lines: Int64, hidden: torch.Tensor) -> None:
        """Keep the states of counts[i] tokens of rows[i], from line lines[i] of `hidden` on."""
        total = int(counts.sum())
        if not total:
            return
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(rows * MOST_KEPT + self._num_kept[rows], counts) + within
        sources = np.repeat(lines, counts) + within
        self._flat_kept[torch.from_numpy(places)] = hidden[torch.from_numpy(sources)]
        self._num_kept[rows] += counts

    def _advance(self, row: int, end: int, new: torch.Tensor) -> None:
        """Compute a row's tokens up to `end`. `new` are the hidden states up to token end - 1,
        whose state is kept."""
        first, num_kept = int(self._reached[row]), int(self._num_kept[row])
        hidden = torch.cat((self._kept[row, :num_kept], new))
        self._run_span(row, first, self.head.states_of(hidden)[: end - first])
        self._reached[row], self._num_kept[row] = end, 1
        self._kept[row, 0] = hidden[-1]

    def _run_span(self, row: int, first: int, states: torch.Tensor) -> None:
        """Compute tokens of a row from `first` on, one for each of `states`, which has the state
        before each token."""
        for offset in range(0, len(states), self._rows.max_num_tokens):
            part = states[offset : offset + self._rows.max_num_tokens]
            self.head.states[: len(part)] = part
            ints = (np.array([each], np.int64) for each in (row, first + offset, len(part)))
            self._run(self._batch.spans(*ints))
        self._blocks.count(row, first, first + len(states))

    # ---- before a step ------------------------------------------------------------------------

    def draft(self, orders: Sequence[DraftOrder]) -> Mapping[int, Drafted]:
        """See `Drafter`."""
        self._num_idle = 0
        lengths = {order.row: int(self._rows.num_tokens[order.row]) for order in orders}
        for order in orders:
            if self._missed[order.row]:
                self._catch_up(order, lengths[order.row])
        # A row can have drafts if the states before all its tokens are kept.
        drafts = {
            row: DraftRuns(order)
            for order in orders
            if order.num_drafts
            and not self._missed[row := order.row]
            and self._reached[row] + self._num_kept[row] == lengths[row]
        }
        for rows in _groups(list(drafts), self._num_kept, self._rows.max_num_tokens):
            self._draft_group(rows, lengths, drafts)
        found: dict[int, Drafted] = {}
        for row, length in lengths.items():
            reached = self._blocks.num_reached(row, length) if self._missed[row] else length
            found[row] = drafts[row].drafted(reached) if row in drafts else Drafted((), reached)
        return found

    def _catch_up(self, order: DraftOrder, num_tokens: int) -> None:
        """Compute missing tokens of a row, at most `order.most_tokens`, with zeros for states."""
        row = order.row
        first = min(self._blocks.num_reached(row, num_tokens), num_tokens - 1)
        end = min(num_tokens - 1, first + order.most_tokens)
        self._run_span(row, first, self.head.states.new_zeros(end - first, self.head.hidden_size))
        if end == num_tokens - 1:
            self._missed[row] = False
            self._forget_before(row, end)

    def _draft_group(
        self, rows: Int64, lengths: Mapping[int, int], drafts: Mapping[int, DraftRuns]
    ) -> None:
        """Add the drafts of some rows."""
        # The first run computes all tokens of the rows that the head has not reached.
        ends = np.array([lengths[row] for row in rows.tolist()], np.int64)
        states = self._run_first(rows, ends)
        place = 0
        while len(rows):
            # Choose a draft for each row, from the state after its last token.
            logits = self._logits(states)
            found = self._sampler.sample(logits, rows, ends + place)
            place += 1
            for row, *draft in zip(rows.tolist(), *(each.tolist() for each in found), strict=True):
                drafts[row].add(*draft)
            # Then compute the next draft of each row that goes on.
            going = np.flatnonzero([drafts[row].goes_on for row in rows.tolist()])
            rows, ends = rows[going], ends[going]
            if len(rows):
                self._rows.token_ids[rows, ends + place - 1] = found.token_ids[going]
                self.head.states[: len(rows)] = states[torch.from_numpy(going)]
                states = self._run(self._batch.singles(rows, ends + place - 1))

    def _run_first(self, rows: Int64, ends: Int64) -> torch.Tensor:
        """Compute the tokens of rows that the head has not reached. Returns the states after the
        rows' last tokens, valid until the next run."""
        counts = self._num_kept[rows]
        if int(counts.max()) == 1:
            kept = self._kept[torch.from_numpy(rows), 0]
            self.head.states[: len(rows)] = self.head.states_of(kept)
            found = self._run(self._batch.singles(rows, ends - 1))
        else:
            of_rows = [self._kept[row, : self._num_kept[row]] for row in rows.tolist()]
            states = self.head.states_of(torch.cat(of_rows))
            self.head.states[: len(states)] = states
            step = self._batch.spans(rows, ends - counts, counts)
            found = self._run(step)[step.sample_index]
        for row, end, count in zip(rows.tolist(), ends.tolist(), counts.tolist(), strict=True):
            self._blocks.count(row, end - count, end)
        self._reached[rows], self._num_kept[rows] = ends, 0
        return found

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Drafter`. No token that the head lacks is chosen."""
        logits = self._forward.logits(hidden)
        token_ids = self.head.token_ids
        if token_ids is None:
            return logits
        found = torch.full((len(logits), self._target.vocab_size), -torch.inf)
        found[:, token_ids] = logits
        return found


def _groups(rows: list[int], counts: Int64, most: int) -> list[Int64]:
    """The rows in groups of at most `most` tokens, if row i computes counts[i] tokens. In each
    group, rows with one token come first."""
    groups: list[list[int]] = []
    room = 0
    for row in sorted(rows, key=lambda row: int(counts[row])):
        if counts[row] > room:
            groups.append([])
            room = most
        groups[-1].append(row)
        room -= int(counts[row])
    return [np.array(group, np.int64) for group in groups]
