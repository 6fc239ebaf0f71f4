"""Locates adapter files and detects whether they have changed. Imports no torch."""

from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

FileStamps = tuple[tuple[int, int, int] | None, ...]
"""Inode, size in bytes and modification time (ns) of each file; None if it can't be read."""


def file_stamps(folder: str) -> FileStamps:
    """The stamp of each adapter file in `folder`. Equal stamps mean that no file has changed."""
    return tuple(_file_version(Path(folder) / name) for name in (CONFIG_FILE, WEIGHTS_FILE))


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: the path is invalid, such as one with a NUL in it
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def adapters_in(folder: Path) -> dict[str, Path]:
    """The adapter folders directly below `folder`, keyed and sorted by name. Raises OSError if
    `folder` can't be listed."""
    return {each.name: each for each in sorted(folder.iterdir()) if (each / CONFIG_FILE).is_file()}
