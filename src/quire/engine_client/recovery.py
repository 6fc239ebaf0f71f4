"""Recovery after the death of an engine process: resume, blame, restart.

First, the cause of a death is determined (`Death`). If it came from outside, or while nothing was
computed, no request is to blame, and all requests continue. Otherwise the requests of the step are
suspects. They are tried one after the other: the next suspect is sent only after the present one
has recomputed the tokens that were being computed at the death. Cleared requests continue beside
the trials; new requests wait until the trials are over. A request is to blame when the process has
died on its trial, in its own step, for the second time:

    it crashed or hung      the second trial follows at once, with no other request in the process.
                            If the request passes it, the other requests of that step become
                            suspects.
    memory ran out          another program may have caused that, so all other suspects are tried
                            first: if the process dies on another trial as well, the first death
                            proves nothing.

`core.scheduling.fault_isolation` has the same idea on another scale. There, a step has failed in an
engine that goes on, and each sequence is tried in a step of its own. Here, the process has died,
and each request is tried in a new process.

Pure logic without processes, clocks and asyncio. Called by `link`, `async_engine` and `supervisor`.
"""

import signal
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from quire.core.request import Request, SequenceOutput
from quire.engine_client.process.activity import Activity, Doing
from quire.errors import ConfigurationError

NUM_PROOF_TOKENS = 2
"""A suspect is cleared when each branch that had begun has this many more tokens: the token that
was being computed at the death, and one more, since the last message may not have arrived."""

MAX_TRIAL_DEATHS = 3
"""A request with this many deaths on its trials is to blame, whatever happened between them. Two
requests that kill the process only together would otherwise be tried forever."""

OWN_SIGNALS = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
    if hasattr(signal, name)
)
"""Signals that a process gets for its own faults. All other signals are sent from outside."""


class EngineState(StrEnum):
    """State of the engine, as seen by the server."""

    STARTING = "starting"  # the first process is not ready yet
    READY = "ready"
    RECOVERING = "recovering"  # a process has died and the next is not ready yet
    FAILED = "failed"  # failed for good; no process is started any more
    CLOSING = "closing"  # being shut down


class Cause(StrEnum):
    """The cause of a process's death."""

    CRASH = "crash"  # its own fault: an invalid access, an exception, a step that never ended
    MEMORY = "memory"  # killed for lack of memory, which it or another program used up
    OUTSIDE = "outside"  # killed, or asked to end, by another process
    LOST = "lost"  # not reachable: its machine ended, or the link to it is cut
    REQUESTED = "requested"  # ended by its server for a restart, scaling down or a shutdown


@dataclass(frozen=True, slots=True, eq=False)
class Death:
    """How an engine process ended, and what it was doing then. Deaths are equal only if
    identical."""

    #: The last record of the process.
    activity: Activity
    #: The process's exit code, or minus the number of the signal that ended it. If the death of a
    #: rank ended the process, this is the rank's status. None if the server killed the process.
    status: int | None
    #: Whether the process reported why it ended, or sent bytes that are no message.
    has_failed: bool = False
    #: Whether the server killed it because a step did not end.
    has_hung: bool = False
    #: Number of processes that the system has killed for lack of memory since this process was last
    #: known to live; None if unknown.
    num_oom_kills: int | None = None
    #: Whether the process only stopped answering, so that it may still be alive.
    is_lost: bool = False
    #: Whether the server ended it on purpose, to restart it, to scale down or to shut down.
    is_requested: bool = False

    @property
    def cause(self) -> Cause:
        """The cause, from the evidence. No process sends SIGKILL to itself. The server sends it to
        a process that hangs, the system when memory runs out, or a user. If the system does not
        count its kills, lack of memory is assumed."""
        if self.is_requested:
            return Cause.REQUESTED
        if self.is_lost:
            return Cause.LOST
        if self.has_hung:
            return Cause.CRASH
        if self.status is None or self.status >= 0:
            return Cause.CRASH if self.has_failed or self.status else Cause.OUTSIDE
        if -self.status in OWN_SIGNALS:
            return Cause.CRASH
        if self.status == -signal.SIGKILL and self.num_oom_kills != 0:
            return Cause.MEMORY
        return Cause.OUTSIDE

    @property
    def is_by_others(self) -> bool:
        """Whether a process that is neither the engine nor its server has ended the engine."""
        return self.cause is Cause.OUTSIDE and self.status is not None

    def concerns(self, request_id: str) -> bool:
        """Whether this request, which the process had, may have caused the death."""
        if self.cause in (Cause.OUTSIDE, Cause.LOST, Cause.REQUESTED):
            return False
        if self.activity.doing in (Doing.LOADING, Doing.IDLE):
            return False
        return self.activity.concerns(request_id)


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """How the server reacts to failures of its engine."""

    #: Maximum number of deaths within window_s that neither a request nor another process has
    #: caused. After one more death, the engine has failed for good. 0 means that it is never
    #: restarted.
    max_restarts: int = 5
    #: Seconds within which deaths are counted.
    window_s: float = 300.0
    #: An engine that sends no answer for this many seconds counts as hanging in a step, and is
    #: killed.
    heartbeat_timeout_s: float = 60.0
    #: The first restart comes at once, and the second after this many seconds. Each further pause
    #: is twice as long.
    first_backoff_s: float = 0.5
    #: The longest pause before a restart, in seconds.
    max_backoff_s: float = 30.0
    #: Pause in seconds before the restart of an engine that other processes have killed more than
    #: max_restarts times within window_s.
    cooldown_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts is {self.max_restarts}, but must be at least 0")
        for name in ("window_s", "heartbeat_timeout_s", "cooldown_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be above 0")
        if not 0 <= self.first_backoff_s <= self.max_backoff_s:
            raise ConfigurationError(
                f"first_backoff_s is {self.first_backoff_s} and max_backoff_s {self.max_backoff_s},"
                " but must be 0 <= first_backoff_s <= max_backoff_s"
            )


