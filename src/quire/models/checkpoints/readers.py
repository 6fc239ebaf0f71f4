"""Checkpoint formats that can be read, and which a folder holds.

To add a format: its file with a `CheckpointSource`, and a line in `_READERS`; code outside the
package calls `register_reader`.
"""

from pathlib import Path

from quire.models.checkpoints.gguf.gguf_files import GGUFFiles
from quire.models.checkpoints.quantized.methods import open_quantized
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.checkpoints.source import CheckpointSource

_READERS: list[type[CheckpointSource]] = [
    SafetensorsFiles,
    GGUFFiles,
]
"""The first that finds its files in a folder reads it."""


def find_reader(folder: Path) -> type[CheckpointSource]:
    """The format of the folder's weights; where there are none, safetensors, which says what is
    missing when it is opened."""
    return next((reader for reader in _READERS if reader.is_in(folder)), SafetensorsFiles)


def open_checkpoint(folder: Path) -> CheckpointSource:
    """The folder's weights, as numbers where its config says nothing of them, or is not there.

    Raises CheckpointError that names the file at fault, and UnsupportedModelError for weights that
    are quantized as nothing here reads them.
    """
    reader = find_reader(folder)
    source = reader(folder)
    if not isinstance(source, SafetensorsFiles) or not (folder / "config.json").exists():
        return source
    return open_quantized(str(folder), reader.read_config(folder), source)


def register_reader(reader: type[CheckpointSource]) -> None:
    """Let folders be read, in this process, by a format from outside the package, after ours."""
    if reader not in _READERS:
        _READERS.append(reader)
