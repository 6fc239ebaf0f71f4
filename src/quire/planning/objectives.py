"""Objectives of a configuration: bounds on how long clients wait.

    ttft=500ms,itl=50ms

Each bound applies to the 99th percentile: `ttft` of the time to the first token, and `itl` of the
time between two tokens of an answer.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigurationError

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3}
PERCENTILE = 0.99


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds in seconds; None means no bound."""

    ttft_s: float | None = None
    itl_s: float | None = None


def parse_objectives(text: str) -> Objectives:
    """Parse the form that the module's docstring shows. Raises ConfigurationError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s|)", part.strip())
        if match is None or match[1] in found or not float(match[2]):
            raise ConfigurationError(
                f"slo has {part!r:.80}, but must be ttft=TIME, itl=TIME or both with a comma"
                " between, where TIME is above 0 and in seconds, such as 0.5, 500ms or 2s"
            )
        found[match[1]] = float(match[2]) * _UNITS[match[3]]
    return Objectives(found.get("ttft"), found.get("itl"))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest v of `values` with at least `share` of them <= v; nan without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def excess(objectives: Objectives, ttft_s: float, itl_s: float) -> float:
    """The largest ratio of a measured time to its bound; at most 1 if all objectives are met.

    It is 0 without bounds. A time of nan (nothing was served, or no second token) is ignored.
    """
    ratios = [
        value / bound
        for value, bound in ((ttft_s, objectives.ttft_s), (itl_s, objectives.itl_s))
        if bound is not None and not math.isnan(value)
    ]
    return max(ratios, default=0.0)
