"""Which requests of a fleet may have killed an engine, and who is to blame.

A death is read as `engine_client.recovery` reads it. Requests that it does not concern go on at
once, in other engines. The others are suspects: `trials` has them tried one after the other, each
alone, and one goes on once it has computed again what was being computed at the death. An engine
that dies on a trial names its culprit: there was no other. So a request that kills is ended after
two deaths over the whole fleet, however many engines there are.

    memory ran out      that may have come from outside: one more death on its trial is needed, when
                        the other suspects have been tried
    an engine is lost   with its machine, or behind a link that was cut: nothing is known of its
                        step. Its requests go on at once; those that were in two lost engines are
                        tried, and one is to blame after four, but an engine that turns out to have
                        lived on counts no more.
    in company          where no engine could be emptied for the trial, the others in its step are
                        suspects, too, and the third death on a trial decides

Pure: knows no process, no clock, no asyncio. Called by `trials` and `fleet_dispatcher`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine_client.recovery import NUM_PROOF_TOKENS, Cause, Death, OpenRequest

MAX_TRIAL_DEATHS = 3
"""With so many deaths on its trials a request is to blame, whatever happened between them."""

NUM_LOSSES, MAX_LOSSES = 2, 4
"""A request is a suspect when so many engines were lost while they computed it, and to blame when
so many were, the last of them on its trial."""


@dataclass(slots=True)
class _Charge:
    """Of a suspect. deaths: of engines that computed it, which no other request explains. on_trial:
    those of them that came on its trial."""

    deaths: set[Death] = field(default_factory=set)
    on_trial: list[Death] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetVerdict:
    """What a death shows.

    blamed: the request that is ended for it. explained: the deaths that the blamed request has
    caused. free: requests that go on at once.
    """

    blamed: OpenRequest | None
    explained: frozenset[Death]
    free: list[OpenRequest]


class Suspects:
    """Invariant: a suspect is in `_waiting` or on trial, not both, and has a charge; nobody else
    has one. Requests without open branches are suspects no more."""

    def __init__(self) -> None:
        self._waiting: deque[OpenRequest] = deque()
        self._charges: dict[OpenRequest, _Charge] = {}
        self._goals: dict[int, int] = {}  # branch -> tokens that clear the request on trial
        self._losses: Counter[OpenRequest] = Counter()
        self.trial: OpenRequest | None = None

    @property
    def num_waiting(self) -> int:
        """How many wait for their trial."""
        return len(self._waiting)

    def on_death(self, death: Death, requests: Sequence[OpenRequest]) -> FleetVerdict:
        """An engine has died. requests: those that it knew of."""
        concerned = [each for each in requests if self._is_concerned(death, each)]
        free = [each for each in requests if each not in concerned]
        trial = self.trial if self.trial in requests else None
        if trial is not None:
            self.trial = None
        if trial is None or trial not in concerned:
            if trial is not None:  # it was not under way: it is tried once more
                self._waiting.appendleft(trial)
            self._charge([each for each in concerned if each is not trial], death)
            return FleetVerdict(None, frozenset(), [each for each in free if each is not trial])
        return self._on_trial_death(trial, death, concerned, free)

    def survived(self, requests: Sequence[OpenRequest]) -> None:
        """An engine that was lost turns out to have lived on: these did nothing to it."""
        for request in requests:
            if self._losses[request] > 0:  # else it was acquitted meanwhile
                self._losses[request] -= 1

    def next_trial(self) -> OpenRequest | None:
        """The request to send now, on its trial; None while one is on trial, or none waits."""
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
        """Tokens of a request came. Returns whether it has passed its trial with them."""
        if request is not self.trial or not self._has_passed(request):
            return False
        self._acquit(request)
        return True

    def forget(self, request: OpenRequest) -> bool:
        """It has ended, or its client has left. Returns whether that ends a trial."""
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
        charge = self._charges[trial]
        charge.deaths.add(death)
        charge.on_trial.append(death)
        beside = [each for each in concerned if each is not trial]
        # What has left may still be in a step under way, where steps overlap.
        was_alone = not beside and not death.activity.names_others(trial.request_id)
        num_deaths = len(charge.on_trial)
        is_proof = was_alone and (death.cause is not Cause.MEMORY or num_deaths > 1)
        is_last = num_deaths >= MAX_TRIAL_DEATHS
        if death.cause is Cause.LOST:
            is_proof = is_last = self._losses[trial] >= MAX_LOSSES
        if not (is_proof or is_last):
            self._charge(beside, death)
            self._waiting.append(trial)
            return FleetVerdict(None, frozenset(), free)
        explained = frozenset(charge.deaths)
        del self._charges[trial]
        return FleetVerdict(trial, explained, [*free, *beside, *self._without(explained)])

    def _charge(self, requests: Sequence[OpenRequest], death: Death) -> None:
        """A request that kills mostly does so in its first steps, so those with the least output
        are tried first. Trials of beam searches take long: they come last."""
        ordered = sorted(requests, key=lambda each: (each.is_beam_search, each.num_tokens))
        for request in ordered:
            self._charges.setdefault(request, _Charge()).deaths.add(death)
        self._waiting.extend(ordered)

    def _without(self, explained: frozenset[Death]) -> list[OpenRequest]:
        """Take these deaths from all charges; returns those who are charged with nothing more."""
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
        """Whether it has computed again what was computed at the death."""
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
