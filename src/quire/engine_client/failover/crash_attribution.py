"""Decides which request crashed an engine.

`engine_client.recovery` describes deaths. If a death came from outside, or while nothing was
computed, no request is to blame, and all requests continue. Otherwise the requests in the engine's
last step are suspects: `isolated_trials` runs them one after another, each alone in an engine if
possible. A suspect is cleared once it has recomputed the tokens that were being computed at the
death. What a death during a trial proves depends on its cause:

- The engine crashed or hung: the request on trial is to blame if the engine ran no other request.
  Otherwise the other requests of the step become suspects, too, and the request is tried again at
  once, alone. So a deadly request is ended at the latest after its second trial.
- Memory ran out: another program may have used it up, so all other suspects are tried first. The
  request is to blame if the engine dies on its trial again, and another request has passed a trial
  in between.
- The engine is lost because its machine or the network has failed: its last step is unknown. Its
  requests continue at once. A request that was in two lost engines gets a trial. After four lost
  engines it is blamed if the last loss was on its trial. A loss no longer counts if the engine is
  alive.

A request is blamed at the third death during its trials even without proof. Two requests that kill
an engine only together would otherwise be tried forever. `core.scheduling.fault_isolation` has the
same idea for a step that fails in an engine that continues: it tries each sequence in a step of its
own.

This module imports no process, clock or asyncio. `isolated_trials` and `fleet_dispatcher` call it.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine_client.recovery import Cause, Death
from quire.engine_client.request_book import OpenRequest

NUM_PROOF_TOKENS = 2
"""A suspect is cleared when each branch that had begun has this many more tokens: the token that
was being computed at the death, and one more, since the last message may not have arrived."""

MAX_TRIAL_DEATHS = 3
"""A request is to blame, without further proof, once this many engines died during its trials."""

NUM_LOSSES, MAX_LOSSES = 2, 4
"""A request becomes a suspect after NUM_LOSSES lost engines, and is to blame after MAX_LOSSES if
the last loss was on its trial."""


@dataclass(slots=True)
class _Evidence:
    """The deaths of engines that one suspect may have caused."""

    #: Deaths of engines that computed the request. A passed trial removes all of them. If another
    #: request is blamed, the deaths that this explains are removed.
    deaths: set[Death] = field(default_factory=set)
    #: Deaths during the request's trials. A passed trial removes those for lack of memory, since
    #: another program has used up the memory.
    on_trial: list[Death] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetVerdict:
    """The request to blame for an engine's death, if any, and the requests that continue."""

    #: The request that is blamed for the death and ended; it has no open branches if its client has
    #: left. None if no request is blamed yet.
    blamed: OpenRequest | None
    #: All deaths that the blamed request has caused. After a crash on a trial that proves nothing
    #: yet, only this death, whose cause the next trials will show.
    explained: frozenset[Death]
    #: The requests that are not suspects. They continue as soon as a replica takes requests.
    continuing: list[OpenRequest]


