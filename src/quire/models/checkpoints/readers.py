"""Chooses the reader of a model folder by its files, and opens the weights."""

from pathlib import Path

from quire.models.checkpoints.file_formats import CHECKPOINT_SOURCES
from quire.models.checkpoints.quantized.methods import open_quantized
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.checkpoints.source import CheckpointSource


def find_reader(folder: Path) -> type[CheckpointSource]:
    """The reader of the folder's weights. For a folder without weights it is `SafetensorsFiles`,
    whose error names the missing files."""
    readers = (reader for _, reader in CHECKPOINT_SOURCES.items())
    return next((reader for reader in readers if reader.is_in(folder)), SafetensorsFiles)


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
