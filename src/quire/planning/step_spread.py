"""How far steps are from what is predicted of them.

What disturbs a step (another process, an interrupt, memory that others use) adds to it about as
much whether it is long or short, so a short step is relatively further off. So steps are grouped:
those with prompts and those without, by how long they are predicted to take.
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
LEAST_STEPS = 48
"""Of a group; of a kind with fewer, the spread is that of all steps."""
MOST_GROUPS = 5
"""Of each kind."""
_DISTURBED = 2.0
"""A step that takes so many times as long as usual was disturbed."""


@dataclass(frozen=True, slots=True)
class _ComparedStep:
    """A step that was measured, and its seconds as predicted. distance: how many times as long it
    took once as the other time, as a logarithm, beside what is usual of its scene: so a machine
    that was slower for a while is not taken for one whose steps differ."""

    has_prompts: bool
    predicted_s: float
    ratios: tuple[float, float]
    distance: float


@dataclass(frozen=True, slots=True)
class _SpreadGroup:
    """until_s: the longest prediction. quantiles: of steps' seconds to predicted ones, ascending,
    as many steps between any two."""

    until_s: float
    quantiles: tuple[float, ...]


class StepSpread:
    """How many times as long as predicted steps take. Without groups: all take as long."""

    def __init__(self, groups: Mapping[bool, Sequence[_SpreadGroup]] | None = None) -> None:
        """Use `fit_spread`. groups: with prompts and without, in order of until_s."""
        self._groups = dict(groups or {})
        self._edges = {
            kind: [group.until_s for group in found[:-1]] for kind, found in self._groups.items()
        }

    def at(self, has_prompts: bool, predicted_s: float, place: float) -> float:
        """Of a step, the ratio that so many of its kind stay below. place: 0 <= place < 1."""
        groups = self._groups.get(has_prompts)
        if not groups:
            return 1.0
        quantiles = groups[bisect_left(self._edges[has_prompts], predicted_s)].quantiles
        return quantiles[int(place * len(quantiles))]

    def as_list(self) -> list[Any]:
        """As JSON can hold it; for `from_list`."""
        return [
            [kind, group.until_s, list(group.quantiles)]
            for kind, groups in self._groups.items()
            for group in groups
        ]

    @classmethod
    def from_list(cls, found: Sequence[Any]) -> Self:
        """Raises TypeError or ValueError for what is none."""
        groups: defaultdict[bool, list[_SpreadGroup]] = defaultdict(list)
        for kind, until_s, quantiles in found:
            values = tuple(float(value) for value in quantiles)
            if not values:
                raise ValueError("a group of steps has no quantiles")
            groups[bool(kind)].append(_SpreadGroup(float(until_s), values))
        return cls(groups)


def fit_spread(steps: Sequence[MeasuredStep], predicted_s: Sequence[float]) -> StepSpread:
    """predicted_s: of each of `steps`."""
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
    scenes: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        once, again = step.seconds
        scenes[step.scene].append(math.log(once / again))
    usual = {scene: median(values) for scene, values in scenes.items()}
    return [
        _ComparedStep(
            step.work.load.num_chunk_tokens > 0,
            seconds,
            (step.seconds[0] / seconds, step.seconds[1] / seconds),
            abs(math.log(step.seconds[0] / step.seconds[1]) - usual[step.scene]),
        )
        for step, seconds in zip(steps, predicted_s, strict=True)
    ]


def _quantiles(steps: Sequence[_ComparedStep]) -> tuple[float, ...]:
    """How wide: by steps that were the same twice. The logarithm of a ratio is the difference of
    two, so below the middle it is a normal distribution of 1/sqrt(2) of the width that the median
    says. Above are the ratios themselves: what disturbs a step makes it longer, one of the two.

    Their mean, but for what was disturbed much, is that of measured steps to predictions, so that
    many steps together take as long as they did.
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
