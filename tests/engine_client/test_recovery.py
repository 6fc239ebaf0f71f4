"""Who is resumed from where, and who is to blame: decided without any process."""

import signal
from typing import Any

import pytest

from quire.core.request import FinishReason, Request, ResumedBranch, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import (
    NUM_PROOF_TOKENS,
    Cause,
    Death,
    Diagnosis,
    OpenRequest,
    ResumeQueue,
)

SEGFAULT, KILLED = -int(signal.SIGSEGV), -int(signal.SIGKILL)
COMPUTING = Activity(Doing.COMPUTING, None)

# ---- what came so far ---------------------------------------------------------------------------


def make(name: str = "r", n: int = 1, **params: Any) -> OpenRequest:
    return OpenRequest(Request(name, [1], DecodingParams(99, **params), n=n), accepted_s=10.0)


def bring(
    request: OpenRequest, branch: int = 0, *token_ids: int, end: FinishReason | None = None
) -> bool:
    return request.record_output(
        SequenceOutput(request.request_id, branch, token_ids or (7,), finish_reason=end)
    )


def test_a_request_goes_on_from_the_tokens_that_came() -> None:
    request = make(n=3, prompt_logprobs=1)
    assert request.to_send(10.0) == request.request
    assert (
        bring(request, 1, 5, 6)
        and bring(request, 1, 7)
        and bring(request, 2, 9, end=FinishReason.STOP)
    )
    again = request.to_send(11.0)
    assert again.resumed == (ResumedBranch(0), ResumedBranch(1, (5, 6, 7)))
    assert again.params.prompt_logprobs is None
    assert not bring(request, 2, 4), "nothing is wanted after the end"
    assert request.drop(1) == 1 and request.drop(1) == 0 and request.drop(None) == 1
    assert not request.branches and not bring(request, 1, 3)


def test_a_branch_that_fails_without_a_token_brings_nothing() -> None:
    request = make(n=2, prompt_logprobs=1)
    request.record_output(SequenceOutput("r", 0, (), finish_reason=FinishReason.ERROR, error="NaN"))
    assert request.to_send(10.0).params.prompt_logprobs == 1


# ---- what a process died of ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        # What a process does to itself: faults, exceptions, an exit of its own.
        ({"status": SEGFAULT}, Cause.CRASH),
        ({"status": -signal.SIGABRT}, Cause.CRASH),
        ({"status": -signal.SIGBUS}, Cause.CRASH),
        ({"status": -signal.SIGFPE}, Cause.CRASH),
        ({"status": -signal.SIGILL}, Cause.CRASH),
        ({"status": SEGFAULT, "num_oom_kills": 1}, Cause.CRASH),
        ({"status": 1, "has_failed": True}, Cause.CRASH),
        ({"status": 7}, Cause.CRASH),
        ({"status": 0, "has_failed": True}, Cause.CRASH),
        # What the API server has killed: for a step without end, for nonsense, for a start without
        # end.
        ({"status": None, "has_hung": True}, Cause.CRASH),
        ({"status": None, "has_failed": True}, Cause.CRASH),
        ({"status": None}, Cause.OUTSIDE),
        # SIGKILL: the system says how many it has killed for lack of memory, or does not say.
        ({"status": KILLED, "num_oom_kills": 0}, Cause.OUTSIDE),
        ({"status": KILLED, "num_oom_kills": 1}, Cause.MEMORY),
        ({"status": KILLED, "num_oom_kills": None}, Cause.MEMORY),
        # Told to end.
        ({"status": 0, "num_oom_kills": 0}, Cause.OUTSIDE),
        ({"status": -signal.SIGTERM}, Cause.OUTSIDE),
        ({"status": -signal.SIGTERM, "num_oom_kills": 1}, Cause.OUTSIDE),
        ({"status": -signal.SIGHUP}, Cause.OUTSIDE),
        ({"status": -signal.SIGUSR1}, Cause.OUTSIDE),
        ({"status": -40}, Cause.OUTSIDE),
        # Another rank's death, of which rank 0 says that it can't survive it.
        ({"status": KILLED, "has_failed": True, "num_oom_kills": 0}, Cause.OUTSIDE),
        ({"status": KILLED, "has_failed": True, "num_oom_kills": 1}, Cause.MEMORY),
        ({"status": SEGFAULT, "has_failed": True}, Cause.CRASH),
    ],
)
def test_the_cause_of_a_death_follows_from_its_evidence(
    evidence: dict[str, Any], cause: Cause
) -> None:
    assert Death(COMPUTING, **evidence).cause is cause


