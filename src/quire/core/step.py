"""The interface between the scheduler and the runner: plain data in, plain data out.

The engine repeats: `plan = scheduler.schedule(now_s)`, `runner.execute(plan)`,
`runner.sample(masks)`, `outputs = scheduler.apply(runner.result())`. The simulator, the step trace
and the processes of tensor parallelism use the same contract.

`execute` and `sample` put work on the device and need not wait for it; `result` waits. So step n+1
may be planned, executed and sampled before the result of step n is fetched. The runner keeps the
token that step n sampled for a decoding row, and uses it as the row's input. Results come in the
order of the plans.

The runner keeps one permanent *row* per live sequence. A plan says only what changed: nothing in it
grows with the context. A live row that `chunks` does not name decodes one token. Its input is the
last token that the runner itself sampled for it (or the last token of its admission), so the token
ids of decoding rows are never sent.

    row state in the runner      token_ids[0:num_tokens], num_computed_tokens, block tables by group
    a step computes              positions from num_computed_tokens on, num_new_tokens of them
    a row samples                if and only if that reaches num_tokens: the gap is closed

A chunk may also verify *drafts*: tokens that a proposer guessed to follow the row's tokens. The
drafts are computed after the row's own tokens, and the row samples at each of the chunk's last 1 +
num_drafts positions. The token sampled at a position depends only on that position's logits and the
tokens before it, so a draft is right exactly if it equals the token sampled at the position before
it (*accepted*). Sampling ends with the first token that differs from its draft, or with the token
after the last draft:

    tokens of the row   t0 .. t(n-1)                  drafts d1 d2 d3
    sampled             s1 = d1, s2 != d2             so the result is (s1, s2); d2, d3 are rejected
    after the step      t0 .. t(n-1) s1 s2            computed: all but the last, s2

K and V of rejected drafts stay in the row's slots, after its computed tokens. No query reads them,
and later steps overwrite them. The runner knows the row's new length when it has sampled, the
scheduler only from the result; so a row with drafts pauses until its result was fetched.

Drafts may also come from the runner itself, if it has a *drafter*: a smaller model, or a head of
the model. The plan then has a DraftOrder for a row that decodes one token. The caller gets the
drafts by `draft(plan)`, puts those that it wants verified into the plan's chunks, and executes that
plan:

    plan = schedule(now_s)    draft(plan) -> Drafts    add(plan, drafts)    execute, sample

A recurrent state can't be cut back to the accepted drafts. So in a model with states, a step stores
the state before its drafts, and none of them counts as computed. A later step computes the accepted
ones again, with the same bits, as part of the row's gap:

    after the step      t0 .. t(n-1) s1 s2            computed: t0 .. t(n-1)

A group's table names, by its kind (`kv_groups.KVKind`):

    full, latent     a block for each block of tokens, in their order
    window           the same, but HOLE_BLOCK for those that the window has passed
    state            the blocks of the row's one state, as many as a state takes; from admission on

A row's state blocks hold its state after its computed tokens; each step overwrites them with the
state after the step's tokens. A row without computed tokens starts from zeros, whatever its blocks
hold. A state that other rows share, or that is kept as a snapshot, is copied first: the plan then
has a REPLACE of the table's entries and a copy of each block.

The runner executes a plan in this order: release, admit, forks, token_edits, table_edits,
copies, adapter_loads, content_loads, the forward pass. A row's tokens and results belong to the
sequence that had the row when the step was planned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol

from quire.core.adapters import NO_SLOT
from quire.core.content_spans import ContentSpan
from quire.core.draft_stops import DraftStop
from quire.core.sampling_params import DecodingParams


class RowAdmission(NamedTuple):
    """The full state of a sequence that enters `row`."""

    row: int
    #: The prompt, then the tokens generated before a preemption or a resumption. The scheduler may
    #: change the list after `execute`, so the runner copies it.
    token_ids: Sequence[int]
    #: Number of token_ids that came from the client; penalties need it.
    num_prompt_tokens: int
    #: Number of tokens whose K and V are already in the block tables (prefix hits).
    num_computed_tokens: int
    #: Physical block ids in logical order, by KV group.
    block_tables: tuple[tuple[int, ...], ...]
    params: DecodingParams
    #: Index of the parallel sample within its request; it enters the random numbers.
    branch_index: int = 0
    #: Slot of the adapter that computes the row's tokens; NO_SLOT means the base model.
    adapter_slot: int = NO_SLOT
    #: Spans of token_ids that stand for contents: there, the row reads embeddings from the slot
    #: that has the content with the span's digest.
    content_spans: tuple[ContentSpan, ...] = ()


class RowFork(NamedTuple):
    """Copies the state of the live `source_row` to the free `row`.

    The copy has the tokens, computed tokens, block tables and adapter as they are after `admit` and
    before this plan's edits.
    """

    row: int
    source_row: int
    params: DecodingParams
    branch_index: int
    #: Whether source_row closes its gap in this step. Then `row` computes nothing itself and is not
    #: named in `chunks`: after the step it has source_row's computed tokens and samples its own
    #: next token from the same logits. If False, `row` is a live row like any other.
    joins_step: bool = False


class TokenEdit(NamedTuple):
    """Replaces the tokens of `row` from first_position on, and drops any tokens after the replaced
    ones.

    The new length, first_position + len(token_ids), exceeds the row's computed tokens. No position
    is replaced that was ever computed in this row.
    """

    row: int
    first_position: int
    token_ids: tuple[int, ...]


class EditKind(Enum):
    """The change that a TableEdit makes to a row's block table of one KV group."""

    APPEND = "append"  # adds block_ids at the table's end; first_logical_block is its length
    REPLACE = "replace"  # block_ids replace the entries from first_logical_block on
    #: The table, and the computed tokens, end before first_logical_block.
    TRUNCATE = "truncate"
    #: The window has passed len(block_ids) entries, which become HOLE_BLOCK and unreadable.
    HOLE = "hole"


