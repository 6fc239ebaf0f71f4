"""A token chain and its state. The scheduler moves it, the manager fills its tables.

Knows no other sequence. All state of a sequence other than its KV is a pure function of its
parameters and its tokens, so dropping the KV at any moment changes nothing but time.
"""

from enum import Enum

from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenLogprobs


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # never ran; holds no blocks and no row
    RUNNING = "running"  # has a row and block tables
    PREEMPTED = "preempted"  # ran, gave its row and blocks back, waits to go on
    FINISHED = "finished"  # holds nothing


LEGAL_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class Sequence:
    """One branch of one request.

    token_ids: prompt, then what was generated and confirmed by `apply`.
    num_computed_tokens: tokens whose K and V are written once the steps in flight have ended.
    num_pending_tokens: tokens that the steps in flight will append to token_ids.
    block_tables: for each KV group, the physical blocks in logical order.
    chain: content hashes of the full blocks of token_ids, as far as they were needed.
    num_published_blocks: leading blocks offered to the prefix cache (or taken from it).
    num_slots: tokens that the tables have room for.
    num_cached_tokens: prompt tokens that its first admission found in the cache.
    num_lost_tokens: tokens that were computed when it was last preempted.

    Invariant: num_computed_tokens <= num_tokens, and <= num_slots; tables are empty and row is None
    unless RUNNING.
    """

    __slots__ = (
        "arrival_s",
        "block_tables",
        "branch_index",
        "chain",
        "chain_root",
        "end_token_ids",
        "finish_reason",
        "last_step_id",
        "max_num_tokens",
        "num_admissions",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_slots",
        "order",
        "params",
        "priority",
        "prompt_logprobs",
        "rank",
        "request_id",
        "row",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: DecodingParams,
        *,
        branch_index: int = 0,
        priority: int = 0,
        max_num_tokens: int | None = None,
        chain_root: bytes = b"",
    ) -> None:
        """max_num_tokens: the sequence ends at this length (max_model_len), if given."""
        self.request_id = request_id
        self.branch_index = branch_index
        self.token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.priority = priority
        limit = self.num_prompt_tokens + params.max_tokens
        self.max_num_tokens = limit if max_num_tokens is None else min(limit, max_num_tokens)
        self.end_token_ids = frozenset(params.end_token_ids) | frozenset(params.stop_token_ids)
        self.arrival_s = 0.0
        self.order = 0
        self.rank: tuple[float, ...] = ()
        self.state = SequenceState.WAITING
        self.row: int | None = None
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0
        self.num_lost_tokens = 0
        self.num_admissions = 0
        self.last_step_id = -1
        self.block_tables: tuple[list[int], ...] = ()
        self.num_slots = 0
        self.chain: list[bytes] = []
        self.chain_root = chain_root
        self.num_published_blocks = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None

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
        self.token_ids.append(token_id)
        if token_id in self.end_token_ids and self.num_output_tokens >= self.params.min_tokens:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None
