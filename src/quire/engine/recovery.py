"""What is done when the engine process has died: from where each open request goes on, which of
them is to blame, and whether the process is started once more.

All that were in the process when it died are suspects. They are tried one after the other: a
suspect is sent, and the next only when this one has computed again what was being computed when
the process died. If the process dies meanwhile, the one on trial has seen it die twice, and is to
blame; those that were cleared go on beside the trials, new ones wait behind them.

Pure: knows no process, no clock, no asyncio. Called by `dispatcher` and `engine_keeper`.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from quire.core.request import Request, SequenceOutput
from quire.errors import ConfigurationError

NUM_PROOF_TOKENS = 2
"""A suspect is cleared when each branch that had begun has so many tokens more. One is what was
being computed when the process died; one more, since its last message may not have arrived."""


class EngineState(StrEnum):
    """Where the engine is, as its front sees it."""

    STARTING = "starting"  # the first process is not ready yet
    READY = "ready"
    RECOVERING = "recovering"  # a process has died, the next is not ready yet
    FAILED = "failed"  # for good: no process is started any more
    CLOSING = "closing"  # shut down


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """How patient the front is with its engine.

    max_restarts: deaths within window_s that no request is to blame for; with one more the engine
        has failed for good.
    heartbeat_timeout_s: an engine that answers nothing for so long hangs in a step, and is killed.
    first_backoff_s, max_backoff_s: the first restart comes at once, the second after
        first_backoff_s, and each further one after twice as long, up to max_backoff_s.
    """

    max_restarts: int = 5
    window_s: float = 300.0
    heartbeat_timeout_s: float = 60.0
    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts is {self.max_restarts}, but must be at least 0")
        for name in ("window_s", "heartbeat_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be above 0")
        if not 0 <= self.first_backoff_s <= self.max_backoff_s:
            raise ConfigurationError(
                f"first_backoff_s is {self.first_backoff_s} and max_backoff_s {self.max_backoff_s},"
                " but must be 0 <= first_backoff_s <= max_backoff_s"
            )


class RestartBudget:
    """Counts deaths and says how long to wait before the next start.

    Invariant: `_deaths` are those within the window that no request was to blame for, in order.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._deaths: deque[float] = deque()

    def note_death(self, now_s: float, *, is_explained: bool) -> float | None:
        """Seconds until the next start; None if there shall be none.

        is_explained: a request is to blame, for this death and for the one that made it a suspect.
        """
        config, deaths = self._config, self._deaths
        while deaths and deaths[0] <= now_s - config.window_s:
            deaths.popleft()
        if not is_explained:
            deaths.append(now_s)
        elif deaths:
            deaths.pop()
        if len(deaths) > config.max_restarts:
            return None
        if len(deaths) < 2:
            return 0.0
        return min(config.max_backoff_s, config.first_backoff_s * 2.0 ** (len(deaths) - 2))


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
        """What an engine that knows nothing of it is to compute."""
        elapsed_s = now_s - self.accepted_s
        return self.request.resume(self.branches, has_output=self.has_output, elapsed_s=elapsed_s)


class Roster:
    """Which open requests are in the engine process, and which wait to be sent.

    Invariant: a request with open branches is in exactly one of `_sent`, `_cleared`, `_suspects`
    and `_new`; the one on trial is in `_sent`, as long as it has open branches.
    """

    def __init__(self) -> None:
        self._sent: dict[str, OpenRequest] = {}
        self._cleared: deque[OpenRequest] = deque()  # to be sent again, suspected of nothing
        self._suspects: deque[OpenRequest] = deque()
        self._new: deque[OpenRequest] = deque()
        self._trial: OpenRequest | None = None
        self._goals: dict[int, int] = {}  # of the one on trial: branch -> tokens that clear it

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nobody is on trial: a new one may be sent at once."""
        return self._trial is None and not (self._cleared or self._suspects or self._new)

    def is_sent(self, one: OpenRequest) -> bool:
        """Whether the process knows of it."""
        return self._sent.get(one.request_id) is one

    def add(self, one: OpenRequest) -> None:
        """Take in a new request; `next_to_send` gives it out when its turn has come."""
        self._new.append(one)

    def next_to_send(self) -> OpenRequest | None:
        """Who is to be sent now, and counts as sent from now on; None: nobody (yet).

        To be asked again whenever something came of those in the process.
        """
        if (one := _pop_open(self._cleared)) is not None:
            return self._send(one)
        if self._is_cleared():
            self._trial = None
        if self._trial is None:
            if (one := _pop_open(self._suspects)) is not None:
                self._trial = one
                self._goals = {
                    index: len(token_ids) + NUM_PROOF_TOKENS
                    for index, token_ids in one.branches.items()
                    if token_ids
                }
                return self._send(one)
        elif self._suspects or not (self._trial.is_beam_search and self._trial.branches):
            return None
        # Nobody is on trial, or the last of all suspects is a beam search, which brings nothing
        # before its end: so long nobody has to wait.
        one = _pop_open(self._new)
        return None if one is None else self._send(one)

    def end(self, one: OpenRequest) -> None:
        """The process has answered it to its end, or refused it."""
        self._sent.pop(one.request_id, None)
        if self._trial is one:
            self._trial = None

    def leave(self, one: OpenRequest) -> bool:
        """Its client has left. Returns whether it is on trial: the process may still compute it,
        so its trial goes on until `clear`."""
        self._sent.pop(one.request_id, None)
        return self._trial is one

    def clear(self, one: OpenRequest) -> None:
        """The process was between two steps after it was told that this one's client has left."""
        if self._trial is one:
            self._trial = None

    def on_death(self) -> OpenRequest | None:
        """The process has died. Returns who is to blame, who is out then; it has no open branches
        if its client had left. None: all that were in the process are suspects."""
        blamed, self._trial = self._trial, None
        others = [one for one in self._sent.values() if one is not blamed]
        self._sent.clear()
        if blamed is not None:
            self._cleared.extend(others)
            return blamed
        # Trials of beam searches take long, so they come last.
        self._suspects.extend(sorted(others, key=lambda one: one.is_beam_search))
        return None

    def _send(self, one: OpenRequest) -> OpenRequest:
        self._sent[one.request_id] = one
        return one

    def _is_cleared(self) -> bool:
        """Whether the one on trial has computed again what was computed at the death."""
        if self._trial is None:
            return False
        branches = self._trial.branches
        if self._goals:
            return bool(branches) and all(
                len(branches[index]) >= goal
                for index, goal in self._goals.items()
                if index in branches
            )
        return any(len(token_ids) >= NUM_PROOF_TOKENS for token_ids in branches.values())


def _pop_open(queue: deque[OpenRequest]) -> OpenRequest | None:
    """The first that has not ended meanwhile."""
    while queue:
        one = queue.popleft()
        if one.branches:
            return one
    return None