@pytest.mark.parametrize(
    ("doing", "request_ids", "concerned"),
    [
        (Doing.LOADING, None, ""),
        (Doing.IDLE, {}, ""),
        (Doing.IDLE, {"a", "b"}, ""),
        (Doing.TAKING_IN, {"a"}, "a"),
        (Doing.PLANNING, None, "abc"),
        (Doing.COMPUTING, {"a", "b"}, "ab"),
        (Doing.COMPUTING, None, "abc"),
        (Doing.COMPUTING, set(), ""),
    ],
)
def test_a_death_concerns_the_requests_of_its_step(
    doing: Doing, request_ids: set[str] | None, concerned: str
) -> None:
    ids = None if request_ids is None else frozenset(request_ids)
    activity = Activity(doing, ids)
    for evidence in ({"status": SEGFAULT}, {"status": KILLED}, {"status": None, "has_hung": True}):
        death = Death(activity, **evidence)
        assert "".join(name for name in "abc" if death.concerns(name)) == concerned
    outside = Death(activity, KILLED, num_oom_kills=0)
    assert not any(outside.concerns(name) for name in "abc")


# ---- who is to blame ----------------------------------------------------------------------------


def send_all(queue: ResumeQueue) -> list[str]:
    found = []
    while (request := queue.next_to_send()) is not None:
        found.append(request.request_id)
    return found


def with_all_sent(*requests: OpenRequest) -> ResumeQueue:
    queue = ResumeQueue()
    for request in requests:
        queue.add(request)
    assert send_all(queue) == [request.request_id for request in requests]
    assert queue.is_idle and all(map(queue.is_sent, requests))
    return queue


def prove(*requests: OpenRequest) -> None:
    for request in requests:
        for branch in list(request.branches):
            for _ in range(NUM_PROOF_TOKENS):
                bring(request, branch)


def crash(queue: ResumeQueue, *requests: OpenRequest) -> Diagnosis:
    """In a step with these requests; without any, while the process computes for all of them."""
    ids = frozenset(request.request_id for request in requests) or None
    return queue.on_death(Death(Activity(Doing.COMPUTING, ids), SEGFAULT))


def kill(queue: ResumeQueue, *, num_oom_kills: int | None = 0) -> Diagnosis:
    """Of a process that computes for all."""
    return queue.on_death(Death(COMPUTING, KILLED, num_oom_kills=num_oom_kills))


def test_suspects_are_tried_one_after_the_other_and_new_ones_wait() -> None:
    a, b, new = make("a"), make("b", n=2), make("new")
    queue = with_all_sent(a, b)
    bring(b)
    assert crash(queue).blamed is None
    assert queue.num_suspects == 2
    queue.add(new)
    assert not queue.is_idle and not queue.is_sent(a)
    assert send_all(queue) == ["a"], "the one with the least output first"
    bring(a)
    assert send_all(queue) == [], "one token may not be all that was lost"
    bring(a)
    assert send_all(queue) == ["b"]
    prove(b)
    assert send_all(queue) == ["new"]
    assert queue.is_idle


def test_only_those_in_the_step_are_suspects_and_the_others_wait_with_the_new_ones() -> None:
    a, b, c, d, new = (make(name) for name in ("a", "b", "c", "d", "new"))
    queue = with_all_sent(a, b, c, d)
    queue.add(new)
    assert crash(queue, b, d).blamed is None
    assert send_all(queue) == ["b"]
    prove(b)
    assert send_all(queue) == ["d"]
    prove(d)
    assert send_all(queue) == ["a", "c", "new"]


@pytest.mark.parametrize(
    "death",
    [
        Death(Activity(Doing.COMPUTING, None), KILLED, num_oom_kills=0),
        Death(Activity(Doing.IDLE), SEGFAULT),
        Death(Activity(Doing.LOADING), KILLED, num_oom_kills=1),
    ],
)
def test_a_death_from_outside_puts_no_request_on_trial(death: Death) -> None:
    a, b, new = make("a"), make("b"), make("new")
    queue = with_all_sent(a, b)
    assert queue.on_death(death) == Diagnosis()
    queue.add(new)
    assert send_all(queue) == ["a", "b", "new"] and queue.is_idle


