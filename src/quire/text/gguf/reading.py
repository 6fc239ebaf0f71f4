"""Reads the tokenizer and the chat templates of a GGUF file. Every error names the file.

Called by `text.tokenizer` and `text.tokenizer_config`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import CheckpointError, UnsupportedModelError
from quire.text.gguf.backend import build_backend
from quire.text.gguf.settings import read_settings


def read_gguf_backend(path: Path) -> tokenizers.Tokenizer:
    """The file's tokenizer. Raises CheckpointError and UnsupportedModelError."""
    metadata = _metadata(path)
    with _named(path):
        return build_backend(metadata)


def read_gguf_settings(path: Path) -> dict[str, Any]:
    """The file's settings in the form of tokenizer_config.json. Raises CheckpointError."""
    metadata = _metadata(path)
    with _named(path):
        return read_settings(metadata)


def _metadata(path: Path) -> Mapping[str, Any]:
    # Imported here because it imports numpy, which tokenizers in a folder don't need.
    from quire.hub.gguf.header import read_gguf

    return read_gguf(path).metadata


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from error
