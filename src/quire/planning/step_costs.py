"""Predicts the seconds of a step, by a model that is fitted to measured steps.

It adds terms to the pacer's model (`core.scheduling.cost_model.StepCostModel`). The terms depend on
quantities that are known only after the plan is made, or after its result:

    + if the step samples + if it admits sequences
    + each admitted sequence + each of its tokens + each released row
    + each ending sequence + each of its tokens
    + if it follows steps with prompts, and then each row
    + if it has prompts + if it is the first with prompts + each prompt + each row beside prompts
    + each block appended to a row + if it releases rows + if it ends sequences
    + K and V that decoding rows read beyond the size of the processor's caches

The model is fitted by non-negative least squares of relative errors. Steps with large errors get
less weight (Huber), since disturbances on a shared machine lengthen a step without bound.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.core.scheduling.cost_model import (
    CHUNK_PAIRS,
    DECODE_PAIRS,
    NUM_SEGMENTS,
    StepCostModel,
    StepLoad,
    StepSample,
    load_parts,
)
from quire.planning.measuring import ROUND, MeasuredStep
from quire.planning.step_spread import StepSpread, fit_spread
from quire.simulation.planned_work import PlannedWork

_Floats = npt.NDArray[np.float64]

#: Numbers of tokens whose K and V may fill the processor's caches; the model's size decides which.
#: Above each number, every further token that is read may take additional time.
READ_EDGES = (1 << 10, 1 << 12, 1 << 14)
NUM_EXTRA = 16 + len(READ_EDGES)
_NUM_SWEEPS, _NUM_REWEIGHTINGS = 800, 5
_NUM_SPEED_FITS = 3
#: Relative errors above this enter the fit linearly instead of squared.
_HUBER = 0.03
#: The weight of the penalty on differences between neighbouring slopes, relative to all samples.
_SMOOTHNESS = 0.005


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The prediction errors of a fit."""

    #: Steps that were used in the fit.
    num_fitted: int
    #: Steps that were not used in the fit.
    num_held_out: int
    #: The mean relative error of predictions for the steps that were not used.
    held_out: float
    #: The mean relative difference between two measurements of the same step.
    repeated: float


@dataclass(frozen=True, slots=True)
class MeasuredBounds:
    """The largest measured sizes of a step."""

    #: Rows that decode.
    num_rows: int
    #: Tokens that a step computes.
    num_tokens: int
    #: Tokens of a row.
    context: int
    #: Tokens whose K and V the decoding rows read; shared tokens count once.
    num_read: int

    def lacking(self, num_rows: int, num_tokens: int, context: int, num_read: int) -> str | None:
        """Text that names the sizes above 5/4 of their measured bounds; None if there are none."""
        named = (
            ("rows in a step", num_rows, self.num_rows),
            ("tokens in a step", num_tokens, self.num_tokens),
            ("tokens in a sequence", context, self.context),
            ("tokens in all decoding sequences", num_read, self.num_read),
        )
        parts = [
            f"{wanted:,} {what} (measured: {most:,})"
            for what, wanted, most in named
            if 4 * wanted > 5 * most
        ]
        return ", ".join(parts) or None


@dataclass(frozen=True, slots=True)
class BlockFactors:
    """How a block size changes the costs that were measured at another block size."""

    #: The factor on the time of attention in decoding rows.
    decode: float
    #: The factor on the time of attention in prompts.
    chunk: float
    #: The host's seconds for each block.
    block_s: float
    #: The measured block size.
    base: int


