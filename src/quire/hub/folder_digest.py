"""Computes a digest of a model's files while reading only a small part of them.

Measurements of a model are stored under this digest. The digest detects accidental changes, not
forgery: reading all weights would take seconds.
"""

import hashlib
from pathlib import Path

_WEIGHTS = (".safetensors", ".gguf", ".bin")
_HEADER_BYTES = 1 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
_DIGEST_BYTES = 16


def folder_digest(folder: Path) -> str:
    """The digest of a model in a folder or in one file.

    The digest covers the names and sizes of the model's files, the config, and for each weight file
    its header (tensor shapes and types) and samples from all parts of its tensor data. The samples
    distinguish models of the same structure.
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
