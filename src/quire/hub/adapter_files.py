"""The files of an adapter, and whether they were changed. No torch."""

from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

FileStamps = tuple[tuple[int, int, int] | None, ...]
"""Of each file its inode, its size and when it was changed; None: it can't be found."""


def file_stamps(folder: str) -> FileStamps:
    """Of the adapter's files in `folder`: equal ones mean that nothing was changed."""
    return tuple(_stamp(Path(folder) / name) for name in (CONFIG_FILE, WEIGHTS_FILE))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):  # the second for what can be no path, as with a NUL in it
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def adapters_in(folder: Path) -> dict[str, Path]:
    """The adapters in the folders of a folder, by their folders' names, in order. Raises OSError
    where it can't be listed."""
    return {each.name: each for each in sorted(folder.iterdir()) if (each / CONFIG_FILE).is_file()}
