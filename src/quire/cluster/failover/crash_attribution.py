"""Decides which request of a fleet crashed an engine.

`engine_client.recovery` describes deaths. Requests that were not in the engine's last step
continue at once in other engines. The others are suspects: `isolated_trials` runs them one after
another, each alone in an engine. A suspect is cleared once it has recomputed the tokens that were
being computed at the death. If an engine dies during a trial, the request on trial is to blame,
because the engine ran no other request. So a deadly request is ended after two deaths, even in a
large fleet. There are three exceptions:

- Out of memory: another program may have used up the memory. So the request is blamed only if an
  engine dies in its second trial, too. The second trial comes after the other suspects' trials.
- An engine is lost if its machine or the network fails: its last step is unknown. Its requests
  continue at once. A request that was in two lost engines gets a trial. After four lost engines it
  is blamed if the last loss was on its trial. A loss no longer counts if the engine is alive.
- The trial ran beside other requests, because no engine could be emptied: a death proves nothing.
  The other requests of the step become suspects, too, and the request on trial waits for another
  trial. It is blamed at the third death during its trials, even without proof.

This module imports no process, clock or asyncio. `isolated_trials` and `fleet_dispatcher` call it.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine_client.recovery import NUM_PROOF_TOKENS, Cause, Death, OpenRequest

MAX_TRIAL_DEATHS = 3
"""A request is to blame, without further proof, once this many engines died during its trials."""

NUM_LOSSES, MAX_LOSSES = 2, 4
"""A request becomes a suspect after NUM_LOSSES lost engines, and is to blame after MAX_LOSSES if
the last loss was on its trial."""


@dataclass(slots=True)
class _Evidence:
    """The deaths of engines that one suspect may have caused."""

    #: Deaths of engines that computed the request, unless another request was blamed.
    deaths: set[Death] = field(default_factory=set)
    #: Those of `deaths` that happened during a trial of the request.
    on_trial: list[Death] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetVerdict:
    """The request to blame for an engine's death, if any, and the requests that continue."""

    #: The request that is blamed for the death and ended; None if no request is blamed yet.
    blamed: OpenRequest | None
    #: All deaths that the blamed request has caused.
    explained: frozenset[Death]
    #: The requests that are not suspects. They continue at once in other engines.
    continuing: list[OpenRequest]


