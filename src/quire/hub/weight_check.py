"""Checks that a model's weight files are all there and whole, by their headers.

The reader of checkpoints repeats these checks. Here they take milliseconds and no torch, so the
command line and the API server run them before an engine starts.
"""

from pathlib import Path

from quire.errors import CheckpointError
from quire.hub.gguf.naming import gguf_paths
from quire.hub.safetensors_header import read_header
from quire.hub.weight_files import weight_paths


def check_weight_files(model: Path) -> None:
    """Raise CheckpointError if a weight file is missing, cut off, or a pickle.

    `model` is a folder in Hugging Face's format, or a model's first GGUF file.
    """
    if model.is_file():
        # This imports numpy, which folders don't need.
        from quire.hub.gguf.header import read_gguf

        for path in gguf_paths(model):
            read_gguf(path)
        return
    for path in weight_paths(model):
        try:
            read_header(path)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
