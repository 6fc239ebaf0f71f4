"""A digest of a model's files that reads little of them.

What was measured of a model is found again by it. It protects from accident, not from forgery: a
digest of all weights would take seconds.
"""

import hashlib
from pathlib import Path

_WEIGHTS = (".safetensors", ".gguf", ".bin")
_HEADER_BYTES = 1 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
_DIGEST_BYTES = 16


def folder_digest(folder: Path) -> str:
    """Of the names and sizes of a model's files, the config, and of each file with weights its
    header, which says each tensor's shape and type, and samples from all parts of the rest, in
    which models of one structure differ. folder: or a file that is a model."""
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
