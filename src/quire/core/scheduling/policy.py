"""Scheduling policies: sort keys that order sequences for admission and, reversed, preemption.

A policy only orders sequences; the scheduler decides on budget, admission, allocation and
preemption. A policy sees no blocks, rows or queues. One object serves one scheduler and may learn
from the events that the scheduler reports. A new policy is a class with one method and a line in
POLICIES:

    class ShortestPromptPolicy(Policy):
        def rank(self, sequence: Sequence, now_s: float) -> Rank:
            return (sequence.num_prompt_tokens,)

    POLICIES.register("shortest_prompt", ShortestPromptPolicy)

Every sequence makes progress because the rank of a sequence that has ever run never changes. A
sequence that never ran may be ranked again (`reranks`). If it may also take blocks from running
ones (`can_outrank`), its rank may move only a bounded number of times, or two sequences could take
blocks from each other for ever.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.core.scheduling.output_length import OutputLengthPredictor
from quire.core.sequence import Sequence, SequenceState
from quire.errors import ConfigurationError
from quire.registry import Registry

Rank = tuple[float, ...]
Bucket = str | None


class Policy(ABC):
    """The order in which a scheduler serves sequences, and hooks for the scheduler's events.

    The hooks (`on_...`) do nothing unless a policy overrides them.
    """

    #: Whether a sequence that never ran may take blocks and rows from running ones that it
    #: outranks. A preempted sequence always may; otherwise the first-ranked sequence could wait for
    #: ever.
    can_outrank: bool = False
    #: Whether the `rank` of a few waiting sequences is read again before each step.
    reranks: bool = False
    #: Whether `rank` reads `sequence.num_matched_tokens`, the tokens that the prefix cache has of
    #: it now.
    reads_matches: bool = False
    #: Whether `rank` reads a request's `priority`. If not, a request with a priority is refused
    #: instead of being served as if it had none. The same holds for reads_deadline.
    reads_priority: bool = False
    reads_deadline: bool = False
    #: Whether `on_service` is called.
    counts_service: bool = False
    #: Whether `on_step` is called.
    counts_steps: bool = False

    @abstractmethod
    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        """Sort key of a sequence that never ran; smaller goes first, and ties go by arrival.

        Read once, when its `arrival_s` and `order` are set, and again while it waits if `reranks`.
        """

    def rank_admitted(self, sequence: Sequence) -> Rank | None:
        """The rank that a sequence keeps from its first admission on; None keeps its rank.

        Also called for a fork that joins its parent's step.
        """
        return None

    def bucket(self, sequence: Sequence) -> Bucket:
        """The queue in which a sequence waits, in rank order; `bucket_key` orders the queues."""
        return None

    def bucket_key(self, bucket: Bucket) -> float:
        """Sort key of a bucket, read again for each choice; smaller goes first, and ties go by the
        rank of their first sequences."""
        return 0.0

    def on_enter(self, sequence: Sequence, now_s: float) -> None:  # noqa: B027
        """Called when a sequence begins its first wait, before its rank is read."""

    def on_leave(self, sequence: Sequence) -> None:  # noqa: B027
        """Called when a sequence has ended, in any state; its `finish_reason` says why."""

    def on_service(  # noqa: B027
        self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """Called when tokens of a sequence are served.

        Prompt tokens count when their chunk is planned, so that one admission affects the next
        choice; output tokens count when they arrive. Tokens that come from the cache or are
        computed again don't count.
        """

    def on_step(self, now_s: float) -> None:  # noqa: B027
        """Called when a step is planned."""


class FcfsPolicy(Policy):
    """First come, first served."""

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        return ()


class PriorityPolicy(Policy):
    """The smaller priority number first; waiting for `ageing_s` seconds lowers the number by one.

    All sequences age at the same rate, so the order of two sequences never changes and the key is
    constant: priority + arrival_s / ageing_s. Bound on waiting: let p_min be the smallest number in
    use. A sequence with number p that arrived at t is outranked only by sequences that arrived
    before t + (p - p_min) * ageing_s. From then on it waits only for these sequences, and if the
    load fits the machine, they end.
    """

    can_outrank = True
    reads_priority = True

    def __init__(self, ageing_s: float = 60.0) -> None:
        """Raises ConfigurationError for an ageing_s that isn't above 0 (infinity: no ageing)."""
        self.ageing_s = _positive("ageing_s", ageing_s)

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        return (sequence.priority + sequence.arrival_s / self.ageing_s,)