class CrashAttribution:
    """Collects evidence against the requests that may have crashed an engine: the suspects.

    Invariant: each suspect has an entry in `_evidence` and is either in `_waiting` or on trial.
    Cleared requests keep theirs until no suspect is left. A request without open branches is
    dropped from the suspects when its trial is due.
    """

    def __init__(self) -> None:
        #: The suspects that wait for their trial, in the order of the trials.
        self._waiting: deque[OpenRequest] = deque()
        self._evidence: dict[OpenRequest, _Evidence] = {}
        #: Number of tokens that each branch, by its index, has to reach before the trial is passed.
        self._goals: dict[int, int] = {}
        #: Number of lost engines that had been computing each request.
        self._losses: Counter[OpenRequest] = Counter()
        #: The request on whose trial an engine died last; None once it has passed a trial since.
        self._last_struck: OpenRequest | None = None
        #: Whether another request has passed a trial since that death.
        self._others_passed = False
        #: The request on trial; None while there is no trial.
        self.trial: OpenRequest | None = None

    @property
    def num_waiting(self) -> int:
        """Number of suspects that wait for their trial."""
        return len(self._waiting)

    @property
    def delays_others(self) -> bool:
        """Whether new requests have to wait if only the engine of the trials can take them. They
        don't wait for the first trial of a beam search, which has no output before its end, if it
        is the last suspect."""
        trial = self.trial
        if self._waiting or trial is None or not trial.is_beam_search:
            return True
        return bool(self._evidence[trial].on_trial)

    def on_death(
        self, death: Death, requests: Sequence[OpenRequest], *, had_trial: bool
    ) -> FleetVerdict:
        """Judge the death of an engine that had `requests`. `had_trial` tells whether it ran the
        trial, even if the client of the request on trial has left."""
        trial = self.trial if had_trial else None
        # First, divide the requests beside the one on trial by whether they may have caused the
        # death.
        suspects: list[OpenRequest] = []
        continuing: list[OpenRequest] = []
        for request in requests:
            if request is not trial:
                (suspects if self._is_concerned(death, request) else continuing).append(request)
        if trial is None:
            self._suspect(suspects, death)
            return FleetVerdict(None, frozenset(), continuing)
        # Then decide by whether the request on trial was in the step.
        self.trial = None
        if self._is_concerned(death, trial):
            return self._on_trial_death(trial, death, suspects, continuing)
        self._waiting.appendleft(trial)
        self._suspect(suspects, death)
        return FleetVerdict(None, frozenset(), continuing)

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
            self._losses.pop(first, None)  # its client has left
        self._evidence.clear()
        self._last_struck = None
        return None

    def note_output(self, request: OpenRequest) -> bool:
        """Note that a request has new tokens. Returns True if the request has now passed its
        trial."""
        if request is not self.trial or not self._has_passed(request):
            return False
        self._clear(request)
        return True

    def remove(self, request: OpenRequest) -> bool:
        """Remove a request that was answered, refused or blamed. Returns True if it was on
        trial."""
        self._losses.pop(request, None)
        was_on_trial = request is self.trial
        if was_on_trial:
            self._clear(request)
        return was_on_trial

    def release(self, request: OpenRequest) -> bool:
        """Remove a request whose client has left. Returns whether the request was on trial; the
        trial then ends without a result."""
        self._losses.pop(request, None)
        was_on_trial = request is self.trial
        if was_on_trial:
            self.trial = None
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
        beside: list[OpenRequest],
        continuing: list[OpenRequest],
    ) -> FleetVerdict:
        # First, decide whether this death proves that the request on trial is to blame.
        evidence = self._evidence[trial]
        evidence.deaths.add(death)
        evidence.on_trial.append(death)
        is_last = len(evidence.on_trial) >= MAX_TRIAL_DEATHS
        match death.cause:
            case Cause.MEMORY:
                is_proof = self._last_struck is trial and self._others_passed
            case Cause.LOST:
                is_proof = is_last = self._losses[trial] >= MAX_LOSSES
            case _:
                # If steps overlap, a request that was moved away may still be in the running step.
                is_proof = not beside and not death.activity.names_others(trial.request_id)
        self._last_struck, self._others_passed = trial, False
        # If so, or if its client has left, blame it for all deaths in its evidence. A suspect whose
        # evidence has only these deaths is then cleared.
        if is_proof or is_last or not trial.branches:
            self._losses.pop(trial, None)
            explained = frozenset(self._evidence.pop(trial).deaths)
            cleared = self._clear_explained(explained)
            return FleetVerdict(trial, explained, [*continuing, *beside, *cleared])
        # Else try it again: at once after a crash, and after all other suspects if another program
        # or machine may be the cause.
        self._suspect(beside, death)
        if death.cause is Cause.CRASH:
            self._waiting.appendleft(trial)
            return FleetVerdict(None, frozenset([death]), continuing)
        self._waiting.append(trial)
        return FleetVerdict(None, frozenset(), continuing)

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
        suspects, self._waiting = self._waiting, deque()
        cleared: list[OpenRequest] = []
        for request in suspects:
            evidence = self._evidence[request]
            evidence.deaths -= explained
            (self._waiting if evidence.deaths else cleared).append(request)
        return cleared

    def _has_passed(self, trial: OpenRequest) -> bool:
        """Whether the request on trial has recomputed the tokens of the step in which the engine
        died."""
        branches = trial.branches
        if self._goals:
            return bool(branches) and all(
                len(branches[index]) >= goal
                for index, goal in self._goals.items()
                if index in branches
            )
        return any(len(token_ids) >= NUM_PROOF_TOKENS for token_ids in branches.values())

    def _clear(self, trial: OpenRequest) -> None:
        """End the trial of a request that has passed it, or was answered."""
        self.trial = None
        self._losses.pop(trial, None)
        evidence = self._evidence[trial]
        evidence.deaths.clear()
        evidence.on_trial = [past for past in evidence.on_trial if past.cause is not Cause.MEMORY]
        if self._last_struck is trial:
            self._last_struck = None
        else:
            self._others_passed = True
