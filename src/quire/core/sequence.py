"""A sequence: its tokens, their block tables and its state.

The scheduler changes the state, the KV cache manager the tables. Knows no other sequence. All state
of a sequence other than its KV is a pure function of its parameters and its tokens, so dropping the
KV at any moment changes nothing but time.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from quire.core.adapters import BASE_MODEL, NO_SLOT
from quire.core.constraint import Constraint
from quire.core.request import FinishReason, Request, ResumedBranch
from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenLogprobs


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # never ran; holds no blocks and no row
    RUNNING = "running"  # has a row and block tables
    PREEMPTED = "preempted"  # ran, gave its row and some blocks back, waits to go on
    FINISHED = "finished"  # holds nothing


LEGAL_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    # To PREEMPTED at once: a new beam that shares its parent's blocks and finds no row.
    SequenceState.WAITING: frozenset(
        {SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.FINISHED}
    ),
    SequenceState.RUNNING: frozenset({SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class Eviction(NamedTuple):
    """When a content was forgotten, and the request for which its block was taken."""

    at_s: float
    by_request_id: str


class MissReason(StrEnum):
    """Why no more of a prompt was served from the prefix cache: the first that applies, in this
    order. Kept per request, for the offline API and the simulator; not sent to clients, and counted
    as `counted_as` says, since what another domain has cached is that domain's affair."""

    NONE = "none"  # all but the last token, which is always computed, was there
    NOT_ASKED = "not_asked"  # no cache, or results that need the prompt computed
    PASSED = "passed"  # it was there, but no state or window with it to go on from
    NOT_LOADED = "not_loaded"  # another tier has it, but it was not worth a load, or none came
    EVICTED = "evicted"  # it was there, until its block was taken for another request
    DIFFERS = "differs"  # what follows the found part in the cache are other tokens
    BELOW_BLOCK = "below_block"  # what is missing is less than a block
    OTHER_DOMAIN = "other_domain"  # only another cache domain has it
    NEVER_SEEN = "never_seen"  # no request had it before, or so long ago that it is forgotten


COUNTED_REASONS = tuple(reason for reason in MissReason if reason is not MissReason.OTHER_DOMAIN)


def counted_as(reason: MissReason) -> MissReason:
    """The reason under which an engine counts a miss; one of COUNTED_REASONS.

    Counts get around: to dashboards, and to clients of a server without keys. A count of
    OTHER_DOMAIN would reveal to a reader who sends a guess that some other domain has that prompt.
    """
    return MissReason.NEVER_SEEN if reason is MissReason.OTHER_DOMAIN else reason


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """The end of the found part of one prompt.

    num_found_tokens: computed tokens that were found; the one at this index is the first missing.
    prompt_around, cached_around: for DIFFERS, up to 8 tokens before the first differing one, it,
        and up to 8 after it: what the prompt has there, and what the cache has.
    eviction: for EVICTED, when and for which request.
    """

    reason: MissReason
    num_found_tokens: int
    prompt_around: tuple[int, ...] = ()
    cached_around: tuple[int, ...] = ()
    eviction: Eviction | None = None


class Snapshot(NamedTuple):
    """A state that is kept: after how many tokens, and the digest that it is found by."""

    num_tokens: int = 0
    digest: bytes = b""


