"""Segments: append-only files of disk records, sealed with a footer.

    descriptor, 64 bytes | record | record | ... | entries of all records | trailer, 64 bytes

The index of a sealed segment is read from its footer alone. If the process ended before sealing,
the segment has no trailer; its records are found from header to header, up to the first incomplete
record. The descriptor contains the namespace and the segment's number, so that a file copied from
elsewhere is not accepted.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from quire.tiers.disk.files import Buffer, Files, read_whole, write_whole
from quire.tiers.disk.record import (
    ENTRY_BYTES,
    HEADER_BYTES,
    Record,
    pack_entries,
    pack_header,
    padding,
    seed_of,
    tokens_bytes_of,
    unpack_entries,
    unpack_header,
)

VERSION = 1
_DESCRIPTOR = struct.Struct("<8sII16s16x16s")
_DESCRIPTOR_MAGIC = b"QUIRESEG"
DESCRIPTOR_BYTES = _DESCRIPTOR.size
_TRAILER = struct.Struct("<8sIIQQ16x16s")
_TRAILER_MAGIC = b"QUIREEND"
TRAILER_BYTES = _TRAILER.size

MAX_NUMBER = (1 << 32) - 1
MAX_FOOTER_BYTES = 256 << 20
"""Maximum bytes of a footer, equal to the maximum size of a segment. A trailer that announces more
is invalid."""

assert DESCRIPTOR_BYTES == TRAILER_BYTES == 64


class Contents(NamedTuple):
    """The records of a segment file."""

    records: list[Record]
    #: The file offset at which the records end.
    end: int
    #: True if a valid footer follows the records.
    is_sealed: bool


def footer_bytes(num_records: int, num_tokens_bytes: int) -> int:
    return num_records * ENTRY_BYTES + num_tokens_bytes + TRAILER_BYTES


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def segment_number(name: str) -> int | None:
    """The segment number in a file name; None if `name` is not a segment's name."""
    digits = name.removesuffix(".seg")
    if digits == name or not (digits.isascii() and digits.isdigit()):
        return None
    number = int(digits)
    return number if number <= MAX_NUMBER and name == f"{number:08d}.seg" else None


def _pack_descriptor(number: int, fingerprint: bytes) -> bytes:
    head = _DESCRIPTOR.pack(_DESCRIPTOR_MAGIC, VERSION, number, fingerprint, b"")[:-16]
    return head + xxhash.xxh3_128_digest(head)


def _trailer(footer: bytes, num_records: int, offset: int, seed: int) -> bytes:
    head = _TRAILER.pack(_TRAILER_MAGIC, VERSION, num_records, offset, len(footer), b"")[:-16]
    return head + xxhash.xxh3_128_digest(footer + head, seed)


def read_segment(
    files: Files, path: Path, number: int, fingerprint: bytes, *, by_footer: bool = True
) -> Contents | None:
    """The records of a file; None if the file is not this namespace's segment `number`.

    With `by_footer`, the records come from the footer if it is valid; otherwise they are found by
    their headers. Raises OSError. Payloads are not read; they are checked when they are loaded.
    """
    descriptor = files.open_to_read(path)
    try:
        if read_whole(files, descriptor, DESCRIPTOR_BYTES, 0) != _pack_descriptor(
            number, fingerprint
        ):
            return None
        size = files.size(descriptor)
        seed = seed_of(fingerprint)
        sealed = _read_footer(files, descriptor, size, seed) if by_footer else None
        return sealed or _scan(files, descriptor, size, seed)
    finally:
        files.close(descriptor)


def _read_footer(files: Files, descriptor: int, size: int, seed: int) -> Contents | None:
    if size < DESCRIPTOR_BYTES + TRAILER_BYTES:
        return None
    trailer = read_whole(files, descriptor, TRAILER_BYTES, size - TRAILER_BYTES)
    if len(trailer) < TRAILER_BYTES:
        return None
    magic, version, num_records, offset, num_bytes, _ = _TRAILER.unpack(trailer)
    is_plausible = (
        offset >= DESCRIPTOR_BYTES
        and offset + num_bytes + TRAILER_BYTES == size
        and num_records * ENTRY_BYTES <= num_bytes <= MAX_FOOTER_BYTES
    )
    if (magic, version, is_plausible) != (_TRAILER_MAGIC, VERSION, True):
        return None
    footer = read_whole(files, descriptor, num_bytes, offset)
    if len(footer) < num_bytes or trailer != _trailer(footer, num_records, offset, seed):
        return None
    records = unpack_entries(footer, num_records)
    if any([record[4] + record[5] > offset for record in records]):  # offset and num_bytes
        return None
    return Contents(records, offset, is_sealed=True)


