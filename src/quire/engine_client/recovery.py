"""What happens after an engine process died: resume, blame, restart.

A death is read first (`Death`): what came from outside, and what came while nothing was computed,
is no request's fault, and all go on. Otherwise the requests that were in the step are suspects.
They are tried one after the other: a suspect is sent, and the next only when this one has computed
again what was being computed when the process died. Those that were cleared go on beside the
trials, new ones wait behind them. A request is to blame when the process has died on its trial, in
its own step, for the second time:

    it crashed or hung      the second trial follows at once and is the request's alone: nothing
                            else is in the process. If it passes, those that were in the step beside
                            it are suspects.
    memory ran out          that may have come from outside, so all other suspects are tried first:
                            if another one dies as well, the first death proves nothing.

`core.scheduling.fault_isolation` has the same idea on another scale: there a step of an engine that
lives on has failed, and sequences are tried in steps of their own; here the process has died, and
requests are tried in a new process.

Pure: knows no process, no clock, no asyncio. Called by `link`, `async_engine`
and `supervisor`.
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
"""A suspect is cleared when each branch that had begun has so many tokens more. One is what was
being computed when the process died; one more, since its last message may not have arrived."""

MAX_TRIAL_DEATHS = 3
"""With so many deaths on its trials a request is to blame, whatever happened between them. Two
requests that kill the process only together would otherwise be tried for ever."""

OWN_SIGNALS = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
    if hasattr(signal, name)
)
"""Signals that a process gets for what it does itself. All others are sent to it from outside."""


class EngineState(StrEnum):
    """Where the engine is, as its front sees it."""

    STARTING = "starting"  # the first process is not ready yet
    READY = "ready"
    RECOVERING = "recovering"  # a process has died, the next is not ready yet
    FAILED = "failed"  # for good: no process is started any more
    CLOSING = "closing"  # shut down


class Cause(StrEnum):
    """What a process died of."""

    CRASH = "crash"  # of what it did: a fault, an exception, a step that never ended
    MEMORY = "memory"  # killed for lack of memory, which it or something else used up
    OUTSIDE = "outside"  # killed, or asked to end, by another process
    LOST = "lost"  # it can't be reached any more: its machine ended, or the link to it is cut
    REQUESTED = "requested"  # its server ended it: a restart, scaling down or a shutdown


@dataclass(frozen=True, slots=True, eq=False)
class Death:
    """How an engine process ended, and what it was doing then. Each is equal to itself alone.

    activity: what the process has written last.
    status: its exit code, or minus the number of the signal that ended it; of a rank whose death it
        did not survive, that rank's. None: the front has killed it.
    has_failed: it reported why it was about to end, or sent bytes that are no message.
    has_hung: the front has killed it because a step did not end.
    num_oom_kills: how many processes the system has killed for lack of memory meanwhile; None: not
        known.
    is_lost: nothing is known but that it can't be reached; it may live on.
    is_requested: the server ended it on purpose, to restart it, to scale down or to shut down.
    """

    activity: Activity
    status: int | None
    has_failed: bool = False
    has_hung: bool = False
    num_oom_kills: int | None = None
    is_lost: bool = False
    is_requested: bool = False

    @property
    def cause(self) -> Cause:
        """No process sends itself SIGKILL: the front sends it (where the process hangs), the system
        (for lack of memory), or a user. Where the system does not count its kills, lack of memory
        is assumed."""
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
        """Whether another process than its server has ended it, for a reason of its own."""
        return self.cause is Cause.OUTSIDE and self.status is not None

    def concerns(self, request_id: str) -> bool:
        """Whether this request, which the process knew of, may have caused it."""
        if self.cause in (Cause.OUTSIDE, Cause.LOST, Cause.REQUESTED):
            return False
        if self.activity.doing in (Doing.LOADING, Doing.IDLE):
            return False
        return self.activity.concerns(request_id)


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """How patient the front is with its engine.

    max_restarts: deaths within window_s that neither a request nor another process has caused; with
        one more the engine has failed for good. 0: it is never started again.
    heartbeat_timeout_s: an engine that answers nothing for so long hangs in a step, and is killed.
    first_backoff_s, max_backoff_s: the first restart comes at once, the second after
        first_backoff_s, and each further one after twice as long, up to max_backoff_s.
    cooldown_s: an engine that other processes have killed more than max_restarts times within
        window_s is started again after so long.
    """

    max_restarts: int = 5
    window_s: float = 300.0
    heartbeat_timeout_s: float = 60.0
    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
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
    """Counts deaths and says how long to wait before the next start.

    Invariant: `_deaths` are those within the window that no request is to blame for, in order, each
    with its time.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._deaths: deque[tuple[float, Death]] = deque()

    def note_death(
        self, now_s: float, death: Death, explained: Collection[Death] = ()
    ) -> float | None:
        """Seconds until the next start; None if there shall be none.

        explained: deaths, this one among them, that a request is to blame for; they count no more.
        An engine that other processes kill again and again is no worse for it: it is started again
        once they may have stopped.
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
    """A request that was accepted, and what came of it so far.

    branches: branch index -> its tokens so far, of the branches that have not ended.
    has_output: any branch, ended ones included, has brought a token.
    """

    __slots__ = ("accepted_s", "branches", "has_output", "request")

    def __init__(self, request: Request, accepted_s: float) -> None:
        self.request = request
        self.accepted_s = accepted_s
        self.branches: dict[int, list[int]] = {index: [] for index in range(request.n)}
        self.has_output = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of the branches that have not ended."""
        return sum(map(len, self.branches.values()))

    @property
    def is_beam_search(self) -> bool:
        """Whether all of its outputs come with its end."""
        return self.request.params.beam_width > 0

    def take(self, output: SequenceOutput) -> bool:
        """Remember an output; returns whether it is still wanted."""
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
        """A branch, or all (None), ended without an output; returns how many did."""
        num_before = len(self.branches)
        if branch_index is None:
            self.branches.clear()
        else:
            self.branches.pop(branch_index, None)
        return num_before - len(self.branches)

    def to_send(self, now_s: float) -> Request:
        """The request from its tokens so far on, for an engine process that has never had it."""
        elapsed_s = now_s - self.accepted_s
        return self.request.resume(self.branches, has_output=self.has_output, elapsed_s=elapsed_s)