class Sequence:
    """One branch of one request.

    token_ids: prompt, then what was generated and confirmed by `apply`.
    num_computed_tokens: tokens whose K and V are written once the steps in flight have ended.
    num_pending_tokens: tokens that the steps in flight will append to token_ids.
    block_tables: for each KV group, the physical blocks in logical order.
    chain, chain_tokens: content hashes and tokens of the full blocks of token_ids, as far as they
        were needed.
    num_published_blocks: leading blocks offered to the prefix cache (or taken from it).
    is_beam: whether it is part of a beam search, which chooses its tokens.
    constraint: what its tokens must obey; None: nothing. Its next step is then planned only when
        all its tokens are known.
    adapter: the digest of the one that all of its tokens are computed with, or BASE_MODEL.
    adapter_slot: where that lies while it runs.
    num_slots: tokens that the tables have room for.
    num_written_tokens: tokens whose K and V are known to be written: of steps that have ended.
    num_cached_tokens: prompt tokens that its first admission found in the cache.
    num_lost_tokens: tokens that were computed when it was last preempted.
    parent: the running sequence that it is to be forked from, while it waits for that; their first
        num_common_tokens tokens are equal. forks: those that wait to be forked from this one.
    shares_tail: what its next token changes, its partly filled last block or its state, may have
        other holders or be a snapshot, so a write copies it first.
    anchors: token counts after which its windows and states are worth keeping, in whole blocks: at
        the end of its prompt, and where its prompt parted from what was cached.
    snapshot: of its states, the last that it left or went on from.
    miss: why the cache did not have all of its prompt.
    arrival_s, first_scheduled_s: of the engine's clock, when it was taken in, and first admitted.
    num_registered_blocks: leading blocks that others know it to compute, or to have computed.
    num_served_tokens: prompt tokens that the policy has counted as served.
    num_overtaken: how often later ones were admitted because it did not fit.

    Invariant: num_computed_tokens <= num_tokens, and <= num_slots; row is None unless RUNNING;
    tables are empty unless RUNNING or PREEMPTED, and then cover all computed tokens.
    """

    __slots__ = (
        "adapter",
        "adapter_slot",
        "anchors",
        "arrival_s",
        "block_tables",
        "branch_index",
        "chain",
        "chain_root",
        "chain_tokens",
        "constraint",
        "deadline_s",
        "end_token_ids",
        "finish_reason",
        "first_scheduled_s",
        "forks",
        "is_beam",
        "last_step_id",
        "max_model_len",
        "max_num_tokens",
        "miss",
        "num_admissions",
        "num_cached_tokens",
        "num_common_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_matched_tokens",
        "num_overtaken",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_registered_blocks",
        "num_served_tokens",
        "num_slots",
        "num_written_tokens",
        "order",
        "params",
        "parent",
        "priority",
        "prompt_logprobs",
        "public_chain",
        "rank",
        "request_id",
        "row",
        "shares_tail",
        "snapshot",
        "state",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        params: DecodingParams,
        *,
        branch_index: int = 0,
        priority: int = 0,
        max_num_tokens: int | None = None,
        chain_root: bytes = b"",
        output_token_ids: Tokens[int] = (),
    ) -> None:
        """max_num_tokens: the sequence ends at this length (max_model_len), if given.
        output_token_ids: what it has generated already, without an end."""
        self.request_id = request_id
        self.branch_index = branch_index
        self.token_ids = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.is_beam = params.beam_width > 0
        self.constraint: Constraint | None = None
        self.adapter = BASE_MODEL
        self.adapter_slot = NO_SLOT
        limit = self.num_prompt_tokens + params.max_tokens
        self.max_model_len = limit if max_num_tokens is None else max_num_tokens
        self.max_num_tokens = min(limit, self.max_model_len)
        self.end_token_ids = frozenset(params.end_token_ids) | frozenset(params.stop_token_ids)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._init_schedule(priority)
        self._init_memory(chain_root)

    def _init_schedule(self, priority: int) -> None:
        """Set the fields about its place in the schedule."""
        self.state = SequenceState.WAITING
        self.row: int | None = None
        self.priority = priority
        self.tenant = ""
        self.deadline_s: float | None = None
        self.arrival_s = 0.0
        self.first_scheduled_s: float | None = None
        self.order = 0
        self.rank: tuple[float, ...] = ()
        self.num_matched_tokens = 0
        self.num_admissions = 0
        self.num_overtaken = 0
        self.num_served_tokens = 0
        self.last_step_id = -1

    def _init_memory(self, chain_root: bytes) -> None:
        """Set the fields about computed tokens, blocks, cached content and forks."""
        self.num_computed_tokens = 0
        self.num_written_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0
        self.num_lost_tokens = 0
        self.block_tables: tuple[list[int], ...] = ()
        self.num_slots = 0
        self.shares_tail = False
        self.anchors: tuple[int, ...] = ()
        self.snapshot = Snapshot()
        self.chain: list[bytes] = []
        self.chain_tokens: list[bytes] = []
        self.chain_root = chain_root
        self.public_chain: list[bytes] = []
        self.num_published_blocks = 0
        self.num_registered_blocks = 0
        self.miss: PrefixMiss | None = None
        self.parent: Sequence | None = None
        self.num_common_tokens = 0
        self.forks: list[Sequence] = []

    def branch(self, branch_index: int, params: DecodingParams) -> "Sequence":
        """A new sequence with the confirmed tokens of this one, prompt and output separate."""
        child = Sequence(
            self.request_id,
            self.token_ids[: self.num_prompt_tokens],
            params,
            branch_index=branch_index,
            priority=self.priority,
            max_num_tokens=self.max_model_len,
            chain_root=self.chain_root,
            output_token_ids=self.token_ids[self.num_prompt_tokens :],
        )
        child.tenant, child.deadline_s = self.tenant, self.deadline_s
        child.adapter = self.adapter
        child.chain = list(self.chain)
        child.chain_tokens = list(self.chain_tokens)
        return child

    def fork_from(self, parent: "Sequence") -> None:
        """Wait to be forked from `parent`, with which all present tokens are in common."""
        self.parent, self.num_common_tokens = parent, len(self.token_ids)
        parent.forks.append(self)

    def leave_parent(self) -> None:
        """Stop waiting to be forked."""
        if self.parent is not None:
            self.parent.forks.remove(self)
            self.parent = None

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id}/{self.branch_index} {self.state.value}"
            f" row={self.row} computed={self.num_computed_tokens}/{self.num_tokens}>"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the chain, those that steps in flight will append included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Confirmed generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def continues_session(self) -> bool:
        """Whether most of its prompt was found: then it goes on from an earlier one's end."""
        return 0 < self.num_prompt_tokens <= 2 * self.num_cached_tokens

    @property
    def shows_output_length(self) -> bool:
        """Whether it has ended of itself and its length is one of outputs: of a beam search it is
        not known, of one beam; a request that pools has none."""
        ended = self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return ended and not self.is_beam and self.params.pooling is None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all prompt positions are to be computed, none read from the cache."""
        pooling = self.params.pooling
        return self.needs_prompt_logprobs or (pooling is not None and pooling.reads_whole_prompt)

    @property
    def is_in_one_step(self) -> bool:
        """Whether all of its tokens are computed in one step."""
        return self.params.pooling is not None and self.params.pooling.in_one_step

    @property
    def num_resumable_tokens(self) -> int:
        """From how many computed tokens on it could go on, were it preempted: nothing that came of
        them is lost."""
        if self.params.pooling is not None and self.params.pooling.reads_whole_prompt:
            return 0
        return len(self.prompt_logprobs) if self.needs_prompt_logprobs else self.num_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be computed (and so not read from the cache)."""
        return (
            self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )

    def move_to(self, state: SequenceState) -> None:
        """Change the state; an illegal transition raises with what the sequence is."""
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise AssertionError(f"{self!r} can't become {state.value}")
        self.state = state

    def append(self, token_id: int) -> bool:
        """Add a generated token; returns whether the sequence ends with it.

        Sets finish_reason, but leaves the state to the scheduler, which owns rows and blocks.
        """
        token_ids, constraint = self.token_ids, self.constraint
        token_ids.append(token_id)
        is_over = constraint is not None and constraint.take(token_id)
        if constraint is not None and constraint.error is not None:
            self.finish_reason = FinishReason.ERROR
        elif is_over or (
            token_id in self.end_token_ids and self.num_output_tokens >= self.params.min_tokens
        ):
            self.finish_reason = FinishReason.STOP
        elif len(token_ids) >= self.max_num_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None