def _scan(files: Files, descriptor: int, size: int, seed: int) -> Contents:
    """Find records from header to header, up to the first damaged header."""
    records: list[Record] = []
    offset = DESCRIPTOR_BYTES
    while True:
        header = read_whole(files, descriptor, HEADER_BYTES, offset)
        if len(header) < HEADER_BYTES:
            break
        tokens = b""
        if num_tokens_bytes := tokens_bytes_of(header):
            tokens = read_whole(files, descriptor, num_tokens_bytes, offset + HEADER_BYTES)
        record = unpack_header(header, tokens, offset, seed)
        if record is None or record.end > size:
            break
        records.append(record)
        offset = record.end
    return Contents(records, offset, is_sealed=False)


@dataclass(slots=True)
class OpenSegment:
    """The segment to which records are appended. Used by one thread.

    Invariant: the file's first `end` bytes are the descriptor and `records`. Later bytes are never
    read.
    """

    files: Files
    path: Path
    number: int
    seed: int
    descriptor: int
    end: int
    records: list[Record] = field(default_factory=list)
    num_tokens_bytes: int = 0
    #: True if an append failed and its bytes could not be cut off. Then nothing more is appended.
    is_broken: bool = False

    @classmethod
    def create(cls, files: Files, folder: Path, number: int, fingerprint: bytes) -> "OpenSegment":
        """Create a new segment file. Raises OSError; then no file is left."""
        path = segment_path(folder, number)
        descriptor = files.create(path)
        try:
            write_whole(files, descriptor, [_pack_descriptor(number, fingerprint)], 0)
        except OSError:
            files.close(descriptor)
            files.unlink(path)
            raise
        return cls(files, path, number, seed_of(fingerprint), descriptor, DESCRIPTOR_BYTES)

    @classmethod
    def resume(
        cls, files: Files, folder: Path, number: int, fingerprint: bytes, contents: Contents
    ) -> "OpenSegment":
        """Open an existing file to append to it. Its footer, or an incomplete record at its end, is
        cut off.

        Raises OSError.
        """
        path = segment_path(folder, number)
        descriptor = files.open_to_write(path)
        try:
            files.truncate(descriptor, contents.end)
        except OSError:
            files.close(descriptor)
            raise
        num_tokens_bytes = sum(len(record.tokens) for record in contents.records)
        return cls(
            *(files, path, number, seed_of(fingerprint), descriptor, contents.end),
            *(list(contents.records), num_tokens_bytes),
        )

    @property
    def sealed_bytes(self) -> int:
        """Number of bytes of the file once it is sealed."""
        return self.end + footer_bytes(len(self.records), self.num_tokens_bytes)

    def append(self, records: Sequence[Record], payloads: Sequence[memoryview]) -> list[Record]:
        """Write records, whose `offset` is ignored, and return them with their offsets.

        Raises OSError; then no record was appended.
        """
        buffers: list[Buffer] = []
        placed = []
        end = self.end
        for record, payload in zip(records, payloads, strict=True):
            header = pack_header(record, self.seed)
            placed.append(record._replace(offset=end + len(header)))
            buffers += [header, payload, padding(len(payload))]
            end = placed[-1].end
        try:
            write_whole(self.files, self.descriptor, buffers, self.end)
        except OSError:
            self._cut()
            raise
        self.end = end
        self.records += placed
        self.num_tokens_bytes += sum(len(record.tokens) for record in placed)
        return placed

    def seal(self) -> None:
        """Write the footer, make the file durable, and close it. Closes it even if it raises
        OSError."""
        try:
            if not self.is_broken:
                footer = pack_entries(self.records)
                trailer = _trailer(footer, len(self.records), self.end, self.seed)
                try:
                    write_whole(self.files, self.descriptor, [footer, trailer], self.end)
                except OSError:
                    self._cut()
                    raise
            self.files.sync_data(self.descriptor)
        finally:
            self.files.close(self.descriptor)
        self.files.sync_folder(self.path.parent)

    def close_unsealed(self) -> None:
        """Close the file without a footer; for a file that will be removed."""
        self.files.close(self.descriptor)

    def _cut(self) -> None:
        """Truncate the file to `end`, to remove the bytes of a failed write."""
        try:
            self.files.truncate(self.descriptor, self.end)
        except OSError:  # the caller raises the error of the write
            self.is_broken = True
