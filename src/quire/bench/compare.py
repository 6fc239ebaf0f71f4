"""Measures quire and its baselines in alternating rounds of one run.

First, each baseline runs the first requests of the workload at several batch widths, to find its
fastest width. Then each round runs every contender once on the same requests. Called by `run`.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.bench.contenders import Contender, RunRecord
from quire.bench.machine import Noise, NoiseMeter
from quire.bench.metrics import Figures, figures, medians
from quire.bench.workload import BenchRequest
from quire.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one contender."""

    figures: Figures
    noise: Noise


@dataclass(frozen=True, slots=True)
class WidthChoice:
    """The fastest batch width of a baseline, and the throughput at all widths."""

    best: int
    #: The number of requests that each width was measured on.
    num_prompts: int
    #: Maps each width to output tokens per second; None if the width does not fit.
    output_throughput: dict[int, float | None]


def measure(contender: Contender, requests: Sequence[BenchRequest]) -> Round:
    """Run the requests once on a contender, and measure the noise of other processes."""
    meter = NoiseMeter()
    record: RunRecord = contender.run(requests)
    noise = meter.stop()
    return Round(figures(record.timelines, record.duration_s) | record.memory, noise)


def choose_width(
    name: str,
    make: Callable[[int], Contender | None],
    widths: Sequence[int],
    requests: Sequence[BenchRequest],
) -> WidthChoice:
    """Measure a baseline at all widths on the same requests.

    `make` returns the contender of a width, or None if that width does not fit. Raises
    ConfigurationError if no width fits.
    """
    found: dict[int, float | None] = {}
    for width in widths:
        contender = make(width)
        if contender is None:
            found[width] = None
            say(f"{name}, {width} wide: does not fit max_num_seqs, max_model_len or the KV cache")
            continue
        rate = measure(contender, requests).figures["output_throughput"]
        assert rate is not None
        found[width] = rate
        say(f"{name}, {width} wide: {rate:.0f} output tokens/s over {len(requests)} requests")
    fitting = {width: rate for width, rate in found.items() if rate is not None}
    if not fitting:
        raise ConfigurationError(
            f"the baseline {name} fits at none of the widths {', '.join(map(str, widths))}; name"
            " smaller ones, or raise max_num_seqs or kv_cache_memory"
        )
    best = max(fitting, key=lambda width: fitting[width])
    return WidthChoice(best, len(requests), found)


def alternate(
    contenders: Mapping[str, Contender], rounds: Sequence[Sequence[BenchRequest]]
) -> dict[str, list[Round]]:
    """Run every contender once in each round. `rounds` has the requests of each round."""
    found: dict[str, list[Round]] = {name: [] for name in contenders}
    for index, requests in enumerate(rounds):
        for name, contender in contenders.items():
            result = measure(contender, requests)
            found[name].append(result)
            rate = result.figures["output_throughput"]
            noise = _describe(result.noise)
            say(f"round {index + 1} of {len(rounds)}, {name}: {rate:.0f} output tokens/s{noise}")
    return found


def median_figures(rounds: Sequence[Round]) -> Figures:
    """Each figure's median over the rounds."""
    return medians([result.figures for result in rounds])


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of output tokens per second between two contenders."""

    #: The ratio of the contenders' medians over the rounds.
    of_medians: float
    #: The lowest and the highest ratio of a single round.
    lowest: float
    highest: float


def ratio(rounds: Sequence[Round], baseline: Sequence[Round]) -> Ratio:
    """The ratios of the first contender's throughput to the baseline's."""
    ours, theirs = _rates(rounds), _rates(baseline)
    by_round = [own / other for own, other in zip(ours, theirs, strict=True)]
    of_medians = statistics.median(ours) / statistics.median(theirs)
    return Ratio(of_medians, min(by_round), max(by_round))


def say(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def _rates(rounds: Sequence[Round]) -> list[float]:
    return [rate for result in rounds if (rate := result.figures["output_throughput"]) is not None]


def _describe(noise: Noise) -> str:
    if noise.other_cores is None:
        return ""
    return f" ({noise.other_cores:.2f} cores busy with other processes)"
