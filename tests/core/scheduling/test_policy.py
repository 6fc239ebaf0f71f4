"""Policies as tables: sequences and the order in which they go; and what they learn."""

import pytest

from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import (
    POLICIES,
    DeadlinePolicy,
    FairPolicy,
    LongestPrefixPolicy,
    Policy,
    PriorityPolicy,
    Rank,
)
from quire.core.scheduling.waiting import WaitingQueue
from quire.core.sequence import Sequence, SequenceState
from quire.errors import ConfigurationError


def make(name: str, arrival_s: float = 0.0, *, prompt: int = 2, max_tokens: int = 10) -> Sequence:
    sequence = Sequence(name, [1] * prompt, DecodingParams(max_tokens))
    sequence.arrival_s = arrival_s
    return sequence


def counter(policy: FairPolicy, tenant: str) -> float:
    """The weighted tokens of service that a tenant has got."""
    account = policy._accounts.get(tenant)
    return policy._floor if account is None else account.counter


def enter(policy: Policy, *sequences: Sequence) -> WaitingQueue:
    """A queue in which they arrived in this order, with the matches that they are marked with."""
    queue = WaitingQueue(policy, lambda sequence: sequence.num_matched_tokens)
    for order, sequence in enumerate(sequences):
        sequence.order = order
        queue.enter(sequence, sequence.arrival_s)
    return queue


def names(queue: WaitingQueue) -> str:
    return "".join(sequence.request_id for sequence in queue.candidates())


def admit(policy: Policy, queue: WaitingQueue, sequence: Sequence) -> None:
    """As the scheduler does on first admission."""
    queue.remove(sequence)
    rank = policy.rank_admitted(sequence)
    if rank is not None:
        sequence.rank = (*rank, sequence.order)
    sequence.move_to(SequenceState.RUNNING)


def preempt(queue: WaitingQueue, sequence: Sequence) -> None:
    sequence.move_to(SequenceState.PREEMPTED)
    queue.add(sequence)


def end(policy: Policy, sequence: Sequence, num_output_tokens: int = 0) -> None:
    sequence.token_ids += [2] * num_output_tokens
    sequence.finish_reason = FinishReason.STOP
    policy.on_leave(sequence)


# ---- tables -------------------------------------------------------------------------------------

# name, arrival_s, priority, tenant, matched tokens, deadline_s
ARRIVED: list[tuple[str, float, int, str, int, float | None]] = [
    ("a", 0.0, 3, "x", 0, None),
    ("b", 1.0, 1, "x", 0, 9.0),
    ("c", 2.0, 3, "x", 4500, 5.0),
    ("d", 3.0, -2, "y", 0, None),
    ("e", 60.0, 1, "y", 0, 62.0),
    ("f", 90.0, 2, "z", 0, 91.0),
]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("fcfs", "abcdef"),
        ("priority", "dbeacf"),  # f: 2 + 90/60 = 3.5, behind a and c, which are 3 and a bit
        ("fair", "adfbec"),  # by turns, as each that is chosen gets the same service
        ("longest_prefix", "cabdef"),  # c: 2 s - 4500 tokens
        ("shortest_first", "cabdef"),
        ("deadline", "cbefad"),
    ],
)
def test_each_policy_orders_the_sequences_as_expected(name: str, order: str) -> None:
    policy = POLICIES.make(name)
    sequences = []
    for request_id, arrival_s, priority, tenant, num_matched_tokens, deadline_s in ARRIVED:
        sequence = make(request_id, arrival_s)
        sequence.priority, sequence.tenant = priority, tenant
        sequence.num_matched_tokens, sequence.deadline_s = num_matched_tokens, deadline_s
        sequences.append(sequence)
    queue = enter(policy, *sequences)
    drawn = ""
    for sequence in queue.candidates():
        drawn += sequence.request_id
        admit(policy, queue, sequence)
        policy.on_service(sequence, 10, 0)
    assert drawn == order
    assert len(queue) == 0