class RestartBudget:
    """Counts deaths of the process and computes the pause before the next start.

    Invariant: `_deaths` are the deaths within the window that no request is to blame for, in order,
    with their times.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._deaths: deque[tuple[float, Death]] = deque()

    def note_death(
        self, now_s: float, death: Death, explained: Collection[Death] = ()
    ) -> float | None:
        """Count a death. Returns the seconds until the next start; None if there should be none.

        `explained` are the deaths, including this death, for which a request is to blame; they no
        longer count. Kills by other processes never end the restarts, they only make the pause
        longer.
        """
        config = self._config
        self._deaths.append((now_s, death))
        self._deaths = deque(
            (at_s, past)
            for at_s, past in self._deaths
            if at_s > now_s - config.window_s and past not in explained
        )
        num_deaths = len(self._deaths)
        num_killed = sum(past.is_by_others for _, past in self._deaths)
        num_counted = num_deaths - num_killed if config.max_restarts else num_deaths
        if num_counted > config.max_restarts:
            return None
        if num_killed > config.max_restarts and death.is_by_others:
            return config.cooldown_s
        if num_deaths < 2:
            return 0.0
        return min(config.max_backoff_s, config.first_backoff_s * 2.0 ** (num_deaths - 2))


class OpenRequest:
    """A request that was accepted, and its outputs so far."""

    __slots__ = ("accepted_s", "branches", "has_output", "request")

    def __init__(self, request: Request, accepted_s: float) -> None:
        self.request = request
        self.accepted_s = accepted_s
        #: Maps the index of each unfinished branch to its tokens so far.
        self.branches: dict[int, list[int]] = {index: [] for index in range(request.n)}
        #: Whether any branch, even an ended one, has produced a token.
        self.has_output = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far in the unfinished branches."""
        return sum(map(len, self.branches.values()))

    @property
    def is_beam_search(self) -> bool:
        """Whether it is a beam search, which returns all of its outputs at its end."""
        return self.request.params.beam_width > 0

    def record_output(self, output: SequenceOutput) -> bool:
        """Record an output. Returns whether it is still wanted."""
        token_ids = self.branches.get(output.branch_index)
        if token_ids is None:
            return False
        token_ids += output.token_ids
        if output.token_ids:
            self.has_output = True
        if output.finish_reason is not None:
            del self.branches[output.branch_index]
        return True

    def drop(self, branch_index: int | None) -> int:
        """Remove a branch (None: all branches) that ends without an output. Returns the number of
        branches removed."""
        num_before = len(self.branches)
        if branch_index is None:
            self.branches.clear()
        else:
            self.branches.pop(branch_index, None)
        return num_before - len(self.branches)

    def to_send(self, now_s: float) -> Request:
        """The request to send to another engine process, which resumes it from its tokens so
        far."""
        elapsed_s = now_s - self.accepted_s
        return self.request.resume(self.branches, has_output=self.has_output, elapsed_s=elapsed_s)


