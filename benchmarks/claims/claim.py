"""The result of a study of this folder: claims with their figures, and pictures."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise, and what came of it.

    promise, source: what is said, and where. ours, baseline: figures with their units; the
    baseline is of the same run, and says what it is. ratio: our figure by the baseline's.
    holds: whether the promise was kept here. command: measures this line alone.
    """

    promise: str
    source: str
    ours: str
    baseline: str
    ratio: float
    holds: bool
    command: str


@dataclass(frozen=True, slots=True)
class Picture:
    """name: of its file, without a suffix. caption: one sentence. svg: the whole file."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The result of a study. title: a heading. notes: paragraphs about the measurement and its
    limits."""

    title: str
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """is_quick: the smallest load that still runs everything; its figures mean little. model: for
    what needs a trained one, a local folder or a hub id; None is the embedded model."""

    is_quick: bool = False
    model: str | None = None


Study = Callable[[Setting], StudyResult]

COMMAND = "python -m benchmarks.claims --only"
# The source of claims that many texts on paging make, but no paper named in this folder measures.
FOLKLORE = "often said of paging; no paper known to us measures it"