class StepCosts:
    """The fitted model of step times.

    Invariant: all coefficients are at least 0, so `predict_s` grows with each part of a step.
    """

    def __init__(
        self,
        coefficients: Sequence[float],
        pacing: Sequence[float],
        accuracy: Accuracy,
        bounds: MeasuredBounds,
        spread: StepSpread | None = None,
        factors: BlockFactors | None = None,
    ) -> None:
        """Use `fit_costs`. `pacing` has the coefficients of the pacer's model for the same steps.

        If `spread` is None, steps take exactly the predicted time. If `factors` is None, blocks
        have the measured size.
        """
        assert min(coefficients) >= 0, coefficients
        self.accuracy, self.bounds = accuracy, bounds
        self._coefficients = list(coefficients)
        self._pacing = list(pacing)
        self._spread = spread or StepSpread()
        self._factors = factors
        base, extra = list(coefficients[:-NUM_EXTRA]), coefficients[-NUM_EXTRA:]
        if factors is not None:
            base[DECODE_PAIRS] *= factors.decode
            base[CHUNK_PAIRS] *= factors.chunk
        self._model = StepCostModel(base)
        self._samples_s, self._admits_s, *rest = extra
        self._admission_s, self._admitted_token_s, self._release_s, *rest = rest
        self._ended_s, self._ended_token_s, self._after_s, *rest = rest
        self._prompts_s, self._prompt_s, self._beside_s, self._appended_s, *rest = rest
        self._releases_s, self._ends_s, self._after_row_s, self._first_s, *beyond = rest
        factor = 1.0 if factors is None else factors.decode
        self._beyond_s = [factor * seconds for seconds in beyond]

    def predict_s(self, work: PlannedWork) -> float:
        """The predicted seconds of a step."""
        seconds = self._model.predict_s(work.load)
        if work.sampled:
            seconds += self._samples_s
        if work.num_admissions:
            seconds += self._admits_s + self._admission_s * work.num_admissions
            seconds += self._admitted_token_s * work.num_admitted_tokens
        if work.num_releases:
            seconds += self._releases_s + self._release_s * work.num_releases
        seconds += self._mixture_s(work)
        seconds += self._appended_s * work.num_appended_blocks + self._beyond_caches_s(work)
        if self._factors is not None:
            # The costs of measured prompt tokens already include the costs of their blocks.
            num_taken = work.num_new_blocks - work.num_appended_blocks
            num_more = num_taken - work.load.num_chunk_tokens / self._factors.base
            seconds = max(0.0, seconds + self._factors.block_s * num_more)
        return seconds + self.ending_s(work.num_ended, work.num_ended_tokens)

    def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
        """The ratio of a step's time to the prediction at quantile `place`, 0 <= place < 1."""
        return self._spread.at(work.load.num_chunk_tokens > 0, predicted_s, place)

    def _mixture_s(self, work: PlannedWork) -> float:
        """The seconds that prompts of this step or of earlier steps add, except for the cost of
        each prompt token."""
        load = work.load
        if not load.num_chunk_tokens:
            return (self._after_s + self._after_row_s * load.num_decodes) * work.coldness
        seconds = self._prompts_s + self._first_s * _is_first(work)
        return seconds + self._prompt_s * load.num_chunks + self._beside_s * load.num_decodes

    def _beyond_caches_s(self, work: PlannedWork) -> float:
        return sum(
            (
                seconds * max(0, work.num_read - edge)
                for seconds, edge in zip(self._beyond_s, READ_EDGES, strict=True)
            ),
            0.0,
        )

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """The seconds that ending sequences add to the step in which they end."""
        if not num_ended:
            return 0.0
        return self._ends_s + self._ended_s * num_ended + self._ended_token_s * num_ended_tokens

    def split_s(self, work: PlannedWork) -> dict[str, float]:
        """The seconds of a step without `ending_s`, by the name of each part."""
        load, model = work.load, self._model
        beyond_s = self._beyond_caches_s(work)
        attention_s = model.predict_s(load) - model.predict_s(
            load._replace(num_decode_pairs=0, num_chunk_pairs=0)
        )
        decodes_s = model.predict_s(StepLoad(load.num_decodes))
        least_s = model.predict_s(StepLoad())
        sampling_s = self._samples_s * bool(work.sampled)
        mixture_s = self._mixture_s(work)
        appended_s = self._appended_s * work.num_appended_blocks
        return {
            "every step": least_s + sampling_s,
            "decoding rows": decodes_s - least_s + appended_s,
            "prompts": model.predict_s(load) - decodes_s - attention_s + mixture_s,
            "attention": attention_s + beyond_s,
            "admitting and ending": self.predict_s(work)
            - model.predict_s(load)
            - sampling_s
            - mixture_s
            - appended_s
            - beyond_s,
        }

    def with_blocks(self, factors: BlockFactors, *, is_even: bool = False) -> "StepCosts":
        """The costs of the same steps with another block size. If `is_even`, steps take exactly the
        predicted time."""
        spread = None if is_even else self._spread
        return StepCosts(
            self._coefficients, self._pacing, self.accuracy, self.bounds, spread, factors
        )

    def pacing_model(self) -> StepCostModel:
        """A new model with which a pacer starts."""
        return StepCostModel(self._pacing)

    def as_mapping(self) -> dict[str, Any]:
        """The costs as a mapping for JSON, without `factors`; see `from_mapping`."""
        return {
            "coefficients": self._coefficients,
            "pacing": self._pacing,
            "spread": self._spread.as_list(),
            "accuracy": asdict(self.accuracy),
            "bounds": asdict(self.bounds),
        }

    @classmethod
    def from_mapping(cls, found: Mapping[str, Any]) -> Self:
        """Read the result of `as_mapping`. Raises KeyError, TypeError, ValueError or AssertionError
        for any other mapping."""
        return cls(
            [float(value) for value in found["coefficients"]],
            [float(value) for value in found["pacing"]],
            Accuracy(**found["accuracy"]),
            MeasuredBounds(**found["bounds"]),
            StepSpread.from_list(found["spread"]),
        )