def test_deaths_from_outside_change_nothing_of_a_trial() -> None:
    a, b, c = make("a"), make("b"), make("c")
    queue = with_all_sent(a, b, c)
    crash(queue)
    send_all(queue)
    prove(a)
    for _ in range(5):
        assert send_all(queue)[-1] == "b"
        assert kill(queue) == Diagnosis()
    assert send_all(queue) == ["a", "b"]
    assert crash(queue).blamed is None
    for _ in range(5):
        assert send_all(queue) == ["b"], "still alone"
        assert kill(queue) == Diagnosis()
    prove(b)
    assert send_all(queue) == ["b"]


def test_a_second_crash_on_a_trial_alone_blames_the_one_on_trial() -> None:
    a, b, c, new = (make(name) for name in ("a", "b", "c", "new"))
    queue = with_all_sent(a, b, c)
    first = Death(COMPUTING, SEGFAULT)
    assert queue.on_death(first) == Diagnosis()
    send_all(queue)
    prove(a)
    assert send_all(queue) == ["b"]
    queue.add(new)
    second = Death(COMPUTING, SEGFAULT)
    assert queue.on_death(second) == Diagnosis(None, frozenset([second])), "what follows will show"
    assert send_all(queue) == ["b"], "the second trial is its alone"
    third = Death(COMPUTING, None, has_hung=True)
    assert queue.on_death(third) == Diagnosis(b, frozenset([first, second, third]))
    queue.end(b)
    assert send_all(queue) == ["c", "a", "new"], "nobody else is suspected of these deaths"
    assert queue.is_idle
    assert crash(queue) == Diagnosis(), "a new death, and all are suspects again"
    assert send_all(queue) == ["c"]


def test_a_cleared_suspect_puts_the_others_of_its_step_on_trial() -> None:
    a, b, c = make("a"), make("b"), make("c")
    queue = with_all_sent(a, b, c)
    crash(queue, a, b)
    assert send_all(queue) == ["a"]
    prove(a)
    assert send_all(queue) == ["b"]
    assert crash(queue, a, b).blamed is None  # it was a
    assert send_all(queue) == ["b"]
    prove(b)
    assert send_all(queue) == ["a"]
    assert crash(queue, a, b).blamed is None
    assert send_all(queue) == ["a"]
    verdict = crash(queue, a)
    assert verdict.blamed is a and len(verdict.explained) == 3, "the deaths but for the first"
    queue.end(a)
    assert send_all(queue) == ["b", "c"]


def test_a_step_without_the_one_on_trial_says_nothing_about_it() -> None:
    a, b = make("a"), make("b")
    queue = with_all_sent(a, b)
    crash(queue)
    send_all(queue)
    prove(a)
    assert send_all(queue) == ["b"]
    assert crash(queue, a) == Diagnosis()
    assert send_all(queue) == ["b"]
    assert crash(queue, b).explained, "the first death in a step of its own"
    assert send_all(queue) == ["b"]
    prove(b)
    assert send_all(queue) == ["a"]
    prove(a)
    assert send_all(queue) == [] and queue.is_idle


@pytest.mark.parametrize("num_oom_kills", [1, None])
def test_where_memory_ran_out_all_others_are_tried_between_two_trials(
    num_oom_kills: int | None,
) -> None:
    a, b, c = make("a"), make("b"), make("c")
    queue = with_all_sent(a, b, c)
    kill(queue, num_oom_kills=num_oom_kills)
    assert send_all(queue) == ["a"]
    assert kill(queue, num_oom_kills=num_oom_kills) == Diagnosis()
    assert send_all(queue) == ["b"]
    prove(b)
    assert send_all(queue) == ["c"]
    prove(c)
    assert send_all(queue) == ["a"]
    verdict = kill(queue, num_oom_kills=num_oom_kills)
    assert verdict.blamed is a and len(verdict.explained) == 3


def test_no_request_is_blamed_if_others_die_of_memory_too() -> None:
    a, b, c = make("a"), make("b"), make("c")
    queue = with_all_sent(a, b, c)
    kill(queue, num_oom_kills=1)
    for request in (a, b, c, a, b, c):
        assert send_all(queue) == [request.request_id]
        assert kill(queue, num_oom_kills=1) == Diagnosis()


