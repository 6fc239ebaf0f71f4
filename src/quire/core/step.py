"""The contract between the scheduler and the runner: plain data in, plain data out.

The engine repeats: `plan = scheduler.schedule(now_s)`, `runner.execute(plan)`,
`runner.sample(masks)`, `outputs = scheduler.apply(runner.result())`. The simulator, the step trace
and a remote worker all stand on this seam.

`execute` and `sample` put work on the device and need not wait for it; `result` waits. So step n+1
may be planned, executed and sampled before the result of step n is fetched: a decoding row's input
is what step n sampled for it, which the runner keeps. Plans, and results, come in order.

The runner keeps one permanent *row* per live sequence. A plan says only what changed: nothing in it
grows with the context. A row that is live and not named in `chunks` decodes one token: its input is
the last token that the runner itself sampled for it (or the last token of its admission), so the
token ids of decoding rows never travel.

    row state in the runner      token_ids[0:num_tokens], num_computed_tokens, block tables by group
    a step computes              positions from num_computed_tokens on, num_new_tokens of them
    a row samples                if and only if that reaches num_tokens: the gap is closed

A group's table names, by its kind (`kv_groups.KVKind`):

    full, latent     a block for each block of tokens, in their order
    window           the same, but HOLE_BLOCK for those that the window has passed
    state            the blocks of the row's one state, as many as a state takes; from admission on

The state in a row's blocks is that after its computed tokens: a step reads it, and writes what it
is after the step's tokens in its place. That of a row without computed tokens is zeros, whatever
its blocks hold. A state that others hold too, or that is to be found later, is copied first: a
REPLACE of the table's entries and a copy of each block.

A plan is carried out in this order: release, admit, forks, token_edits, table_edits, moves, copies,
adapter_loads, the forward pass. Moves stand before copies, so that a block can be moved out and be
a copy's target in one step. A row's tokens and results belong to the sequence in it when the step
was planned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

from quire.core.adapters import NO_SLOT
from quire.core.sampling_params import DecodingParams


class RowAdmission(NamedTuple):
    """The full state of a sequence that enters `row`.

    token_ids: prompt and, after a preemption or a resumption, what was generated so far. The
        scheduler lends the list for the duration of `execute`; the runner copies it.
    num_prompt_tokens: how many of token_ids came from the client (penalties need it).
    num_computed_tokens: tokens whose K and V already lie in the block tables (prefix hits).
    block_tables: for each KV group, the physical block ids in logical order.
    branch_index: which of a request's parallel samples this is; enters the random numbers.
    adapter_slot: where the adapter lies that its tokens are computed with; NO_SLOT: the base model.
    """

    row: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_tables: tuple[tuple[int, ...], ...]
    params: DecodingParams
    branch_index: int = 0
    adapter_slot: int = NO_SLOT


class RowFork(NamedTuple):
    """`row`, which was free, takes over the state of the live `source_row`: tokens, computed
    tokens, block tables and adapter, as they are after `admit` and before this plan's edits.

    joins_step: source_row closes its gap in this step. `row` then computes nothing itself (it is
        not named in `chunks`): after the step it has source_row's computed tokens, and it samples
        its own next token from the same logits. Otherwise it is a live row like any other.
    """

    row: int
    source_row: int
    params: DecodingParams
    branch_index: int
    joins_step: bool = False


class TokenEdit(NamedTuple):
    """The tokens of `row` from first_position on are replaced; what was after them is dropped.

    The new length is first_position + len(token_ids), above the row's computed tokens, and no
    position is replaced that was ever computed in this row.
    """

    row: int
    first_position: int
    token_ids: tuple[int, ...]


class EditKind(Enum):
    """What a TableEdit does to a row's block table of one KV group."""

    APPEND = "append"  # block_ids follow the table's end; first_logical_block is its length
    REPLACE = "replace"  # block_ids take the place of those at first_logical_block onward
    TRUNCATE = (
        "truncate"  # the table ends before first_logical_block, and so do the computed tokens
    )
    HOLE = "hole"  # len(block_ids) entries become unreadable (out of a window); ids are HOLE_BLOCK