def make_sequences(
    request: Request, max_model_len: int, chain_root: bytes, now_s: float
) -> list[list[Sequence]]:
    """The sequences of a request, those with equal tokens together, as `Scheduler.add` takes them:
    the first of each group computes what its group has in common.

    Of a beam search only the first beam, from which the others come. now_s: of the engine's clock,
    from which its deadline counts.
    """
    branches = request.resumed
    if not branches:
        num_branches = 1 if request.params.beam_width else request.n
        branches = tuple(ResumedBranch(index) for index in range(num_branches))
    groups: dict[tuple[int, ...], list[Sequence]] = {}
    for branch_index, token_ids in branches:
        sequence = Sequence(
            request.request_id,
            request.prompt_token_ids,
            request.params,
            branch_index=branch_index,
            priority=request.priority,
            # A result that is no token takes no place.
            max_num_tokens=max_model_len + (request.params.pooling is not None),
            chain_root=chain_root,
            output_token_ids=token_ids,
        )
        sequence.tenant = request.tenant
        sequence.adapter = BASE_MODEL if request.adapter is None else request.adapter.digest
        if request.deadline_s is not None:
            sequence.deadline_s = now_s + request.deadline_s
        groups.setdefault(token_ids, []).append(sequence)
    return list(groups.values())
