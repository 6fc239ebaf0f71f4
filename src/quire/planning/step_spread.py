"""The spread of step times: how the ratio of a step's time to its prediction varies.

A disturbance (another process, an interrupt, a shared memory bus) adds about the same time to a
long step as to a short step, so the ratio varies more for short steps. Therefore steps are grouped
by their predicted time, separately for steps with and without prompts.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import Any, Self

from quire.planning.measuring import MeasuredStep

NUM_QUANTILES = 100
#: The fewest steps in a group. If a kind (with or without prompts) has fewer steps, it gets the
#: distribution of all steps.
LEAST_STEPS = 48
#: Maximum number of groups of each kind.
MOST_GROUPS = 5
#: Larger ratios count as disturbances; in means they count as this ratio.
_DISTURBED = 2.0


@dataclass(frozen=True, slots=True)
class _ComparedStep:
    """A step that was measured twice, and its prediction."""

    has_prompts: bool
    predicted_s: float
    #: The ratio of each of the two measured times to the prediction.
    ratios: tuple[float, float]
    #: The absolute logarithm of the ratio of the two times, minus the run's median logarithm.
    #: Therefore a machine that is slower during one of the measurements doesn't add to the spread.
    distance: float


@dataclass(frozen=True, slots=True)
class _SpreadGroup:
    """Steps with similar predictions."""

    #: The longest predicted time of the group's steps, in seconds.
    until_s: float
    #: Ratios of a step's time to its prediction, ascending and equally likely.
    quantiles: tuple[float, ...]


class StepSpread:
    """The ratios of step times to predictions. Without groups, all ratios are 1."""

    def __init__(self, groups: Mapping[bool, Sequence[_SpreadGroup]] | None = None) -> None:
        """Use `fit_spread`. `groups` has the groups of steps with prompts under True, the other
        groups under False, each sorted by until_s."""
        self._groups = dict(groups or {})
        self._edges = {
            kind: [group.until_s for group in found[:-1]] for kind, found in self._groups.items()
        }

    def at(self, has_prompts: bool, predicted_s: float, place: float) -> float:
        """The ratio of a step's time to its prediction, at quantile `place` (0 <= place < 1)."""
        groups = self._groups.get(has_prompts)
        if not groups:
            return 1.0
        quantiles = groups[bisect_left(self._edges[has_prompts], predicted_s)].quantiles
        return quantiles[int(place * len(quantiles))]

    def as_list(self) -> list[Any]:
        """The groups as a list for JSON; see `from_list`."""
        return [
            [kind, group.until_s, list(group.quantiles)]
            for kind, groups in self._groups.items()
            for group in groups
        ]

    @classmethod
    def from_list(cls, found: Sequence[Any]) -> Self:
        """Read the result of `as_list`. Raises TypeError or ValueError for any other list."""
        groups: defaultdict[bool, list[_SpreadGroup]] = defaultdict(list)
        for kind, until_s, quantiles in found:
            values = tuple(float(value) for value in quantiles)
            if not values:
                raise ValueError("a group of steps has no quantiles")
            groups[bool(kind)].append(_SpreadGroup(float(until_s), values))
        return cls(groups)


def fit_spread(steps: Sequence[MeasuredStep], predicted_s: Sequence[float]) -> StepSpread:
    """Fit the distribution to steps and their predictions, which have the same order."""
    kinds: defaultdict[bool, list[_ComparedStep]] = defaultdict(list)
    compared = _compared(steps, predicted_s)
    for step in compared:
        kinds[step.has_prompts].append(step)
    for kind, found in kinds.items():
        if len(found) < LEAST_STEPS:
            kinds[kind] = compared
    groups: dict[bool, list[_SpreadGroup]] = {}
    for kind, unordered in kinds.items():
        found = sorted(unordered, key=lambda step: step.predicted_s)
        number = min(MOST_GROUPS, max(1, len(found) // LEAST_STEPS))
        parts = [
            found[len(found) * index // number : len(found) * (index + 1) // number]
            for index in range(number)
        ]
        groups[kind] = [_SpreadGroup(part[-1].predicted_s, _quantiles(part)) for part in parts]
    return StepSpread(groups)


def _compared(steps: Sequence[MeasuredStep], predicted_s: Sequence[float]) -> list[_ComparedStep]:
    runs: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        once, again = step.seconds
        runs[step.run].append(math.log(once / again))
    usual = {run: median(values) for run, values in runs.items()}
    return [
        _ComparedStep(
            step.work.load.num_chunk_tokens > 0,
            seconds,
            (step.seconds[0] / seconds, step.seconds[1] / seconds),
            abs(math.log(step.seconds[0] / step.seconds[1]) - usual[step.run]),
        )
        for step, seconds in zip(steps, predicted_s, strict=True)
    ]


def _quantiles(steps: Sequence[_ComparedStep]) -> tuple[float, ...]:
    """The quantiles of the ratio between a step's time and its prediction.

    Their width comes from the two measurements of each step. Below the median, the logarithm of the
    ratio is assumed to be normally distributed. Both measurements contribute an error to each
    distance, so the width of one error is 1/sqrt(2) of the width of the distances. Above the median
    the distances are used directly, since a disturbance lengthens only one of two measurements.

    The quantiles are scaled so that their mean equals the mean of the measured ratios without
    strong disturbances. Then the predicted total time of many steps equals the measured one.
    """
    distances = sorted(step.distance for step in steps)
    width = median(distances) / NormalDist().inv_cdf(0.75) / math.sqrt(2)
    places = [(2 * index + 1) / (2 * NUM_QUANTILES) for index in range(NUM_QUANTILES)]
    found = [
        math.exp(
            width * NormalDist().inv_cdf(place)
            if place < 0.5
            else distances[int((2 * place - 1) * len(distances))]
        )
        for place in places
    ]
    taken = [ratio for step in steps for ratio in step.ratios]
    usual = [fmean(min(each, _DISTURBED) for each in values) for values in (taken, found)]
    return tuple(round(value * usual[0] / usual[1], 4) for value in found)