@dataclass(slots=True)
class _Case:
    """The evidence against a request."""

    #: Deaths that it may have caused. They are removed when it is cleared, or when another request
    #: turns out to have caused them.
    deaths: set[Death] = field(default_factory=set)
    #: Deaths on its trial. When it passes a trial, deaths for lack of memory are removed, since
    #: another program has used up the memory.
    trial_deaths: list[Death] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The conclusion from a death."""

    #: The request that is to blame for the death and is ended; it has no open branches if its
    #: client has left. None if no request is to blame so far.
    blamed: OpenRequest | None = None
    #: The deaths that the blamed request has caused, including the last death. After a crash on a
    #: trial for which no request is blamed yet, only the last death, whose cause later trials will
    #: show.
    explained: frozenset[Death] = frozenset()


class ResumeQueue:
    """Tracks which open requests were sent to the engine process, and which wait to be sent.

    Invariant: a request with open branches is in exactly one of `_sent`, `_cleared`, `_suspects`
    and `_new`. The request on trial is in `_sent`, as long as it has open branches. `_cases` is
    empty if there are neither suspects nor a trial.
    """

    def __init__(self) -> None:
        self._sent: dict[str, OpenRequest] = {}
        self._cleared: deque[OpenRequest] = deque()  # to be sent again, not suspects
        self._suspects: deque[OpenRequest] = deque()
        self._new: deque[OpenRequest] = deque()
        self._trial: OpenRequest | None = None
        self._is_alone = False  # whether no other request is sent during the trial
        #: Branch index -> number of tokens that the branch must reach to pass the trial.
        self._goals: dict[int, int] = {}
        self._cases: dict[OpenRequest, _Case] = {}
        # The request on whose trial the process died last; None once it has passed a trial since.
        self._last_struck: OpenRequest | None = None
        self._others_passed = False  # whether a different request has passed a trial since

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is on trial, so that a new request may be sent at once."""
        return self._trial is None and not (self._cleared or self._suspects or self._new)

    @property
    def num_suspects(self) -> int:
        """Number of requests that wait for their trial."""
        return len(self._suspects)

    def is_sent(self, request: OpenRequest) -> bool:
        """Whether the request was sent to the present process and has not ended there."""
        return self._sent.get(request.request_id) is request

    def add(self, request: OpenRequest) -> None:
        """Add a new request. `next_to_send` returns it when it is to be sent."""
        self._new.append(request)

    def next_to_send(self) -> OpenRequest | None:
        """The next request to send, which counts as sent from now on; None if no request may be
        sent.

        Has to be called again after each output of requests in the process.
        """
        # First, end a trial that was passed.
        if self._trial is not None and self._has_passed(self._trial):
            self._clear_suspect(self._trial)
        # Without a trial, first try a suspect whose earlier trial killed the process, alone in the
        # process.
        if self._trial is None:
            self._is_alone = False
            suspect = _first_open(self._suspects)
            if suspect is None:
                self._cases.clear()
                self._last_struck = None
            # It waits until the process has no other request.
            elif self._cases[suspect].trial_deaths and not self._sent:
                self._is_alone = True
                return self._try(suspect)
        elif self._is_alone:
            return None
        # Cleared requests continue beside a trial. Then the next suspect is tried.
        if (request := _pop_open(self._cleared)) is not None:
            return self._send(request)
        if self._trial is None:
            if (request := _first_open(self._suspects)) is not None:
                return self._try(request)
        elif self._suspects or not (self._trial.is_beam_search and self._trial.branches):
            return None
        # No request is on trial, or the last suspect is a beam search, which has no output before
        # its end. New requests don't wait for that.
        request = _pop_open(self._new)
        return None if request is None else self._send(request)

    def end(self, request: OpenRequest) -> None:
        """Remove a request that was answered completely or refused."""
        self._sent.pop(request.request_id, None)
        if self._trial is request:
            self._clear_suspect(request)

    def remove_request(self, request: OpenRequest) -> bool:
        """Remove a request whose client has left. Returns whether it is on trial: the process may
        still compute it, so its trial lasts until `clear`."""
        self._sent.pop(request.request_id, None)
        return self._trial is request

    def clear(self, request: OpenRequest) -> None:
        """End the trial of a request that has left, since the process has handled its abort."""
        if self._trial is request:
            self._trial = None

    def on_death(self, death: Death) -> Diagnosis:
        """Judge the death of the process, or its failed start."""
        trial, self._trial = self._trial, None
        # First, divide the requests other than the one on trial by whether they may have caused the
        # death.
        beside = [request for request in self._sent.values() if request is not trial]
        self._sent.clear()
        concerned = [request for request in beside if death.concerns(request.request_id)]
        others = [request for request in beside if not death.concerns(request.request_id)]
        if trial is None and concerned:
            # These new requests ran in no step, so they wait until the trials are over.
            self._new.extendleft(reversed(others))
        else:
            self._cleared.extend(others)
        # Then decide by whether the request on trial was in the step.
        if trial is None:
            self._mark_suspects(concerned, death)
            return Diagnosis()
        if death.concerns(trial.request_id):
            return self._on_trial_death(trial, concerned, death)
        self._suspects.appendleft(trial)
        self._mark_suspects(concerned, death)
        return Diagnosis()

    def _on_trial_death(
        self, trial: OpenRequest, beside: list[OpenRequest], death: Death
    ) -> Diagnosis:
        """Judge a death on a trial. `beside` are the requests in the step beside the one on
        trial."""
        case = self._cases[trial]
        case.deaths.add(death)
        case.trial_deaths.append(death)
        may_be_others = death.cause is Cause.MEMORY
        is_repeated = self._last_struck is trial and (self._others_passed or not may_be_others)
        self._last_struck, self._others_passed = trial, False
        # A repeated death proves guilt; for lack of memory, only if another request has passed a
        # trial since.
        if is_repeated or len(case.trial_deaths) == MAX_TRIAL_DEATHS or not trial.branches:
            self._cleared.extend(beside)
            return self._blame(trial)
        self._mark_suspects(beside, death)
        # Without proof, try the request again: after all other suspects if memory ran out, else at
        # once.
        if may_be_others:
            self._suspects.append(trial)
            return Diagnosis()
        self._suspects.appendleft(trial)
        return Diagnosis(explained=frozenset([death]))

    def _blame(self, blamed: OpenRequest) -> Diagnosis:
        """Blame a request, and clear the requests that are suspected only of its deaths."""
        explained = frozenset(self._cases[blamed].deaths)
        suspects, self._suspects = self._suspects, deque()
        for request in suspects:
            case = self._cases[request]
            case.deaths -= explained
            (self._suspects if case.deaths else self._cleared).append(request)
        return Diagnosis(blamed, explained)

    def _clear_suspect(self, trial: OpenRequest) -> None:
        """Clear a request that has passed its trial or was answered completely."""
        self._trial = None
        case = self._cases[trial]
        case.deaths.clear()
        case.trial_deaths = [past for past in case.trial_deaths if past.cause is not Cause.MEMORY]
        if self._last_struck is trial:
            self._last_struck = None
        else:
            self._others_passed = True

    def _mark_suspects(self, requests: Iterable[OpenRequest], death: Death) -> None:
        """Make requests suspects. Most faulty requests kill the process in their first steps, so
        suspects with the least output are tried first. Beam searches are tried last, since their
        trials take long."""
        ordered = sorted(requests, key=lambda request: (request.is_beam_search, request.num_tokens))
        for request in ordered:
            self._cases.setdefault(request, _Case()).deaths.add(death)
        self._suspects.extend(ordered)

    def _try(self, first: OpenRequest) -> OpenRequest:
        """Send the first suspect for its trial."""
        self._suspects.popleft()
        self._trial = first
        self._goals = {
            index: len(token_ids) + NUM_PROOF_TOKENS
            for index, token_ids in first.branches.items()
            if token_ids
        }
        return self._send(first)

    def _send(self, request: OpenRequest) -> OpenRequest:
        self._sent[request.request_id] = request
        return request

    def _has_passed(self, trial: OpenRequest) -> bool:
        """Whether the request on trial has recomputed the tokens that were being computed at the
        death."""
        branches = trial.branches
        if self._goals:
            return bool(branches) and all(
                len(branches[index]) >= goal
                for index, goal in self._goals.items()
                if index in branches
            )
        return any(len(token_ids) >= NUM_PROOF_TOKENS for token_ids in branches.values())


def _first_open(queue: deque[OpenRequest]) -> OpenRequest | None:
    """The first request of a queue that has open branches, which stays in the queue. Ended requests
    before it are removed."""
    while queue and not queue[0].branches:
        queue.popleft()
    return queue[0] if queue else None


def _pop_open(queue: deque[OpenRequest]) -> OpenRequest | None:
    """Like `_first_open`, but also removes the request."""
    request = _first_open(queue)
    if request is not None:
        queue.popleft()
    return request