def test_shortest_first_orders_by_tokens_to_compute_and_by_waiting() -> None:
    long, cached = make("long", prompt=900), make("cached", 0.1, prompt=1000)
    short, late = make("short", 0.5, prompt=300), make("late", 0.9, prompt=10)
    cached.num_matched_tokens = 990
    assert names(enter(POLICIES.make("shortest_first"), long, cached, short, late)) == (
        "cachedshortlonglate"  # 110, 800, 900 and 910 tokens
    )
    resumed = make("resumed", prompt=10)
    resumed.token_ids += [2] * 850  # its client has this output already
    short = make("short", 0.5, prompt=300)
    assert names(enter(POLICIES.make("shortest_first"), resumed, short)) == "shortresumed"


@pytest.mark.parametrize("name", ["longest_prefix", "shortest_first"])
def test_a_fork_stays_behind_its_parent_while_the_prompt_is_computed(name: str) -> None:
    matches = {"parent": 0, "fork": 0}
    policy = POLICIES.make(name)
    queue = WaitingQueue(policy, lambda sequence: matches[sequence.request_id])
    parent, fork = make("parent", prompt=100), make("fork", prompt=100)
    fork.order = 1
    fork.fork_from(parent)
    queue.enter(parent, 0.0)
    queue.enter(fork, 0.0)
    admit(policy, queue, parent)
    parent.num_computed_tokens = matches["fork"] = 64
    queue.refresh(0.1)
    assert parent.rank < fork.rank
    parent.num_computed_tokens = 100  # it could not join, and now all of its prompt is cached
    queue.refresh(0.2)
    assert fork.rank < parent.rank


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_rank_of_one_that_ran_never_changes(name: str) -> None:
    policy = POLICIES.make(name)
    ran, other = make("a"), make("b")
    ran.deadline_s = 1.0
    queue = enter(policy, ran, other)
    admit(policy, queue, ran)
    before = ran.rank
    ran.num_matched_tokens = 2
    policy.on_service(ran, 2, 1)
    preempt(queue, ran)
    for now_s in (2.0, 3.0, 9999.0):
        policy.on_step(now_s)
        queue.refresh(now_s)
    assert ran.rank == before
    assert queue.head() is ran


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_scheduler_gets_an_object_of_its_own(name: str) -> None:
    assert POLICIES.make(name) is not POLICIES.make(name)


def test_a_policy_is_one_method() -> None:
    class ShortestPromptPolicy(Policy):
        def rank(self, sequence: Sequence, now_s: float) -> Rank:
            return (sequence.num_prompt_tokens,)

    queue = enter(ShortestPromptPolicy(), make("a", prompt=5), make("b", prompt=3))
    assert names(queue) == "ba"


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    known = "fcfs, priority, fair, longest_prefix, shortest_first, deadline"
    with pytest.raises(ConfigurationError, match=f"'sjf', but must be one of {known}"):
        POLICIES.make("sjf")


def test_a_policy_takes_its_own_options_and_no_others() -> None:
    aged = POLICIES.make("priority", {"ageing_s": 2.0})
    assert isinstance(aged, PriorityPolicy) and aged.ageing_s == 2.0
    with pytest.raises(ConfigurationError, match=r"'priority' has no option 'wait'.*: ageing_s"):
        POLICIES.make("priority", {"wait": 1.0})
    with pytest.raises(ConfigurationError, match=r"'fcfs' has no option 'ageing_s'.*: none"):
        POLICIES.make("fcfs", {"ageing_s": 1.0})
    with pytest.raises(ConfigurationError, match="ageing_s is 0"):
        POLICIES.make("priority", {"ageing_s": 0})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_options_out_of_bounds_are_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigurationError, match=r"ageing_s is .* above 0"):
        PriorityPolicy(ageing_s=value)
    with pytest.raises(ConfigurationError, match=r"wait_tokens_per_s is .* above 0"):
        LongestPrefixPolicy(wait_tokens_per_s=value)
    with pytest.raises(ConfigurationError, match=r"output_weight is .* above 0"):
        FairPolicy(output_weight=value)
    with pytest.raises(ConfigurationError, match=r"patience_s is .* above 0"):
        DeadlinePolicy(patience_s=value)


# ---- priority -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("later_s", "order"), [(29.0, "ba"), (31.0, "ab")])
def test_ageing_bounds_how_late_a_request_may_overtake(later_s: float, order: str) -> None:
    low, high = make("a", 0.0), make("b", later_s)
    low.priority, high.priority = 5, 2
    assert names(enter(PriorityPolicy(ageing_s=10.0), low, high)) == order


