"""A sequence: its tokens, their block tables and its state.

The scheduler changes the state, and the KV cache manager the tables. Apart from its KV, all state
of a sequence is a pure function of its parameters and its tokens, so its KV can be dropped at any
moment without changing its output.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

from quire.core.adapters import BASE_MODEL, NO_SLOT
from quire.core.content_spans import ContentSpan, first_cut, longest_in_one_step
from quire.core.request import FinishReason, Request, ResumedBranch
from quire.core.sampling_params import DecodingParams
from quire.core.sequence_counts import NO_STEPS, SequenceCounts
from quire.core.step import TokenLogprobs


class SequenceState(Enum):
    """The life cycle of a sequence; LEGAL_TRANSITIONS has the changes allowed."""

    WAITING = "waiting"  # never ran; holds no blocks and no row
    RUNNING = "running"  # has a row and block tables
    PREEMPTED = "preempted"  # ran, lost its row and maybe blocks, waits to run again
    FINISHED = "finished"  # holds nothing


LEGAL_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    # A new beam that shares its parent's blocks goes to PREEMPTED directly if no row is free.
    SequenceState.WAITING: frozenset(
        {SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.FINISHED}
    ),
    SequenceState.RUNNING: frozenset({SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class Eviction(NamedTuple):
    """When a cached content was evicted, and the request that got its block."""

    at_s: float
    by_request_id: str


class MissReason(StrEnum):
    """Why the prefix cache did not have more of a prompt: the first reason below that applies.

    Kept for each request, for the offline API and the simulator, and not sent to clients. Counts
    use `counted_as`, because the contents of other domains must not show in them.
    """

    NONE = "none"  # all was cached but the last token, which is always computed
    NOT_ASKED = "not_asked"  # no cache, or a result that needs the prompt computed
    PASSED = "passed"  # cached, but without the state or window that the next token needs
    NOT_LOADED = "not_loaded"  # in another tier, but a load would not pay, or failed
    EVICTED = "evicted"  # cached once, until another request got the block
    DIFFERS = "differs"  # other tokens follow the found part in the cache
    BELOW_BLOCK = "below_block"  # the missing part is shorter than a block
    OTHER_DOMAIN = "other_domain"  # cached in another cache domain only
    NEVER_SEEN = "never_seen"  # never cached, or so long ago that its eviction is forgotten


COUNTED_REASONS = tuple(reason for reason in MissReason if reason is not MissReason.OTHER_DOMAIN)


def counted_as(reason: MissReason) -> MissReason:
    """The reason under which an engine counts a miss; one of COUNTED_REASONS.

    Counts are visible on dashboards and to clients of a server without keys. A count of
    OTHER_DOMAIN would let a client guess prompts and learn whether another domain has them.
    """
    return MissReason.NEVER_SEEN if reason is MissReason.OTHER_DOMAIN else reason


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Where the cached part of a prompt ends, and why."""

    reason: MissReason
    #: Number of tokens found in the cache; also the index of the first missing token.
    num_found_tokens: int
    #: For DIFFERS, the prompt's first differing token and up to 8 tokens on each side, without
    #: positions of contents.
    prompt_around: tuple[int, ...] = ()
    #: For DIFFERS, the cached tokens at the same positions.
    cached_around: tuple[int, ...] = ()
    #: For EVICTED, when and for which request; else None.
    eviction: Eviction | None = None


class Snapshot(NamedTuple):
    """A cached recurrent state: the number of tokens before it, and the digest under which it is
    found."""

    num_tokens: int = 0
    digest: bytes = b""


