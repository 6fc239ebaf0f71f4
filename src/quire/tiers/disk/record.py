"""The format of a disk record: a header with a content's name, and a block's bytes.

    header, 128 bytes | tokens, of a tail only | payload

A content is what a block holds for one KV group; a tail is the content of a partly filled block.
Tokens and payload are each padded with zeros to a multiple of 64 bytes, a cache line. Files are
read through the page cache, which needs no larger alignment. Padding to 4 KiB would store a block
of 24 KiB in 28 KiB.

The header contains the payload's checksum (xxh3, 128 bits) and a checksum of the header and the
tokens. The second checksum is seeded with the namespace, so a record of another model is never
accepted. A segment's footer repeats the headers' content as `Record`s.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

VERSION = 1
ALIGNMENT = 64
MAX_NAME_BYTES = 18
MAX_GROUPS = 256

_MAGIC = b"QREC"
_HEADER = struct.Struct("<4sBBBBIH2x16s18s18s52x8s")
HEADER_BYTES = _HEADER.size
_CHECKED_BYTES = HEADER_BYTES - 8
_ENTRY = struct.Struct("<QIHBBBx16s18s18s")
ENTRY_BYTES = _ENTRY.size
MAX_TOKENS_BYTES = (1 << 16) - 1

assert HEADER_BYTES == 128


class Record(NamedTuple):
    """The name of a record's content, and the position of its payload in a segment."""

    group: int
    name: bytes
    #: Digest of the prefix before a partly filled block; empty for a full block.
    parent: bytes
    #: Tokens of a partly filled block; empty for a full block.
    tokens: bytes
    #: Offset of the payload's first byte in its segment.
    offset: int
    num_bytes: int
    #: Digest of the payload.
    digest: bytes

    @property
    def end(self) -> int:
        """The offset at which the next record begins."""
        return self.offset + padded(self.num_bytes)


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def padding(num_bytes: int) -> bytes:
    """The zero bytes that pad `num_bytes` bytes to the alignment."""
    return bytes(-num_bytes % ALIGNMENT)


def record_bytes(num_bytes: int, num_tokens_bytes: int = 0) -> int:
    """Number of bytes of a record with a payload of `num_bytes`, including header, tokens and
    padding."""
    return HEADER_BYTES + padded(num_tokens_bytes) + padded(num_bytes)


def payload_digest(payload: memoryview | bytes) -> bytes:
    """The digest of a payload. Releases the GIL for payloads above about 100 KB."""
    return xxhash.xxh3_128_digest(payload)


def seed_of(fingerprint: bytes) -> int:
    """The seed of a namespace's checksums. Checksums of payloads have no seed."""
    return xxhash.xxh3_64_intdigest(fingerprint)


def pack_header(record: Record, seed: int) -> bytes:
    """The record's bytes before the payload: the header, and the tokens with their padding."""
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        record.group,
        len(record.name),
        len(record.parent),
        record.num_bytes,
        len(record.tokens),
        record.digest,
        record.name,
        record.parent,
        bytes(8),
    )[:_CHECKED_BYTES]
    checksum = xxhash.xxh3_64_digest(header + record.tokens, seed)
    return header + checksum + record.tokens + padding(len(record.tokens))


def tokens_bytes_of(header: bytes) -> int:
    """Number of bytes of the tokens that follow a header. A damaged header may give any number."""
    return int(_HEADER.unpack(header)[6])


def unpack_header(header: bytes, tokens: bytes, offset: int, seed: int) -> Record | None:
    """The record whose header is at file offset `offset`; None if the header or the tokens are
    damaged."""
    magic, version, group, name_length, parent_length, num_bytes, tokens_length, *rest = (
        _HEADER.unpack(header)
    )
    digest, name, parent, checksum = rest
    if (magic, version, tokens_length) != (_MAGIC, VERSION, len(tokens)):
        return None
    if xxhash.xxh3_64_digest(header[:_CHECKED_BYTES] + tokens, seed) != checksum:
        return None
    begin = offset + HEADER_BYTES + padded(tokens_length)
    own = name[:name_length], parent[:parent_length]
    return Record(group, *own, tokens, begin, num_bytes, digest)


def pack_entries(records: Sequence[Record]) -> bytes:
    """The footer of a segment: an entry for each record, then the tokens of all records."""
    entries = [
        _ENTRY.pack(
            record.offset,
            record.num_bytes,
            len(record.tokens),
            record.group,
            len(record.name),
            len(record.parent),
            record.digest,
            record.name,
            record.parent,
        )
        for record in records
    ]
    return b"".join([*entries, *(record.tokens for record in records)])


def unpack_entries(content: bytes, num_records: int) -> list[Record]:
    """The records of a footer whose checksum is right."""
    records = []
    position = num_records * ENTRY_BYTES
    for entry in _ENTRY.iter_unpack(content[:position]):
        offset, num_bytes, tokens_length, group, name_length, parent_length, *rest = entry
        digest, name, parent = rest
        tokens = b""
        if tokens_length:
            tokens = content[position : position + tokens_length]
            position += tokens_length
        own = name[:name_length], parent[:parent_length]
        records.append(Record(group, *own, tokens, offset, num_bytes, digest))
    return records