HOLE_BLOCK = -1


class TableEdit(NamedTuple):
    """One change to the block table of `row` in KV group `group`."""

    row: int
    group: int
    kind: EditKind
    first_logical_block: int
    block_ids: tuple[int, ...] = ()


class Chunk(NamedTuple):
    """The work of a row that does not decode exactly one token."""

    row: int
    #: Number of tokens to compute, starting at the row's num_computed_tokens, drafts included; 0
    #: pauses the row.
    num_new_tokens: int
    #: The last of these tokens, if the step is to verify them. The tokens before them then close
    #: the row's gap.
    draft_token_ids: tuple[int, ...] = ()


class DraftOrder(NamedTuple):
    """Asks the runner's drafter for drafts of `row`, all of whose tokens are known.

    The row has slots for its next token and the drafts.
    """

    row: int
    num_drafts: int
    #: Maximum number of the row's tokens whose missing K and V the drafter computes first. If more
    #: are missing, the drafter computes only this number and makes no drafts.
    most_tokens: int
    #: Says from the drafts' probabilities where the drafter stops before num_drafts.
    stop: DraftStop = DraftStop()


class BlockCopy(NamedTuple):
    """Copies all bytes of one device block to another (copy on write).

    Within a plan no block is the target of two copies, or both a source and a target.
    """

    source: int
    target: int