class LongestPrefixPolicy(Policy):
    """The longest cached prefix first; a second of waiting counts like `wait_tokens_per_s` cached
    tokens.

    A cached prefix costs little to serve now, and may be evicted later. No sequence starves: if it
    arrived at t, it is outranked only by sequences that arrived before t + max_model_len /
    wait_tokens_per_s, since no match is longer than the model's context.
    """

    reranks = True
    reads_matches = True

    def __init__(self, wait_tokens_per_s: float = 1000.0) -> None:
        """Raises ConfigurationError for a wait_tokens_per_s that isn't above 0."""
        self.wait_tokens_per_s = _positive("wait_tokens_per_s", wait_tokens_per_s)

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        return (sequence.arrival_s * self.wait_tokens_per_s - sequence.num_matched_tokens,)


class ShortestFirstPolicy(LongestPrefixPolicy):
    """The fewest tokens to compute first, those that the prefix cache lacks; a second of waiting
    counts like `wait_tokens_per_s` tokens fewer.

    This is the order with the smallest mean time to the first token (Smith, Various Optimizers for
    Single-Stage Production, 1956), with ageing. No sequence starves: the bound of
    `LongestPrefixPolicy` holds.
    """

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        (rank,) = super().rank(sequence, now_s)
        return (rank + sequence.num_tokens,)  # a resumed request also has output


@dataclass(slots=True)
class _Account:
    """A tenant's virtual token counter and its sequences."""

    counter: float
    #: Sequences that wait for their first admission.
    backlog: set[Sequence] = field(default_factory=set)
    #: Number of sequences that have not ended.
    num_present: int = 0


class FairPolicy(Policy):
    """Equal service to tenants, by one virtual token counter for each (VTC).

    Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2: the tenant with
    the smallest counter is admitted next. Its service is added to its counter: `prompt_weight` for
    a prompt token and `output_weight` for an output token (1 and 2 in the paper). When a tenant
    begins to wait, its counter is lifted to the smallest counter of the waiting tenants, so that
    idle time earns no credit. If no tenant waits, it is lifted to the counter of the last tenant
    that waited. While two tenants both wait, their services differ by at most 2 * max(prompt_weight
    * longest prompt, output_weight * tokens in memory), however much each tenant sends (theorem
    4.4).

    Sequences that have run come first, in the order of their first admission.

    Invariant: the counters of waiting tenants are at least `_floor`, which never falls. So a tenant
    without sequences whose counter is not above `_floor` may be forgotten: on its return, its
    counter is lifted to `_floor`.
    """

    counts_service = True

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0) -> None:
        """Raises ConfigurationError for a weight that isn't above 0."""
        self.prompt_weight = _positive("prompt_weight", prompt_weight)
        self.output_weight = _positive("output_weight", output_weight)
        self._accounts: dict[str, _Account] = {}
        self._floor = 0.0
        self._num_admitted = 0
        #: Number of accounts at which idle ones are dropped.
        self._forget_above = 64

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        return (0.0,)

    def rank_admitted(self, sequence: Sequence) -> Rank | None:
        self._end_wait(sequence)
        self._num_admitted += 1
        return (-1.0, float(self._num_admitted))

    def bucket(self, sequence: Sequence) -> Bucket:
        """One bucket for each tenant; None holds the sequences that have run."""
        return sequence.tenant if sequence.state is SequenceState.WAITING else None

    def bucket_key(self, bucket: Bucket) -> float:
        return -math.inf if bucket is None else self._accounts[bucket].counter

    def on_enter(self, sequence: Sequence, now_s: float) -> None:
        account = self._account(sequence.tenant)
        if not account.backlog:
            waiting = [other.counter for other in self._accounts.values() if other.backlog]
            self._floor = max(self._floor, min(waiting, default=self._floor))
            account.counter = max(account.counter, self._floor)
        account.backlog.add(sequence)
        account.num_present += 1

    def on_leave(self, sequence: Sequence) -> None:
        self._end_wait(sequence)
        self._account(sequence.tenant).num_present -= 1

    def on_service(
        self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        self._account(sequence.tenant).counter += (
            self.prompt_weight * num_prompt_tokens + self.output_weight * num_output_tokens
        )

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._forget_above:
                self._forget_idle()
            account = self._accounts[tenant] = _Account(self._floor)
        return account

    def _end_wait(self, sequence: Sequence) -> None:
        """Note that a sequence's wait for its first admission is over, if it waited."""
        account = self._account(sequence.tenant)
        if sequence not in account.backlog:
            return
        account.backlog.remove(sequence)
        if not any(other.backlog for other in self._accounts.values()):
            self._floor = max(self._floor, account.counter)

    def _forget_idle(self) -> None:
        """Drop tenants that have no sequences and owe nothing.

        The cost is amortized over the tenants that arrived since the last call.
        """
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_present or account.counter > self._floor
        }
        self._forget_above = 2 * len(self._accounts) + 64


