"""Decides which request of a fleet killed an engine.

A death is read as in `engine_client.recovery`. Requests that had no part in it continue at once in
other engines. The others are suspects: `trials` runs them one after another, each alone in an
engine. A suspect is cleared once it has recomputed the tokens that were being computed at the
death. If an engine dies during a trial, the request on trial is the culprit, because there was no
other. So a deadly request is ended after two deaths in the whole fleet, however many engines there
are.

- Out of memory: another program may have used up the memory. So the request is blamed only after
  one more death on its trial, which follows the trials of the other suspects.
- An engine is lost with its machine, or behind a cut link: nothing is known of its last step. Its
  requests continue at once. A request that was in two lost engines gets a trial; after four lost
  engines it is blamed. A loss no longer counts if the engine turns out to be alive.
- A trial in company: if no engine could be emptied, the other requests of the step are suspects,
  too, and the third death on a trial decides.

Pure: knows no process, no clock, no asyncio. Called by `trials` and `fleet_dispatcher`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine_client.recovery import NUM_PROOF_TOKENS, Cause, Death, OpenRequest

MAX_TRIAL_DEATHS = 3
"""A request with this many deaths on its trials is to blame, whatever happened between them."""

NUM_LOSSES, MAX_LOSSES = 2, 4
"""A request becomes a suspect after NUM_LOSSES lost engines, and is to blame after MAX_LOSSES if
the last loss was on its trial."""


@dataclass(slots=True)
class _Charge:
    """The deaths that a suspect may have caused."""

    #: Deaths of engines that computed the request, except those that another request has caused.
    deaths: set[Death] = field(default_factory=set)
    #: The deaths among them that happened on its trial.
    on_trial: list[Death] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetVerdict:
    """The conclusion from a death."""

    #: The request that is ended for the death; None if none is convicted yet.
    blamed: OpenRequest | None
    #: All deaths that the blamed request has caused.
    explained: frozenset[Death]
    #: Requests that continue at once.
    free: list[OpenRequest]


class Suspects:
    """The requests that may have killed an engine.

    Invariant: each suspect has a charge and is either in `_waiting` or on trial. Other requests
    have no charge. Requests without open branches are no suspects.
    """

    def __init__(self) -> None:
        self._waiting: deque[OpenRequest] = deque()
        self._charges: dict[OpenRequest, _Charge] = {}
        #: Number of tokens that each branch, by its index, has to reach before the trial is passed.
        self._goals: dict[int, int] = {}
        #: How many engines were lost while they computed each request.
        self._losses: Counter[OpenRequest] = Counter()
        self.trial: OpenRequest | None = None

    @property
    def num_waiting(self) -> int:
        """Number of suspects that wait for their trial."""
        return len(self._waiting)

    def on_death(self, death: Death, requests: Sequence[OpenRequest]) -> FleetVerdict:
        """Judge the death of an engine that had `requests`."""
        concerned = [each for each in requests if self._is_concerned(death, each)]
        free = [each for each in requests if each not in concerned]
        trial = self.trial if self.trial in requests else None
        if trial is not None:
            self.trial = None
        if trial is None or trial not in concerned:
            if trial is not None:  # its step did not run it, so it is tried again
                self._waiting.appendleft(trial)
            self._charge([each for each in concerned if each is not trial], death)
            return FleetVerdict(None, frozenset(), [each for each in free if each is not trial])
        return self._on_trial_death(trial, death, concerned, free)

    def survived(self, requests: Sequence[OpenRequest]) -> None:
        """Undo the loss of an engine for its requests, since the engine turned out to be alive."""
        for request in requests:
            if self._losses[request] > 0:  # else it was cleared meanwhile
                self._losses[request] -= 1

    def next_trial(self) -> OpenRequest | None:
        """The request to try next; None while another is on trial or none waits."""
        if self.trial is not None:
            return None
        while self._waiting:
            first = self._waiting.popleft()
            if first.branches:
                self.trial = first
                self._goals = {
                    index: len(token_ids) + NUM_PROOF_TOKENS
                    for index, token_ids in first.branches.items()
                    if token_ids
                }
                return first
            self._charges.pop(first, None)
        return None

    def note_output(self, request: OpenRequest) -> bool:
        """Count new tokens of a request. Returns whether it has passed its trial with them."""
        if request is not self.trial or not self._has_passed(request):
            return False
        self._acquit(request)
        return True

    def forget(self, request: OpenRequest) -> bool:
        """Remove a request that has ended or whose client has left. Returns whether that ends a
        trial."""
        self._losses.pop(request, None)
        was_on_trial = request is self.trial
        if was_on_trial:
            self._acquit(request)
        return was_on_trial

    def _is_concerned(self, death: Death, request: OpenRequest) -> bool:
        if death.cause is not Cause.LOST:
            return death.concerns(request.request_id)
        self._losses[request] += 1
        return self._losses[request] >= NUM_LOSSES

    def _on_trial_death(
        self,
        trial: OpenRequest,
        death: Death,
        concerned: Sequence[OpenRequest],
        free: list[OpenRequest],
    ) -> FleetVerdict:
        # First, decide whether this death convicts the request on trial.
        charge = self._charges[trial]
        charge.deaths.add(death)
        charge.on_trial.append(death)
        beside = [each for each in concerned if each is not trial]
        # Where steps overlap, a request that was moved away may still be in the running step.
        was_alone = not beside and not death.activity.names_others(trial.request_id)
        num_deaths = len(charge.on_trial)
        is_proof = was_alone and (death.cause is not Cause.MEMORY or num_deaths > 1)
        is_last = num_deaths >= MAX_TRIAL_DEATHS
        if death.cause is Cause.LOST:
            is_proof = is_last = self._losses[trial] >= MAX_LOSSES
        # If not, the requests beside it become suspects, too, and the tried request waits for
        # another trial.
        if not (is_proof or is_last):
            self._charge(beside, death)
            self._waiting.append(trial)
            return FleetVerdict(None, frozenset(), free)
        # Else blame the request for all deaths in its charge. This clears the suspects that are
        # charged with no other death.
        explained = frozenset(charge.deaths)
        del self._charges[trial]
        return FleetVerdict(trial, explained, [*free, *beside, *self._without(explained)])

    def _charge(self, requests: Sequence[OpenRequest], death: Death) -> None:
        """Charge requests with a death. Deadly requests mostly kill in their first steps, so those
        with the least output are tried first. Beam searches are tried last, since their trials take
        long."""
        ordered = sorted(requests, key=lambda each: (each.is_beam_search, each.num_tokens))
        for request in ordered:
            self._charges.setdefault(request, _Charge()).deaths.add(death)
        self._waiting.extend(ordered)

    def _without(self, explained: frozenset[Death]) -> list[OpenRequest]:
        """Remove these deaths from all charges. Returns the requests that have no charge left."""
        free = []
        for request in list(self._waiting):
            charge = self._charges[request]
            charge.deaths -= explained
            if not charge.deaths:
                del self._charges[request]
                free.append(request)
        self._waiting = deque(each for each in self._waiting if each in self._charges)
        return free

    def _has_passed(self, trial: OpenRequest) -> bool:
        """Whether the request on trial has recomputed what was being computed at the death."""
        branches = trial.branches
        if self._goals:
            return all(
                len(branches[index]) >= goal
                for index, goal in self._goals.items()
                if index in branches
            )
        return any(len(token_ids) >= NUM_PROOF_TOKENS for token_ids in branches.values())

    def _acquit(self, trial: OpenRequest) -> None:
        self.trial = None
        self._charges.pop(trial, None)
        self._losses.pop(trial, None)