class Constraint(Protocol):
    """Follows a sequence's tokens in its grammar, and says when the sequence ends.

    A pure function of the sequence's parameters and tokens. The engine gives one to each sequence
    whose request has a grammar; `engine.token_masks` has the implementation.
    """

    #: An error message if the grammar can't follow the tokens any further, which ends this sequence
    #: only; else None.
    error: str | None
    #: Whether the last token completed the grammar without being an end token.
    ends_with_text: bool

    @property
    def is_ready(self) -> bool:
        """Whether the next step may be planned, because the next mask will be ready in time."""
        ...

    def accept_token(self, token_id: int) -> bool:
        """Follow the sequence's next token. Returns whether the sequence ends with it: because the
        grammar is complete, the token is an end token, or an error occurred."""
        ...

    def allowed_prefix(self, token_ids: Tokens[int]) -> int:
        """Number of leading token_ids that may follow the sequence's tokens without ending it."""
        ...

    def forced_tokens(self, most: int) -> Tokens[int]:
        """The usual tokens of the text that must follow the sequence's tokens; at most `most`."""
        ...


class Sequence(SequenceCounts):
    """One branch of one request.

    Invariant: num_computed_tokens <= num_tokens, and <= num_slots. `row` is None unless RUNNING.
    Tables are empty unless RUNNING or PREEMPTED, and then cover all computed tokens.
    """

    __slots__ = (
        "__weakref__",
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
        "content_spans",
        "deadline_s",
        "draft_token_ids",
        "end_token_ids",
        "finish_reason",
        "first_scheduled_s",
        "forks",
        "has_plain_outputs",
        "is_beam",
        "max_model_len",
        "max_num_tokens",
        "miss",
        "num_admissions",
        "num_cached_tokens",
        "num_common_tokens",
        "num_lost_tokens",
        "num_matched_tokens",
        "num_overtaken",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_registered_blocks",
        "num_served_tokens",
        "num_slots",
        "order",
        "params",
        "parent",
        "prediction_token_ids",
        "priority",
        "prompt_logprobs",
        "public_chain",
        "rank",
        "request_id",
        "row",
        "shares_tail",
        "snapshot",
        "speculation_history",
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
        """max_num_tokens: the sequence ends at this length (max_model_len); None for no limit but
        max_tokens. output_token_ids: tokens generated before, without an end token."""
        self.request_id = request_id
        self.branch_index = branch_index
        #: The prompt, then the generated tokens that `apply` confirmed.
        self.token_ids = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        #: Whether it belongs to a beam search, which chooses its tokens.
        self.is_beam = params.beam_width > 0
        #: Whether a step's output for it is its token alone.
        self.has_plain_outputs = (
            not self.is_beam
            and params.pooling is None
            and params.prompt_logprobs is None
            and params.logprobs is None
        )
        #: The grammar that the tokens obey; None without a grammar. With a grammar, the next step
        #: is planned only once all tokens are known.
        self.constraint: Constraint | None = None
        #: Spans of its prompt that stand for contents, in ascending order.
        self.content_spans: tuple[ContentSpan, ...] = ()
        #: The tokens that its client expects (`Request.prediction_token_ids`).
        self.prediction_token_ids: Tokens[int] = ()
        #: Whether it shares answers with other requests, for drafts (`Request`).
        self.speculation_history = True
        #: Digest of the adapter that computes all of its tokens, or BASE_MODEL.
        self.adapter = BASE_MODEL
        #: Slot of the adapter while the sequence runs.
        self.adapter_slot = NO_SLOT
        limit = self.num_prompt_tokens + params.max_tokens
        #: The model's limit on its length, which forks inherit.
        self.max_model_len = limit if max_num_tokens is None else max_num_tokens
        #: The number of tokens, prompt included, at which it ends.
        self.max_num_tokens = min(limit, self.max_model_len)
        #: The model's end tokens and the client's stop tokens.
        self.end_token_ids = frozenset(params.end_token_ids) | frozenset(params.stop_token_ids)
        #: Entries for the prompt tokens after the first, as far as they were computed.
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._init_schedule(priority)
        self._init_memory(chain_root)

    def _init_schedule(self, priority: int) -> None:
        """Set the fields that the scheduler and its policy use."""
        self.state = SequenceState.WAITING
        #: Row in the runner; None unless RUNNING.
        self.row: int | None = None
        self.priority = priority
        self.tenant = ""
        #: Engine time by which it should have ended; None means no deadline.
        self.deadline_s: float | None = None
        #: Engine time at which the scheduler accepted it.
        self.arrival_s = 0.0
        #: Engine time of its first admission; None before that.
        self.first_scheduled_s: float | None = None
        #: Number of sequences that the scheduler accepted before it.
        self.order = 0
        #: The policy's sort key; smaller goes first.
        self.rank: tuple[float, ...] = ()
        #: Number of cached tokens of its prompt, for policies that rank by it.
        self.num_matched_tokens = 0
        self.num_admissions = 0
        #: How often later sequences were admitted because it did not fit.
        self.num_overtaken = 0
        #: Number of prompt tokens that the policy has counted as served.
        self.num_served_tokens = 0
        #: Shared numbers that are added to its own; NO_STEPS unless it decodes in every step.
        self.counts = NO_STEPS
        self.last_step_id = -1

    def _init_memory(self, chain_root: bytes) -> None:
        """Set the fields about computed tokens, blocks, cached content and forks."""
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.num_pending_tokens = 0
        #: The drafts that a step in flight verifies. The sequence waits for the step's result, from
        #: which alone its number of tokens is known.
        self.draft_token_ids: tuple[int, ...] = ()
        #: Number of prompt tokens that its first admission found in the cache.
        self.num_cached_tokens = 0
        #: Number of tokens that were computed when it was last preempted.
        self.num_lost_tokens = 0
        #: Physical blocks in logical order, by KV group.
        self.block_tables: tuple[list[int], ...] = ()
        #: Number of tokens for which all tables have slots.
        self.num_slots = 0
        #: While fewer tokens than this are computed, a step may compute the next one without any
        #: check; see `find_plain_end`. 0 if that is not known.
        self.plain_end = 0
        #: Whether its next token may change a block or state that has other holders or is a
        #: snapshot, so that a write must copy it first.
        self.shares_tail = False
        #: Positions, in tokens and at block boundaries, whose windows and states are worth keeping:
        #: the end of the prompt, and the first difference between the prompt and the cached tokens.
        self.anchors: tuple[int, ...] = ()
        #: The last snapshot of its states that it published or started from.
        self.snapshot = Snapshot()
        #: Content hashes of the full blocks of token_ids, as far as they were needed.
        self.chain: list[bytes] = []
        #: Tokens of the blocks in `chain`, packed by `packed_tokens`.
        self.chain_tokens: list[bytes] = []
        #: The hash from which `chain` starts; it depends on the cache domain and the adapter.
        self.chain_root = chain_root
        #: Content hashes of its leading full blocks in the public chain, which all domains share.
        self.public_chain: list[bytes] = []
        #: Number of leading blocks that were published in the prefix cache, or taken from it.
        self.num_published_blocks = 0
        #: Number of leading blocks that the prefix index lists as being computed by this sequence.
        self.num_registered_blocks = 0
        #: Why the cache did not have all of its prompt; None before the first admission.
        self.miss: PrefixMiss | None = None
        #: The sequence that it waits to be forked from; None if it does not wait for a fork.
        self.parent: Sequence | None = None
        #: Number of leading tokens that it has in common with `parent`.
        self.num_common_tokens = 0
        #: Sequences that wait to be forked from it.
        self.forks: list[Sequence] = []

    def branch(self, branch_index: int, params: DecodingParams) -> "Sequence":
        """Return a new sequence with the prompt and the confirmed output tokens of this one."""
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
        child.adapter, child.content_spans = self.adapter, self.content_spans
        child.prediction_token_ids = self.prediction_token_ids
        child.speculation_history = self.speculation_history
        child.chain = list(self.chain)
        child.chain_tokens = list(self.chain_tokens)
        return child

    def fork_from(self, parent: "Sequence") -> None:
        """Wait to be forked from `parent`; all tokens so far are common to both."""
        self.parent, self.num_common_tokens = parent, len(self.token_ids)
        parent.forks.append(self)

    def stop_waiting_for_fork(self) -> None:
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
        """Number of tokens, including those that steps in flight will append."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of confirmed generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def continues_session(self) -> bool:
        """Whether at least half of its prompt was cached, so that it probably continues an earlier
        sequence."""
        return 0 < self.num_prompt_tokens <= 2 * self.num_cached_tokens

    @property
    def shows_output_length(self) -> bool:
        """Whether it ended normally, so that its length is evidence for the lengths of outputs.

        False for a beam, since a search returns several hypotheses, and for a pooling request,
        which has no output.
        """
        ended = self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return ended and not self.is_beam and self.params.pooling is None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all prompt positions must be computed, with no token read from the cache."""
        pooling = self.params.pooling
        return self.needs_prompt_logprobs or (pooling is not None and pooling.reads_whole_prompt)

    @property
    def is_in_one_step(self) -> bool:
        """Whether all of its tokens must be computed in one step."""
        return self.params.pooling is not None and self.params.pooling.in_one_step

    @property
    def next_cut(self) -> int:
        """The first position after its next token at which a step may end."""
        return first_cut(self.content_spans, self.num_computed_tokens + 1)

    @property
    def num_together(self) -> int:
        """Largest number of its tokens that one step must compute together; 0 if each may be
        computed alone."""
        if self.is_in_one_step:
            return self.max_num_tokens
        return longest_in_one_step(self.content_spans)

    @property
    def num_resumable_tokens(self) -> int:
        """Largest number of computed tokens that it may keep in a preemption. It must compute later
        positions again, because their results are still missing."""
        if self.params.pooling is not None and self.params.pooling.reads_whole_prompt:
            return 0
        return len(self.prompt_logprobs) if self.needs_prompt_logprobs else self.num_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are missing, so that prompt positions must be
        computed."""
        return (
            self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )

    def move_to(self, state: SequenceState) -> None:
        """Change the state; raises AssertionError for an illegal transition."""
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise AssertionError(f"{self!r} can't become {state.value}")
        self.state = state

    def append(self, token_id: int) -> bool:
        """Add a generated token; returns whether the sequence ends with it.

        Sets finish_reason but not the state, which the scheduler changes together with rows and
        blocks.
        """
        token_ids, constraint = self.token_ids, self.constraint
        token_ids.append(token_id)
        is_over = constraint is not None and constraint.accept_token(token_id)
        if constraint is not None and constraint.error is not None:
            self.finish_reason = FinishReason.ERROR
        elif is_over or (
            token_id in self.end_token_ids and self.num_output_tokens >= self.params.min_tokens
        ):
            self.finish_reason = FinishReason.STOP
        elif len(token_ids) >= self.max_num_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None


def find_plain_end(sequence: Sequence) -> int:
    """`plain_end` of a running sequence that decodes, and computes no accepted drafts again.

    Up to there, each token has a slot in a block of the sequence's own and is sampled without a
    mask. The token after it is only appended, unless it is an end token.
    """
    if not sequence.has_plain_outputs or sequence.constraint is not None or sequence.shares_tail:
        return 0
    return min(sequence.num_slots, sequence.max_num_tokens - 2)


def make_sequences(
    request: Request, max_model_len: int, chain_root: bytes, now_s: float
) -> list[list[Sequence]]:
    """Make the sequences of a request, in groups with equal tokens, as `Scheduler.add` takes them.

    The first sequence of a group computes the common tokens. A beam search has only its first beam
    here; the other beams fork from it. now_s: engine time, from which the deadline counts.
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
            # A pooled result takes no position, so the prompt may have one token more.
            max_num_tokens=max_model_len + (request.params.pooling is not None),
            chain_root=chain_root,
            output_token_ids=token_ids,
        )
        sequence.tenant, sequence.content_spans = request.tenant, request.content_spans
        sequence.prediction_token_ids = request.prediction_token_ids
        sequence.speculation_history = request.speculation_history
        sequence.adapter = BASE_MODEL if request.adapter is None else request.adapter.digest
        if request.deadline_s is not None:
            sequence.deadline_s = now_s + request.deadline_s
        groups.setdefault(token_ids, []).append(sequence)
    return list(groups.values())