def fit_costs(steps: Sequence[MeasuredStep], pacing: StepCostModel | None = None) -> StepCosts:
    """Fit the costs to calibration runs, and measure their error with runs that are left out.

    Fitted are the runs of the first round, which are at the bounds' corners, and every other later
    run. There must be at least one run of each kind. `pacing` is the model with which an engine's
    pacer starts on this machine; if it is None, it is fitted to the same steps.
    """
    held_out = [step for step in steps if step.run >= ROUND and step.run % 2]
    fitted = [step for step in steps if step.run < ROUND or step.run % 2 == 0]
    assert fitted and held_out, len(steps)
    coefficients, speeds = _fit_with_speeds(fitted)
    steady = [_at_usual_speed(step, speeds) for step in steps]
    if pacing is None:
        samples = [StepSample(step.work.load, fmean(step.seconds)) for step in fitted]
        pacing = StepCostModel.fit(samples)
    loads = [step.work.load for step in fitted]
    bounds = MeasuredBounds(
        max(load.num_decodes for load in loads) + 1,
        max(load.num_decodes + load.num_chunk_tokens for load in loads),
        max(step.work.longest for step in fitted),
        max(step.work.num_read for step in fitted),
    )
    repeated = fmean(2 * abs(a - b) / (a + b) for a, b in (step.seconds for step in steps))
    blind = StepCosts(coefficients, pacing.coefficients, Accuracy(0, 0, 0.0, 0.0), bounds)
    off = mean_error(blind, [_at_usual_speed(step, speeds) for step in held_out])
    accuracy = Accuracy(len(fitted), len(held_out), off, repeated)
    spread = fit_spread(steady, [blind.predict_s(step.work) for step in steady])
    return StepCosts(coefficients, pacing.coefficients, accuracy, bounds, spread)