class CrashAttribution:
    """Collects evidence against the requests that may have crashed an engine: the suspects.

    Invariant: each suspect has an entry in `_evidence` and is either in `_waiting` or on trial.
    Other requests have no entry. A request without open branches is dropped from the suspects when
    its trial is due.
    """

    def __init__(self) -> None:
        #: The suspects that wait for their trial, in the order of the trials.
        self._waiting: deque[OpenRequest] = deque()
        self._evidence: dict[OpenRequest, _Evidence] = {}
        #: Number of tokens that each branch, by its index, has to reach before the trial is passed.
        self._goals: dict[int, int] = {}
        #: Number of lost engines that had been computing each request.
        self._losses: Counter[OpenRequest] = Counter()
        #: The request on trial; None while there is no trial.
        self.trial: OpenRequest | None = None

    @property
    def num_waiting(self) -> int:
        """Number of suspects that wait for their trial."""
        return len(self._waiting)

    def on_death(self, death: Death, requests: Sequence[OpenRequest]) -> FleetVerdict:
        """Judge the death of an engine that had `requests`."""
        concerned = [each for each in requests if self._is_concerned(death, each)]
        continuing = [each for each in requests if each not in concerned]
        trial = self.trial if self.trial in requests else None
        if trial is not None:
            self.trial = None
        if trial is None or trial not in concerned:
            if trial is not None:  # repeat the trial: the request did not run
                self._waiting.appendleft(trial)
            self._suspect([each for each in concerned if each is not trial], death)
            continuing = [each for each in continuing if each is not trial]
            return FleetVerdict(None, frozenset(), continuing)
        return self._on_trial_death(trial, death, concerned, continuing)

    def undo_loss(self, requests: Sequence[OpenRequest]) -> None:
        """Decrease the number of lost engines of each request, since their engine turned out to be
        alive."""
        for request in requests:
            if self._losses[request] > 0:  # else the request was cleared
                self._losses[request] -= 1

    def next_trial(self) -> OpenRequest | None:
        """Start the next trial and return its request. None if a trial is running or no suspect
        waits."""
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
            self._evidence.pop(first, None)
        return None

    def note_output(self, request: OpenRequest) -> bool:
        """Note that a request has new tokens. Returns True if the request has now passed its
        trial."""
        if request is not self.trial or not self._has_passed(request):
            return False
        self._clear(request)
        return True

    def remove(self, request: OpenRequest) -> bool:
        """Remove a request that has ended or whose client has left. Returns True if the request was
        on trial."""
        self._losses.pop(request, None)
        was_on_trial = request is self.trial
        if was_on_trial:
            self._clear(request)
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
        continuing: list[OpenRequest],
    ) -> FleetVerdict:
        # First, decide whether this death proves that the request on trial is to blame.
        evidence = self._evidence[trial]
        evidence.deaths.add(death)
        evidence.on_trial.append(death)
        beside = [each for each in concerned if each is not trial]
        # If steps overlap, a request that was moved away may still be in the running step.
        was_alone = not beside and not death.activity.names_others(trial.request_id)
        num_deaths = len(evidence.on_trial)
        is_proof = was_alone and (death.cause is not Cause.MEMORY or num_deaths > 1)
        is_last = num_deaths >= MAX_TRIAL_DEATHS
        if death.cause is Cause.LOST:
            is_proof = is_last = self._losses[trial] >= MAX_LOSSES
        # If there is no proof, the requests in the same step become suspects, too, and the request
        # on trial waits for another trial.
        if not (is_proof or is_last):
            self._suspect(beside, death)
            self._waiting.append(trial)
            return FleetVerdict(None, frozenset(), continuing)
        # Else blame the request for all deaths in its evidence. This clears the suspects whose
        # evidence has no other death.
        explained = frozenset(evidence.deaths)
        del self._evidence[trial]
        cleared = self._clear_explained(explained)
        return FleetVerdict(trial, explained, [*continuing, *beside, *cleared])

    def _suspect(self, requests: Sequence[OpenRequest], death: Death) -> None:
        """Make requests suspects of a death. A request that kills its engine usually does so in its
        first steps, so the requests with the least output are tried first. Beam searches are tried
        last, since their trials take long."""
        ordered = sorted(requests, key=lambda each: (each.is_beam_search, each.num_tokens))
        for request in ordered:
            self._evidence.setdefault(request, _Evidence()).deaths.add(death)
        self._waiting.extend(ordered)

    def _clear_explained(self, explained: frozenset[Death]) -> list[OpenRequest]:
        """Remove explained deaths from all evidence. Returns the suspects whose evidence is now
        empty."""
        cleared = []
        for request in list(self._waiting):
            evidence = self._evidence[request]
            evidence.deaths -= explained
            if not evidence.deaths:
                del self._evidence[request]
                cleared.append(request)
        self._waiting = deque(each for each in self._waiting if each in self._evidence)
        return cleared

    def _has_passed(self, trial: OpenRequest) -> bool:
        """Whether the request on trial has recomputed the tokens of the step in which the engine
        died."""
        branches = trial.branches
        if self._goals:
            return all(
                len(branches[index]) >= goal
                for index, goal in self._goals.items()
                if index in branches
            )
        return any(len(token_ids) >= NUM_PROOF_TOKENS for token_ids in branches.values())

    def _clear(self, trial: OpenRequest) -> None:
        """End the trial, and drop the evidence against its request."""
        self.trial = None
        self._evidence.pop(trial, None)
        self._losses.pop(trial, None)