class ItemLoad(NamedTuple):
    """Loads the adapter or the content with this digest into `slot`.

    An adapter's slot is used only by rows that this plan admits. A content's slot is read in this
    step, and maybe in later ones. The runner gets the item from `ItemSource`, which has it ready.
    """

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The changes and the work of one step; the module's docstring explains order and meaning."""

    step_id: int
    #: Number of live rows after `release`, `admit` and `forks`; the runner compares its own count.
    num_rows: int
    #: Number of tokens computed in this step, over all rows.
    num_tokens: int
    release: tuple[int, ...] = ()
    admit: tuple[RowAdmission, ...] = ()
    forks: tuple[RowFork, ...] = ()
    token_edits: tuple[TokenEdit, ...] = ()
    table_edits: tuple[TableEdit, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    adapter_loads: tuple[ItemLoad, ...] = ()
    content_loads: tuple[ItemLoad, ...] = ()
    draft_orders: tuple[DraftOrder, ...] = ()

    @property
    def only_decodes(self) -> bool:
        """Whether the rows of the step before decode one token each, and no others."""
        return not (self.admit or self.release or self.forks or self.chunks)

    @property
    def paused_rows(self) -> tuple[int, ...]:
        """The live rows that compute nothing, except for forks that join the step."""
        return tuple([chunk.row for chunk in self.chunks if not chunk.num_new_tokens])

    @property
    def chunked_rows(self) -> tuple[int, ...]:
        """The rows that compute a chunk."""
        return tuple([chunk.row for chunk in self.chunks if chunk.num_new_tokens])

    @property
    def num_drafts(self) -> int:
        """Number of drafts that the step verifies."""
        return sum([len(chunk.draft_token_ids) for chunk in self.chunks])

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens in chunks without drafts."""
        return sum([chunk.num_new_tokens for chunk in self.chunks if not chunk.draft_token_ids])

    def with_own_tokens(self) -> "StepPlan":
        """The plan with copies of the token ids of admitted rows, which the scheduler changes after
        `execute`."""
        admit = tuple(each._replace(token_ids=list(each.token_ids)) for each in self.admit)
        return replace(self, admit=admit) if admit else self


class Drafted(NamedTuple):
    """The drafter's work for one row."""

    #: The drafts: at most `DraftOrder.num_drafts`.
    token_ids: tuple[int, ...]
    #: Number of leading tokens of the row for which the drafter has K and V, drafts left out.
    num_reached_tokens: int
    #: Parallel to token_ids: the probabilities that the drafter gives its drafts.
    probabilities: tuple[float, ...] = ()


class Drafts(NamedTuple):
    """The result of a plan's draft orders."""

    #: Maps each row with a draft order to its drafts.
    of_rows: Mapping[int, Drafted]
    #: The seconds that drafting took.
    seconds: float


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, under the model's distribution before any sampling
    option."""

    token_id: int
    logprob: float
    #: Rank of token_id in the vocabulary; 1 is the most likely token.
    rank: int
    #: The k most likely tokens, best first (k as requested), or the request's logprob_token_ids in
    #: the request's order.
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything that a step sampled."""

    step_id: int
    #: The rows that sampled, parallel to token_ids.
    rows: Sequence[int]
    #: The tokens sampled for each row, in order; a row has one, or more where drafts were accepted.
    token_ids: Sequence[Sequence[int]]
    #: One entry for each sampled token of the rows whose parameters ask for log-probabilities. A
    #: beam search row (`DecodingParams.beam_width`) always has one, with its candidates as the top
    #: tokens.
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    #: Entries for prompt tokens, by row. Computing positions [a, b) yields the entries for tokens
    #: a+1 .. b that belong to the prompt.
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    #: Rows whose own computation failed (NaN logits), each with an error message. These rows
    #: sample nothing. Their sequences end, and all other sequences continue.
    failed: Mapping[int, str] = field(default_factory=dict)
    #: Pooled results as bytes of fp32 numbers, for the rows that ask for them
    #: (`DecodingParams.pooling`). Such a row is among `rows`, without a token.
    pooled: Mapping[int, bytes] = field(default_factory=dict)


TokenMasks = Mapping[int, Sequence[bytes]]
"""Row -> a bitmask over the vocabulary for each position at which the row samples: 1, or 1 + the
number of its drafts. Bit (t % 8) of byte t // 8 is set if token t is allowed.

A mask that ends early allows none of the tokens beyond its end. It may also be padded to a whole
word of 32 bits.
"""


class Runner(Protocol):
    """Executes plans: `runtime.model_runner` on a model, `simulation.fakes.fake_runner` without
    one."""

    def draft(self, plan: StepPlan) -> Drafts:
        """Carry out the plan's changes of rows and blocks, then its draft_orders.

        Called after `sample` of the previous step, only for a plan with orders. The next call is
        `execute` of the same plan, with drafts in its chunks, which does not repeat the changes; or
        `reset`.
        """
        ...

    def execute(self, plan: StepPlan) -> None:
        """Carry out `plan` up to and including the forward pass.

        Called after `sample` of the previous step.
        """
        ...

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Sample the rows of the last executed step that close their gap. Called once a step."""
        ...

    def result(self) -> StepResult:
        """Wait for and return the result of the oldest step whose result was not fetched yet."""
        ...

    def reset(self) -> None:
        """Drop all rows and steps after a failed step.

        The contents of blocks stay valid, except for states that the failed step would have
        changed.
        """
        ...