def test_without_ageing_priority_is_all() -> None:
    low, high = make("a", 0.0), make("b", 1e9)
    low.priority = 1
    assert names(enter(PriorityPolicy(ageing_s=float("inf")), low, high)) == "ba"


# ---- fair ---------------------------------------------------------------------------------------


def make_for(tenant: str, arrival_s: float = 0.0) -> Sequence:
    sequence = make(tenant, arrival_s)
    sequence.tenant = tenant
    return sequence


def test_service_is_weighed_and_the_least_served_is_next() -> None:
    policy = FairPolicy(prompt_weight=1.0, output_weight=2.0)
    x, y = make_for("x"), make_for("y")
    queue = enter(policy, x, y)
    policy.on_service(x, 5, 0)
    policy.on_service(y, 0, 2)
    assert (counter(policy, "x"), counter(policy, "y")) == (5.0, 4.0)
    assert names(queue) == "yx"
    policy.on_service(y, 0, 1)
    assert names(queue) == "xy"


def test_a_new_tenant_gets_no_credit_for_the_time_before() -> None:
    policy = FairPolicy()
    running, waits = make_for("x"), make_for("x")
    queue = enter(policy, running, waits)
    admit(policy, queue, running)
    policy.on_service(running, 100, 50)
    late = make_for("y", 9.0)
    late.order = 2
    queue.enter(late, 9.0)
    assert counter(policy, "y") == counter(policy, "x") == 200.0


def test_a_tenant_in_an_empty_queue_starts_at_the_last_service_level() -> None:
    policy = FairPolicy()
    x = make_for("x")
    queue = enter(policy, x)
    policy.on_service(x, 30, 0)
    admit(policy, queue, x)
    policy.on_enter(make_for("y"), 1.0)
    assert counter(policy, "y") == 30.0


def test_a_tenant_that_pauses_is_lifted_but_keeps_a_debt() -> None:
    policy = FairPolicy()
    idle, busy, waits = make_for("x"), make_for("y"), make_for("y")
    queue = enter(policy, idle, busy, waits)
    for sequence in (idle, busy):
        admit(policy, queue, sequence)
    policy.on_service(idle, 10, 0)
    policy.on_service(busy, 70, 0)
    policy.on_enter(make_for("x"), 1.0)  # waits again, while y waits at 70
    assert counter(policy, "x") == 70.0
    policy.on_service(idle, 25, 0)
    policy.on_enter(make_for("x"), 2.0)
    assert counter(policy, "x") == 95.0


def test_sequences_that_ran_rank_before_new_ones_in_order_of_admission() -> None:
    policy = FairPolicy()
    served, other, new = make_for("x"), make_for("y"), make_for("z")
    queue = enter(policy, served, other, new)
    for sequence in (other, served):
        admit(policy, queue, sequence)
        policy.on_service(sequence, 10_000, 0)
    for sequence in (served, other):
        preempt(queue, sequence)
    assert names(queue) == "yxz"
    assert other.rank < served.rank < new.rank


def test_tenants_that_have_gone_are_forgotten_but_not_their_debts() -> None:
    policy = FairPolicy()
    in_debt, waits = make_for("debtor"), make_for("zz")
    queue = enter(policy, in_debt, waits)
    policy.on_service(in_debt, 1000, 0)
    admit(policy, queue, in_debt)
    end(policy, in_debt)
    for index in range(1000):
        passer = make_for(f"t{index}")
        passer.order = 2 + index
        queue.enter(passer, 0.0)
        queue.remove(passer)
        end(policy, passer)
    assert len(policy._accounts) < 200
    assert counter(policy, "debtor") == 1000.0
    assert counter(policy, "zz") == 0.0


# ---- longest prefix -----------------------------------------------------------------------------


def test_a_match_is_worth_the_seconds_that_it_saves_and_no_more() -> None:
    policy = LongestPrefixPolicy(wait_tokens_per_s=100.0)
    old, early, late = make("a", 0.0), make("b", 1.9), make("c", 2.1)
    early.num_matched_tokens = late.num_matched_tokens = 200
    assert names(enter(policy, old, early, late)) == "bac"


# ---- deadline -----------------------------------------------------------------------------------


def learn_steps(policy: DeadlinePolicy, step_s: float, num_output_tokens: int) -> None:
    """Let it see steps of that length, and outputs of that many tokens."""
    for index in range(50):
        policy.on_enter(make("x"), 0.0)
        policy.on_step(index * step_s)
    for _ in range(50):
        end(policy, make("x"), num_output_tokens)


