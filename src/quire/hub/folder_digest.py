"""Computes a digest of a model's files while reading only a small part of them.

Measurements of a model are stored under its digest. It detects accidental changes, not forgery: a
digest of all weights would take seconds.
"""

import hashlib
from pathlib import Path

_WEIGHTS = (".safetensors", ".gguf", ".bin")
_HEADER_BYTES = 1 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
_DIGEST_BYTES = 16


def folder_digest(folder: Path) -> str:
    """The digest of a model in a folder or in one file.

    It covers the names and sizes of the model's files, the config, and of each file with weights
    the header (shapes and types of the tensors) and samples from all parts of the rest. The
    samples differ between models of the same structure.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if not path.is_file() or not (path.suffix in _WEIGHTS or path.name == "config.json"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
            for number in range(1, _NUM_SAMPLES + 1):
                file.seek(max(0, size * number // _NUM_SAMPLES - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
