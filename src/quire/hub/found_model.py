"""What is said and asked while a model is looked up, without the hub's client."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Check = Callable[[Path], object]
"""Raises an error of quire for a folder that can't be served, by all of its files but the weights;
called before these are fetched."""

OnProgress = Callable[[str, int, int], None]
"""Called with (what is done, bytes that are there, bytes in all)."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """folder: has all of the model but maybe its weights. has_weights: whether these are there.
    revision: the commit, of a model of the hub."""

    folder: Path
    has_weights: bool = True
    revision: str | None = None

    def named_for_others(self, name: str) -> tuple[str, str | None]:
        """(model, revision) by which another process finds the same. name: as it was found here.

        Weights that are not there yet are for the engine to fetch, which can tell before whether
        they are going to be served.
        """
        return (str(self.folder), None) if self.has_weights else (name, self.revision)
