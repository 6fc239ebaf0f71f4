"""Lists the checkpoint file formats (safetensors, GGUF), and chooses one by a folder's files.

To add a format, add a file with a `CheckpointSource`, and a line in `_READERS`. Code outside the
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
"""The readers in order of priority: the first one that finds its files in a folder is used."""


def find_reader(folder: Path) -> type[CheckpointSource]:
    """The reader of the folder's weights. For a folder without weights it is `SafetensorsFiles`,
    whose error names the missing files."""
    return next((reader for reader in _READERS if reader.is_in(folder)), SafetensorsFiles)


def open_checkpoint(folder: Path) -> CheckpointSource:
    """Open the folder's weights. If config.json exists, it shows whether safetensors are quantized.

    Raises CheckpointError that names the file at fault, and UnsupportedModelError for an unknown
    quantization method.
    """
    reader = find_reader(folder)
    source = reader(folder)
    if not isinstance(source, SafetensorsFiles) or not (folder / "config.json").exists():
        return source
    return open_quantized(str(folder), reader.read_config(folder), source)


def register_reader(reader: type[CheckpointSource]) -> None:
    """Add a format in this process, for code outside the package. Built-in formats come first."""
    if reader not in _READERS:
        _READERS.append(reader)