@dataclass(slots=True)
class _Case:
    """The evidence against a request.

    deaths: those that it may have caused. It loses them when it is cleared, and when another
        request turns out to have caused them.
    trial_deaths: those that came on its trial. A pass takes those for lack of memory away: then
        memory was not short because of it.
    """

    deaths: set[Death] = field(default_factory=set)
    trial_deaths: list[Death] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a death shows.

    blamed: the request that is ended for it; it has no open branches if its client had left. None:
        no request, so far.
    explained: the deaths that the blamed request has caused, the last death among them; or the last
        alone, where it was a crash on a trial: later trials show which request has caused it.
    """

    blamed: OpenRequest | None = None
    explained: frozenset[Death] = frozenset()


class ResumeQueue:
    """Which open requests are in the engine process, and which wait to be sent.

    Invariant: a request with open branches is in exactly one of `_sent`, `_cleared`, `_suspects`
    and `_new`; the request on trial is in `_sent`, as long as it has open branches. `_cases` is
    empty where there are neither suspects nor a trial.
    """

    def __init__(self) -> None:
        self._sent: dict[str, OpenRequest] = {}
        self._cleared: deque[OpenRequest] = deque()  # to be sent again, suspected of nothing
        self._suspects: deque[OpenRequest] = deque()
        self._new: deque[OpenRequest] = deque()
        self._trial: OpenRequest | None = None
        self._is_alone = False  # the request on trial is: nothing else is sent
        self._goals: dict[int, int] = {}  # of the request on trial: branch -> tokens that clear it
        self._cases: dict[OpenRequest, _Case] = {}
        # The request on whose trial the process died last; None once it has passed a trial since.
        self._last_struck: OpenRequest | None = None
        self._others_passed = False  # whether another request has passed a trial since

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is on trial: a new request may be sent at once."""
        return self._trial is None and not (self._cleared or self._suspects or self._new)

    @property
    def num_suspects(self) -> int:
        """How many requests wait for their trial."""
        return len(self._suspects)

    def is_sent(self, request: OpenRequest) -> bool:
        """Whether the process knows of it."""
        return self._sent.get(request.request_id) is request

    def add(self, request: OpenRequest) -> None:
        """Take in a new request; `next_to_send` returns it when it is to be sent."""
        self._new.append(request)

    def next_to_send(self) -> OpenRequest | None:
        """The request to send now, which counts as sent from now on; None: no request, for now.

        To be called again whenever outputs came of requests in the process.
        """
        if self._trial is not None and self._has_passed(self._trial):
            self._acquit(self._trial)
        if self._trial is None:
            self._is_alone = False
            suspect = _first_open(self._suspects)
            if suspect is None:
                self._cases.clear()
                self._last_struck = None
            elif self._cases[suspect].trial_deaths and not self._sent:
                self._is_alone = True
                return self._try(suspect)
        elif self._is_alone:
            return None
        if (request := _pop_open(self._cleared)) is not None:
            return self._send(request)
        if self._trial is None:
            if (request := _first_open(self._suspects)) is not None:
                return self._try(request)
        elif self._suspects or not (self._trial.is_beam_search and self._trial.branches):
            return None
        # No request is on trial, or the last of all suspects is a beam search, which brings nothing
        # before its end: new requests need not wait for that.
        request = _pop_open(self._new)
        return None if request is None else self._send(request)

    def end(self, request: OpenRequest) -> None:
        """The process has answered it to its end, or refused it."""
        self._sent.pop(request.request_id, None)
        if self._trial is request:
            self._acquit(request)

    def leave(self, request: OpenRequest) -> bool:
        """Its client has left. Returns whether it is on trial: the process may still compute it,
        so its trial goes on until `clear`."""
        self._sent.pop(request.request_id, None)
        return self._trial is request

    def clear(self, request: OpenRequest) -> None:
        """The process was between two steps after it had received this request's abort."""
        if self._trial is request:
            self._trial = None

    def on_death(self, death: Death) -> Diagnosis:
        """The process has died, or could not be started."""
        trial, self._trial = self._trial, None
        beside = [request for request in self._sent.values() if request is not trial]
        self._sent.clear()
        concerned = [request for request in beside if death.concerns(request.request_id)]
        others = [request for request in beside if not death.concerns(request.request_id)]
        if trial is None and concerned:
            self._new.extendleft(reversed(others))  # they ran in no step: they wait for the trials
        else:
            self._cleared.extend(others)
        if trial is None:
            self._suspect(concerned, death)
            return Diagnosis()
        if death.concerns(trial.request_id):
            return self._on_trial_death(trial, concerned, death)
        self._suspects.appendleft(trial)
        self._suspect(concerned, death)
        return Diagnosis()

    def _on_trial_death(
        self, trial: OpenRequest, beside: list[OpenRequest], death: Death
    ) -> Diagnosis:
        """beside: those that were in the step with the request on trial."""
        case = self._cases[trial]
        case.deaths.add(death)
        case.trial_deaths.append(death)
        may_be_others = death.cause is Cause.MEMORY
        is_repeated = self._last_struck is trial and (self._others_passed or not may_be_others)
        self._last_struck, self._others_passed = trial, False
        if is_repeated or len(case.trial_deaths) == MAX_TRIAL_DEATHS or not trial.branches:
            self._cleared.extend(beside)
            return self._blame(trial)
        self._suspect(beside, death)
        if may_be_others:
            self._suspects.append(trial)
            return Diagnosis()
        self._suspects.appendleft(trial)
        return Diagnosis(explained=frozenset([death]))

    def _blame(self, blamed: OpenRequest) -> Diagnosis:
        """Ends the trials of `blamed`; suspects of nothing but its deaths are cleared."""
        explained = frozenset(self._cases[blamed].deaths)
        suspects, self._suspects = self._suspects, deque()
        for request in suspects:
            case = self._cases[request]
            case.deaths -= explained
            (self._suspects if case.deaths else self._cleared).append(request)
        return Diagnosis(blamed, explained)

    def _acquit(self, trial: OpenRequest) -> None:
        """It has passed its trial, or was answered to its end."""
        self._trial = None
        case = self._cases[trial]
        case.deaths.clear()
        case.trial_deaths = [past for past in case.trial_deaths if past.cause is not Cause.MEMORY]
        if self._last_struck is trial:
            self._last_struck = None
        else:
            self._others_passed = True

    def _suspect(self, requests: Iterable[OpenRequest], death: Death) -> None:
        """A request that kills the process mostly does so in its first steps, so those with the
        least output come first. Trials of beam searches take long: they come last."""
        ordered = sorted(requests, key=lambda request: (request.is_beam_search, request.num_tokens))
        for request in ordered:
            self._cases.setdefault(request, _Case()).deaths.add(death)
        self._suspects.extend(ordered)

    def _try(self, first: OpenRequest) -> OpenRequest:
        """Send the first of the suspects."""
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
        """Whether it has computed again what was computed at the death."""
        branches = trial.branches
        if self._goals:
            return bool(branches) and all(
                len(branches[index]) >= goal
                for index, goal in self._goals.items()
                if index in branches
            )
        return any(len(token_ids) >= NUM_PROOF_TOKENS for token_ids in branches.values())


def _first_open(queue: deque[OpenRequest]) -> OpenRequest | None:
    """The first request that has not ended meanwhile; it stays, those before it are removed."""
    while queue and not queue[0].branches:
        queue.popleft()
    return queue[0] if queue else None


def _pop_open(queue: deque[OpenRequest]) -> OpenRequest | None:
    """As `_first_open`, but the request is removed too."""
    request = _first_open(queue)
    if request is not None:
        queue.popleft()
    return request