HOLE_BLOCK = -1


class TableEdit(NamedTuple):
    """One change to the block table of `row` in KV group `group`."""

    row: int
    group: int
    kind: EditKind
    first_logical_block: int
    block_ids: tuple[int, ...] = ()


class Chunk(NamedTuple):
    """A row that computes more or other than one decode token.

    num_new_tokens: tokens to compute from the row's num_computed_tokens on; 0 pauses the row.
    """

    row: int
    num_new_tokens: int


class BlockCopy(NamedTuple):
    """Copy all bytes of one device block to another (copy on write). Within a plan no block is a
    target twice, or a source and a target."""

    source: int
    target: int


class AdapterLoad(NamedTuple):
    """The adapter with this digest takes the place of what was in `slot`, which no row uses but
    those that this plan admits. The runner finds it where `AdapterSource` has it ready."""

    slot: int
    digest: str


class Tier(StrEnum):
    """Where a block's bytes can lie."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class BlockMove(NamedTuple):
    """Move a block's bytes between tiers; ids count within their tier."""

    source_tier: Tier
    source: int
    target_tier: Tier
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step changes and computes. See the module's text for order and meaning.

    num_rows: live rows after `release`, `admit` and `forks`; lets the runner check that both sides
        agree.
    num_tokens: tokens computed in this step, over all rows.
    """

    step_id: int
    num_rows: int
    num_tokens: int
    release: tuple[int, ...] = ()
    admit: tuple[RowAdmission, ...] = ()
    forks: tuple[RowFork, ...] = ()
    token_edits: tuple[TokenEdit, ...] = ()
    table_edits: tuple[TableEdit, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    moves: tuple[BlockMove, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the model's distribution before any sampling option.

    rank: 1 for the most likely token of the vocabulary.
    top_token_ids, top_logprobs: the k most likely tokens, best first (k as requested), or the
        request's logprob_token_ids, in its order.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    rows, token_ids: parallel; the tokens sampled for each row that closed its gap, in order (one
        each, more where drafts were accepted).
    logprobs: of the rows whose parameters ask for them, one entry per sampled token. A row that
        searches beams (`DecodingParams.beam_width`) always has one, with its candidates as the top
        tokens.
    prompt_logprobs: likewise, entries for the prompt positions that follow those computed in this
        step: computing positions [a, b) yields entries for tokens a+1 .. b, as far as they belong
        to the prompt.
    failed: rows whose own computation failed (a NaN in their logits), with a sentence; they sample
        nothing and their sequences end alone.
    pooled: of the rows whose parameters ask for it (`DecodingParams.pooling`), fp32 numbers as
        bytes. Such a row is among `rows`, without a token.
    """

    step_id: int
    rows: Sequence[int]
    token_ids: Sequence[Sequence[int]]
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    pooled: Mapping[int, bytes] = field(default_factory=dict)


TokenMasks = Mapping[int, bytes]
"""Row -> bitmask over the vocabulary: bit (t % 8) of byte t // 8 set means token t is allowed.

A mask may end early, and then allows no further token, or with the last token's word of 32 bits.
"""


class Runner(Protocol):
    """Executes plans: `runtime.model_runner` on a model, `simulation.fake_runner` without one."""

    def execute(self, plan: StepPlan) -> None:
        """Carry out `plan` up to and including the forward pass, after the last step's `sample`."""
        ...

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Sample the rows of the step just executed that close their gap. Once for each step."""
        ...

    def result(self) -> StepResult:
        """What the oldest step sampled whose result was not fetched yet; waits for the device."""
        ...

    def reset(self) -> None:
        """Drop all rows and steps, after a failed one. What blocks hold stays valid, but for states
        that the step was to move."""
        ...