def test_an_infeasible_one_moves_behind_once_and_stays_there() -> None:
    policy = DeadlinePolicy(patience_s=100.0)
    soon, later, never = make("a"), make("b"), make("c")
    soon.deadline_s, later.deadline_s = 5.0, 8.0
    queue = enter(policy, soon, later, never)
    queue.refresh(4.9)
    assert names(queue) == "abc"
    queue.refresh(5.1)
    assert names(queue) == "bca"
    assert soon.rank[0] == 200.0
    queue.refresh(1.0)  # were it judged again, it would be feasible
    assert names(queue) == "bca"


def test_many_may_be_late_and_then_go_in_the_order_in_which_they_came() -> None:
    policy = DeadlinePolicy(patience_s=100.0)
    late, later, waits = make("a", 0.0), make("b", 1.0), make("c", 2.0)
    late.deadline_s, later.deadline_s = 5.0, 4.0
    queue = enter(policy, late, later, waits)
    for now_s in (6.0, 6.0, 2.0, 2.0):
        queue.refresh(now_s)
    assert names(queue) == "cab"


def test_feasible_means_that_the_learned_time_still_fits() -> None:
    policy = DeadlinePolicy(chunk_tokens=100)
    learn_steps(policy, step_s=0.1, num_output_tokens=20)
    assert policy.step_s == pytest.approx(0.1)
    expected = policy.lengths.expected_remaining(0, 100)
    assert 18 <= expected <= 24
    needed_s = 0.1 * (5 + expected)  # a prompt of 500 tokens takes five steps
    can, cannot = (make(name, prompt=500, max_tokens=100) for name in "ab")
    can.deadline_s, cannot.deadline_s = needed_s + 0.01, needed_s - 0.01
    assert names(enter(policy, cannot, can)) == "ab"


def test_idle_time_is_no_step() -> None:
    policy = DeadlinePolicy()
    learn_steps(policy, step_s=0.1, num_output_tokens=20)
    policy.on_enter(make("x"), 500.0)
    policy.on_step(500.0)
    policy.on_step(500.1)
    assert policy.step_s == pytest.approx(0.1)


def test_a_pause_is_no_long_step() -> None:
    policy = DeadlinePolicy()
    learn_steps(policy, step_s=0.1, num_output_tokens=20)
    policy.on_enter(make("x"), 5.0)
    for now_s in (5.0, 35.0, 35.1):
        policy.on_step(now_s)
    assert policy.step_s is not None and policy.step_s < 0.14
    waits = make("a", arrival_s=35.0)
    waits.deadline_s = 40.0
    assert policy.rank(waits, 35.2) == (40.0,)


def test_only_outputs_that_ended_of_themselves_teach_lengths() -> None:
    policy = DeadlinePolicy()
    before = policy.lengths.expected_remaining(0, 1000)
    aborted = make("a", max_tokens=1000)
    policy.on_enter(aborted, 0.0)
    aborted.token_ids += [2]
    aborted.finish_reason = FinishReason.ABORT
    policy.on_leave(aborted)
    assert policy.lengths.expected_remaining(0, 1000) == before
    policy.on_enter(make("b"), 0.0)
    end(policy, make("b"), num_output_tokens=1)
    assert policy.lengths.expected_remaining(0, 1000) < before


# ---- a small queue: rows, and a token a step for each -------------------------------------------


