"""Describes the death of an engine process, and decides when the next one is started.

`Death` infers the cause of a death from its evidence. `failover` decides which request is
to blame for it.

Pure logic without processes, clocks and asyncio. Called by `link`, `supervisor`, `failover` and
`fleet_dispatcher`.
"""

import signal
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from quire.engine_client.process.activity import Activity, Doing
from quire.errors import ConfigurationError

OWN_SIGNALS = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
    if hasattr(signal, name)
)
"""Signals that a process gets for its own faults. All other signals are sent from outside."""

LEAST_STEP_LIMIT_S = 30.0
STEP_LIMIT_RATIO = 20.0
"""A step of known time counts as hanging after LEAST_STEP_LIMIT_S, in which kernels may be compiled
or CUDA graphs captured, and STEP_LIMIT_RATIO times its predicted time. So a busy machine, on which
steps take several times as long as usual, is left alone."""

UNKNOWN_STEP_LIMIT_S = 60.0
"""Seconds after which a step of unknown time counts as hanging, and any other activity."""


class EngineState(StrEnum):
    """State of the engine, as seen by the server."""

    STARTING = "starting"  # the first process is not ready yet
    READY = "ready"
    RECOVERING = "recovering"  # a process has died and the next is not ready yet
    ASLEEP = "asleep"  # ended on purpose until it is woken up
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
    #: An engine that sends no answer and makes no progress for this many seconds counts as hanging
    #: in a step, and is killed. None: the seconds follow from the step's predicted time; see
    #: `step_limit_s`.
    heartbeat_timeout_s: float | None = None
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
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be above 0")
        if not 0 <= self.first_backoff_s <= self.max_backoff_s:
            raise ConfigurationError(
                f"first_backoff_s is {self.first_backoff_s} and max_backoff_s {self.max_backoff_s},"
                " but must be 0 <= first_backoff_s <= max_backoff_s"
            )


def step_limit_s(predicted_s: float) -> float:
    """Seconds after which a step counts as hanging. `predicted_s` is its predicted time, or 0 if
    that is unknown."""
    if predicted_s <= 0:
        return UNKNOWN_STEP_LIMIT_S
    return LEAST_STEP_LIMIT_S + STEP_LIMIT_RATIO * predicted_s


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