def _fit_with_speeds(steps: Sequence[MeasuredStep]) -> tuple[list[float], dict[int, float]]:
    """Fit the coefficients, and for each round the ratio of its step times to the median round's.

    The ratios correct for the changing speed of a shared machine. The first round has no ratio,
    since its runs can't be compared with others.
    """
    speeds: dict[int, float] = {}
    coefficients: list[float] = []
    for _ in range(_NUM_SPEED_FITS):
        steady = [_at_usual_speed(step, speeds) for step in steps]
        coefficients = _fit([(step.work, taken) for step in steady for taken in step.seconds])
        ratios: defaultdict[int, list[float]] = defaultdict(list)
        for step in steps:
            if step.run >= ROUND:
                predicted_s = float(np.dot(coefficients, _parts(step.work)))
                ratios[step.run // ROUND] += [taken / predicted_s for taken in step.seconds]
        found = {number: median(values) for number, values in ratios.items()}
        usual = median(found.values()) if found else 1.0
        speeds = {number: value / usual for number, value in found.items()}
    return coefficients, speeds


def _at_usual_speed(step: MeasuredStep, speeds: Mapping[int, float]) -> MeasuredStep:
    factor = speeds.get(step.run // ROUND, 1.0)
    once, again = step.seconds
    return MeasuredStep(step.run, step.work, (once / factor, again / factor))


def mean_error(costs: StepCosts, steps: Sequence[MeasuredStep]) -> float:
    """The mean relative error of the prediction over both measurements of each step."""
    return fmean(
        abs(costs.predict_s(step.work) - seconds) / seconds
        for step in steps
        for seconds in step.seconds
    )


def _parts(work: PlannedWork) -> list[float]:
    """The quantities of a step that are multiplied by the coefficients."""
    has_prompts = work.load.num_chunk_tokens > 0
    coldness = 0.0 if has_prompts else work.coldness  # prompts fill the caches themselves
    return [
        *load_parts(work.load),
        float(bool(work.sampled)),
        float(bool(work.num_admissions)),
        float(work.num_admissions),
        float(work.num_admitted_tokens),
        float(work.num_releases),
        float(work.num_ended),
        float(work.num_ended_tokens),
        coldness,
        float(has_prompts),
        float(work.load.num_chunks),
        float(work.load.num_decodes * has_prompts),
        float(work.num_appended_blocks),
        float(bool(work.num_releases)),
        float(bool(work.num_ended)),
        coldness * work.load.num_decodes,
        float(_is_first(work)),
        *(float(max(0, work.num_read - edge)) for edge in READ_EDGES),
    ]


def _is_first(work: PlannedWork) -> bool:
    """Whether a step has prompts and the steps before it had none, so that the processor's caches
    lack the code for prompts."""
    return work.load.num_chunk_tokens > 0 and not work.coldness


def _fit(samples: Sequence[tuple[PlannedWork, float]]) -> list[float]:
    rows = np.array([_parts(work) for work, _ in samples])
    seconds = np.array([taken for _, taken in samples])
    relative = rows / seconds[:, None]
    smoothing = _smoothing(rows.shape[1], seconds, len(samples))
    weights = np.ones(len(samples))
    solution: _Floats = np.zeros(rows.shape[1])
    for _ in range(_NUM_REWEIGHTINGS):
        weighted = relative * weights[:, None]
        matrix = weighted.T @ weighted + smoothing
        solution = _solve(matrix, weighted.T @ weights, solution)
        errors = np.abs(relative @ solution - 1)
        weights = np.sqrt(np.minimum(1, _HUBER / np.maximum(errors, 1e-9)))
    return [float(value) for value in solution]


def _smoothing(num_parts: int, seconds: _Floats, num_samples: int) -> _Floats:
    """The matrix of a penalty that makes neighbouring slopes equal if samples can't separate
    them."""
    matrix = np.zeros((num_parts, num_parts))
    for segment in range(NUM_SEGMENTS - 1):
        row = np.zeros(num_parts)
        row[1 + segment], row[2 + segment] = 1, -1
        weight = _SMOOTHNESS * (1 << segment) / float(seconds.max())
        matrix += num_samples * weight**2 * np.outer(row, row)
    return matrix


def _solve(matrix: _Floats, target: _Floats, start: _Floats) -> _Floats:
    """Minimize x'Mx/2 - t'x over x >= 0 by coordinate descent."""
    solution = start.copy()
    for _ in range(_NUM_SWEEPS):
        before = solution.copy()
        for index in range(len(target)):
            if matrix[index, index]:
                slope = target[index] - matrix[index] @ solution
                solution[index] = max(0.0, solution[index] + slope / matrix[index, index])
        if np.abs(solution - before).max() <= 1e-6 * solution.max():
            break
    return solution
