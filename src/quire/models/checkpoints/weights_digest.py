"""A digest of a model's weights, computed while they are read.

The digest doesn't depend on the folder: two checkpoints have the same digest if they hold the same
tensors under the model's names, in any order and any number of files. It covers the stored values,
before they are rounded to another format. It detects accidental changes, not forgery: whoever
makes the weights controls the answers anyway. Called by `loader`.
"""

import hashlib
import json

import torch
import xxhash

from quire.formats.block_quantized.weights import BlockQuantizedRows

DIGEST_BYTES = 16


class WeightsDigest:
    """Hashes pieces of tensors, each once, in any order and from several threads at a time.

    A piece is hashed with XXH3 (128 bits), which is faster than memory and releases the
    interpreter's lock. The sorted hashes of all pieces are hashed with BLAKE2b.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, int], list[int | str]] = {}

    def add(self, name: str, first_row: int, rows: torch.Tensor) -> None:
        """Add `rows` [R, ...] of the tensor `name`, starting at `first_row`, in main memory."""
        content = rows.contiguous().view(torch.uint8).numpy().data
        found = [str(rows.dtype), *rows.shape, xxhash.xxh3_128_hexdigest(content)]
        self._pieces[name, first_row] = found  # atomic, so threads need no lock

    def add_quantized(self, name: str, first_row: int, rows: BlockQuantizedRows) -> None:
        """Add rows that are codes of a quantized weight."""
        hashes = [
            xxhash.xxh3_128_hexdigest(part.contiguous().view(torch.uint8).numpy().data)
            for part in rows.stored
        ]
        self._pieces[name, first_row] = [str(rows.block_format), *rows.shape, *hashes]

    def digest(self) -> bytes:
        """The digest of all added pieces, DIGEST_BYTES bytes long."""
        listed = json.dumps([[*key, *self._pieces[key]] for key in sorted(self._pieces)])
        return hashlib.blake2b(listed.encode(), digest_size=DIGEST_BYTES).digest()
