"""What a request is resumed from, and what a process died of: without any process."""

import signal
from typing import Any

import pytest

from quire.core.request import FinishReason, Request, ResumedBranch, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Cause, Death
from quire.engine_client.request_book import OpenRequest, RequestStream
from quire.errors import QuireError

SEGFAULT, KILLED = -int(signal.SIGSEGV), -int(signal.SIGKILL)
COMPUTING = Activity(Doing.COMPUTING, None)

# ---- what came so far ---------------------------------------------------------------------------


class Ignored:
    """A sink of outputs and ends that no test looks at."""

    def on_output(self, output: SequenceOutput) -> None:
        pass

    def on_end(self, error: QuireError | None) -> None:
        pass


def make(name: str = "r", n: int = 1, **params: Any) -> OpenRequest:
    request = Request(name, [1], DecodingParams(99, **params), n=n)
    return OpenRequest(request, 10.0, RequestStream(lambda *_: None, {name}, Ignored()))


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
