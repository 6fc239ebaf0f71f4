"""What is said and asked while a model is looked up, without the hub's client."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.hub.gguf.naming import model_stem

Check = Callable[[Path], object]
"""Raises an error of quire for a folder that can't be served, by all of its files but the weights;
called before these are fetched. Of a GGUF file it gets a copy of the header."""

OnProgress = Callable[[str, int, int], None]
"""Called with (what is done, bytes that are there, bytes in all)."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """folder: has all of the model but maybe its weights; or is a GGUF file, the first one of a
    model in several, or a copy of its header. has_weights: whether these are there. revision: the
    commit, of a model of the hub."""

    folder: Path
    has_weights: bool = True
    revision: str | None = None

    def name_for_clients(self, name: str) -> str:
        """What the model is served as: the name as it was given, but of a path to a GGUF file what
        its name says of the model. name: as it was found here."""
        if self.folder.is_file() and Path(name).expanduser() == self.folder:
            return model_stem(self.folder.name)
        return name

    def named_for_others(self, name: str) -> tuple[str, str | None]:
        """(model, revision) by which another process finds the same. name: as it was found here.

        Weights that are not there yet are for the engine to fetch, which can tell before whether
        they are going to be served.
        """
        return (str(self.folder), None) if self.has_weights else (name, self.revision)
