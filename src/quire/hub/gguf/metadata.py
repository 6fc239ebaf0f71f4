"""The metadata of a GGUF file, which several readers ask for one after another.

Called by the readers of tokenizers, templates and end tokens.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from quire.hub.gguf.header import read_gguf
from quire.hub.gguf.values import Value


def gguf_metadata(path: Path) -> Mapping[str, Value]:
    """Of the file, or of the first of several. Raises CheckpointError that names it."""
    try:
        found = path.stat()
    except OSError:
        return read_gguf(path).metadata  # raises
    return _read(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, size: int, mtime_ns: int) -> Mapping[str, Value]:
    """Kept while the file is the same: its hundreds of thousands of strings take half a second."""
    return read_gguf(path).metadata