class Server:
    """Rows that serve a queue: a prompt on admission, then an output token a step (a second)."""

    def __init__(self, policy: Policy, num_rows: int) -> None:
        self.policy = policy
        self.queue = WaitingQueue(policy, lambda sequence: sequence.num_matched_tokens)
        self.num_rows = num_rows
        self.now_s = 0.0
        self.running: dict[Sequence, int] = {}
        self.served: dict[str, float] = {}
        self.admitted_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self._num_added = 0

    def add(self, sequence: Sequence) -> None:
        sequence.arrival_s, sequence.order = self.now_s, self._num_added
        self._num_added += 1
        self.queue.enter(sequence, self.now_s)

    def step(self) -> None:
        self.policy.on_step(self.now_s)
        self.queue.refresh(self.now_s)
        for sequence in self.queue.candidates():
            if len(self.running) == self.num_rows:
                break
            admit(self.policy, self.queue, sequence)
            self.running[sequence] = sequence.params.max_tokens
            self.admitted_s[sequence.request_id] = self.now_s
            self._serve(sequence, sequence.num_prompt_tokens, 0)
        self.now_s += 1.0
        for sequence in list(self.running):
            self._serve(sequence, 0, 1)
            self.running[sequence] -= 1
            if self.running[sequence] == 0:
                del self.running[sequence]
                self.ended_s[sequence.request_id] = self.now_s
                end(self.policy, sequence, sequence.params.max_tokens)

    def _serve(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.policy.on_service(sequence, num_prompt_tokens, num_output_tokens)
        served = num_prompt_tokens + 2 * num_output_tokens
        self.served[sequence.tenant] = self.served.get(sequence.tenant, 0) + served


def serve_two_tenants(policy: Policy) -> float:
    """The greedy tenant's part of the service, when it sends ten times the other's load and both
    always have a request that waits."""
    server = Server(policy, num_rows=8)
    num_sent = 0
    for step in range(4000):
        num_sent_now = 20 if step % 10 == 0 else 0
        for index in range(num_sent_now):
            sequence = make(f"g{num_sent}", prompt=20 + num_sent % 50, max_tokens=9)
            sequence.tenant = "greedy"
            server.add(sequence)
            num_sent += 1
            if index % 10 == 0:
                other = make(f"m{num_sent}", prompt=150, max_tokens=30)
                other.tenant = "modest"
                server.add(other)
        server.step()
    assert any(sequence.tenant == "modest" for sequence in server.queue), (
        "the modest one has no backlog"
    )
    return server.served["greedy"] / sum(server.served.values())


def test_a_tenant_that_sends_ten_times_the_load_gets_an_equal_part() -> None:
    assert 0.475 < serve_two_tenants(FairPolicy()) < 0.525
    assert serve_two_tenants(POLICIES.make("fcfs")) > 0.6, "the load is no test of fairness"


def test_ageing_bounds_the_wait_under_a_stream_of_important_ones() -> None:
    def wait_s(ageing_s: float) -> float | None:
        server = Server(PriorityPolicy(ageing_s), num_rows=1)
        low = make("low", max_tokens=2)
        low.priority = 5
        for index in range(400):
            server.add(make(f"high{index}", max_tokens=2))  # twice what can be served
            if index == 0:
                server.add(low)
            server.step()
        return server.admitted_s.get("low")

    # All that came in the first 5 * 8 s go before it: 40 of them, at 2 s each.
    bounded_s = wait_s(8.0)
    assert bounded_s is not None
    assert 78 <= bounded_s <= 84
    assert wait_s(float("inf")) is None


def test_no_request_starves_beside_a_stream_of_cached_prefixes() -> None:
    def wait_s(tokens_per_s: float) -> float | None:
        server = Server(LongestPrefixPolicy(tokens_per_s), num_rows=1)
        server.add(make("cold", max_tokens=2))
        for index in range(400):
            hot = make(f"hot{index}", max_tokens=2)
            hot.num_matched_tokens = 500
            server.add(hot)
            server.step()
        return server.admitted_s.get("cold")

    bounded_s = wait_s(10.0)  # those of the first 500 / 10 s go before it
    assert bounded_s is not None
    assert 96 <= bounded_s <= 104
    assert wait_s(1e-9) is None


def test_more_deadlines_are_met_than_in_order_of_arrival() -> None:
    def num_met(policy: Policy) -> int:
        server = Server(policy, num_rows=2)
        sequences = []
        for index in range(300):  # 1.2 times the load that fits
            sequence = make(f"r{index}", max_tokens=12)
            sequence.deadline_s = server.now_s + (20.0 if index % 2 else 90.0)
            sequences.append(sequence)
            server.add(sequence)
            for _ in range(5):
                server.step()
        for _ in range(1000):
            server.step()
        assert len(server.ended_s) == 300, "a late one was never served"
        return sum(
            server.ended_s[sequence.request_id] <= (sequence.deadline_s or 0)
            for sequence in sequences
        )

    in_order, by_deadline = num_met(POLICIES.make("fcfs")), num_met(DeadlinePolicy())
    assert by_deadline > 230
    assert in_order < 150