class DeadlinePolicy(Policy):
    """The earliest deadline first, among sequences that can still meet theirs.

    While a sequence waits for its first admission, the policy predicts whether it can meet its
    deadline. An output token takes one step, and a prompt one step for each `chunk_tokens`; the
    step time and the output length are learned. A sequence that would be late moves back once and
    stays there: the time is better spent on a sequence that can still be on time.

    No sequence starves, since each has a deadline: by default `patience_s` after its arrival, and
    for a late sequence twice that, so that it comes after all shorter deadlines. After that time,
    the deadlines of new sequences are later, so none of them goes ahead.
    """

    can_outrank = True
    reads_deadline = True
    reranks = True
    counts_steps = True
    STEP_WEIGHT = 0.1
    LONGEST_STEP = 4.0
    """A step's measured time is capped at this many times the average, since a longer step
    contained a pause."""

    def __init__(self, patience_s: float = 3600.0, chunk_tokens: int = 2048) -> None:
        """chunk_tokens: prompt tokens that a step computes, about max_num_batched_tokens.

        Raises ConfigurationError for a value that isn't above 0.
        """
        self.patience_s = _positive("patience_s", patience_s)
        self.chunk_tokens = _positive("chunk_tokens", chunk_tokens)
        self.lengths = OutputLengthPredictor()
        #: Moving average of the time from one planned step to the next; None before the first.
        self.step_s: float | None = None
        #: Engine time at which the last step was planned; None while idle.
        self._planned_s: float | None = None
        self._num_present = 0
        #: Waiting sequences that will miss their deadlines.
        self._late: set[Sequence] = set()

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        if sequence.deadline_s is None:
            return (sequence.arrival_s + self.patience_s,)
        if now_s + self._needed_s(sequence) > sequence.deadline_s:
            self._late.add(sequence)
        if sequence in self._late:
            return (max(sequence.deadline_s, sequence.arrival_s + 2 * self.patience_s),)
        return (sequence.deadline_s,)

    def on_enter(self, sequence: Sequence, now_s: float) -> None:
        self._num_present += 1

    def on_leave(self, sequence: Sequence) -> None:
        self._num_present -= 1
        self._late.discard(sequence)
        if sequence.shows_output_length:
            self.lengths.observe(sequence.num_output_tokens)
        if self._num_present == 0:
            self._planned_s = None  # the time until the next step is idle

    def on_step(self, now_s: float) -> None:
        if self._planned_s is not None:
            step_s = now_s - self._planned_s
            known_s = step_s if self.step_s is None else self.step_s
            step_s = min(step_s, self.LONGEST_STEP * known_s)
            self.step_s = known_s + self.STEP_WEIGHT * (step_s - known_s)
        self._planned_s = now_s

    def _needed_s(self, sequence: Sequence) -> float:
        """Predicted time from a sequence's admission to its end, if it runs without a break."""
        if self.step_s is None:
            return 0.0
        limit = sequence.max_num_tokens - sequence.num_prompt_tokens
        num_steps = sequence.num_prompt_tokens / self.chunk_tokens
        return self.step_s * (num_steps + self.lengths.expected_remaining(0, limit))


POLICIES: Registry[Callable[..., Policy]] = Registry(
    "scheduling policy",
    {
        "fcfs": FcfsPolicy,
        "priority": PriorityPolicy,
        "fair": FairPolicy,
        "longest_prefix": LongestPrefixPolicy,
        "shortest_first": ShortestFirstPolicy,
        "deadline": DeadlinePolicy,
    },
)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ConfigurationError(f"{name} is {value}, but must be above 0")
    return value
