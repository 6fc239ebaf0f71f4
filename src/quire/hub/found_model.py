"""Types for looking up a model, usable without the hub's client."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.hub.gguf.naming import model_stem

Check = Callable[[Path], object]
"""A check that runs before the weights are fetched. It gets a folder that has all other files, or a
copy of a GGUF file's header, and raises a QuireError if the model can't be served."""

OnProgress = Callable[[str, int, int], None]
"""Called with (the current step in words, bytes present, bytes in total)."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's path, and whether its weights are on this machine."""

    #: A folder with all files of the model, perhaps without weights; or the model's first GGUF
    #: file; or a copy of that file's header.
    folder: Path
    has_weights: bool = True
    #: The commit of a model of the hub; None for a local model.
    revision: str | None = None

    def name_for_clients(self, name: str) -> str:
        """The name under which the API serves the model: `name`, which the user gave. If that is
        the path of a GGUF file, the part of the file name that names the model."""
        if self.folder.is_file() and Path(name).expanduser() == self.folder:
            return model_stem(self.folder.name)
        return name

    def named_for_others(self, name: str) -> tuple[str, str | None]:
        """(model, revision) with which another process can find the same model.

        `name` is the name that the user gave. If the weights are missing, `model` is that name
        instead of the folder: the engine fetches the weights after it has checked that it can serve
        the model.
        """
        return (str(self.folder), None) if self.has_weights else (name, self.revision)