def test_a_request_that_has_the_process_to_itself_and_uses_up_its_memory_ends() -> None:
    """There is nobody else to try between its trials: so it has three."""
    a = make("a")
    queue = with_all_sent(a)
    for _ in range(3):
        assert kill(queue, num_oom_kills=1) == Diagnosis()
        assert send_all(queue) == ["a"]
    assert kill(queue, num_oom_kills=1).blamed is a


def test_a_death_while_the_process_starts_changes_nothing() -> None:
    a, b = make("a"), make("b")
    queue = with_all_sent(a, b)
    crash(queue)
    assert crash(queue) == Diagnosis()
    assert crash(queue) == Diagnosis()
    assert send_all(queue) == ["a"]


def test_a_suspect_that_ends_on_trial_makes_room_for_the_next() -> None:
    a, b = make("a"), make("b")
    queue = with_all_sent(a, b)
    crash(queue)
    send_all(queue)
    bring(a, end=FinishReason.STOP)
    queue.end(a)
    assert send_all(queue) == ["b"]


def test_a_request_that_was_dropped_is_not_sent_again() -> None:
    a, b, c = make("a"), make("b"), make("c")
    queue = with_all_sent(a, b)
    queue.add(c)
    b.drop(None)
    assert not queue.remove_request(b)
    c.drop(None)
    assert not queue.remove_request(c)
    crash(queue)
    assert send_all(queue) == ["a"]
    prove(a)
    assert send_all(queue) == [] and queue.is_idle


def test_a_suspect_dropped_on_trial_can_be_blamed_until_the_process_removed_it() -> None:
    a, b = make("a"), make("b")
    queue = with_all_sent(a, b)
    crash(queue)
    send_all(queue)
    a.drop(None)
    assert queue.remove_request(a)
    assert send_all(queue) == [], "the process may still compute it"
    assert crash(queue).blamed is a
    assert send_all(queue) == ["b"]
    b.drop(None)
    assert not queue.remove_request(b), "nobody is suspected any more"


def test_a_trial_ends_when_the_process_removed_the_dropped_suspect() -> None:
    a, b = make("a"), make("b")
    queue = with_all_sent(a, b)
    crash(queue)
    send_all(queue)
    a.drop(None)
    assert queue.remove_request(a)
    queue.clear(a)
    assert send_all(queue) == ["b"]
    b.drop(None)
    assert queue.remove_request(b)
    queue.clear(b)
    assert crash(queue) == Diagnosis()
    assert send_all(queue) == [] and queue.is_idle


def test_branches_that_had_not_begun_need_not_prove_anything() -> None:
    one, other = make("a", n=3), make("b")
    queue = with_all_sent(one, other)
    bring(one, 0), bring(one, 1), bring(other, 0, 1, 2, 3)
    crash(queue)
    send_all(queue)
    bring(one, 0, 1, 2)
    assert send_all(queue) == []
    bring(one, 1, 1, 2)
    assert send_all(queue) == ["b"]


def test_one_branch_clears_a_request_that_had_not_begun() -> None:
    request = make("a", n=3)
    queue = with_all_sent(request, make("b"))
    crash(queue)
    send_all(queue)
    bring(request, 2, 1, 2)
    assert send_all(queue) == ["b"]


def test_branches_that_end_on_trial_prove_themselves() -> None:
    one, other = make("a", n=2), make("b")
    queue = with_all_sent(one, other)
    bring(one, 0), bring(one, 1), bring(other, 0, 1, 2, 3)
    crash(queue)
    send_all(queue)
    bring(one, 0, end=FinishReason.STOP)
    assert send_all(queue) == []
    bring(one, 1, 1, 2)
    assert send_all(queue) == ["b"]


def test_beam_searches_are_tried_last_and_new_ones_do_not_wait_for_them() -> None:
    beams = [make(name, n=2, beam_width=2) for name in ("x", "y")]
    a, new = make("a"), make("new")
    queue = with_all_sent(*beams, a)
    crash(queue)
    queue.add(new)
    assert send_all(queue) == ["a"]
    prove(a)
    assert send_all(queue) == ["x"]
    beams[0].drop(None)
    queue.end(beams[0])
    assert send_all(queue) == ["y", "new"]
    assert crash(queue).blamed is None
    assert send_all(queue) == ["y"], "alone, and then everybody waits"
    assert crash(queue).blamed is beams[1]
    assert send_all(queue) == ["new", "a"]
