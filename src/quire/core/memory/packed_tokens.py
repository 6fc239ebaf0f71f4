"""Packs positions of a prompt as bytes that agree exactly as far as the positions agree.

    token                    0 and its id (31 bits)
    position of a content    10 and its offset in the content (30 bits), then the digest (16 bytes)
    its next positions       11 and the offset (30 bits), within the same packed bytes

Big-endian, so that the bytes sort like the positions. The first two bits tell how long a position's
bytes are, so no packed sequence is the beginning of another unless its positions are. The prefix
cache hashes and compares these bytes, and tiers store them.
"""

import struct
from collections.abc import Sequence
from functools import cache

from quire.core.content_spans import DIGEST_CHARACTERS, ContentSpan, spans_between

TOKEN_BYTES = 4
CONTENT_BYTES = TOKEN_BYTES + DIGEST_CHARACTERS // 2
CONTENT = 0b10 << 30
CONTINUED = 0b11 << 30

NOT_A_TOKEN = -1
"""The value that `unpack` returns for a position of a content."""

Spans = Sequence[ContentSpan]


def pack(token_ids: Sequence[int], first: int, end: int, spans: Spans = ()) -> bytes:
    """The positions of a prompt from `first` to `end`, or to the prompt's end if that is earlier.

    spans: all contents of the prompt.
    """
    if not spans or spans[-1].end <= first:
        return pack_tokens(token_ids[first:end])
    packed: list[bytes] = []
    end = min(end, len(token_ids))
    at = first
    for span in spans_between(spans, first, end):
        start, stop = max(span.first_position, first), min(span.end, end)
        offset = start - span.first_position
        packed += [
            pack_tokens(token_ids[at:start]),
            pack_tokens((CONTENT + offset,)),
            bytes.fromhex(span.digest),
            pack_tokens(range(CONTINUED + offset + 1, CONTINUED + offset + stop - start)),
        ]
        at = stop
    return b"".join([*packed, pack_tokens(token_ids[at:end])])


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids, without any content."""
    return _words(len(token_ids)).pack(*token_ids)


def num_packed(data: bytes) -> int:
    """Number of positions that are packed in `data`, without a last one that is cut off."""
    if data[::TOKEN_BYTES].isascii():  # no first bit is set: there are only tokens
        return len(data) // TOKEN_BYTES
    count = at = 0
    while at < len(data):
        at += CONTENT_BYTES if data[at] >> 6 == 0b10 else TOKEN_BYTES
        count += at <= len(data)
    return count


def unpack(data: bytes) -> list[int]:
    """The token ids of whole packed positions, with NOT_A_TOKEN for contents."""
    words, token_ids = iter(_words(len(data) // TOKEN_BYTES).unpack(data)), []
    for word in words:
        token_ids.append(word if word < CONTENT else NOT_A_TOKEN)
        if CONTENT <= word < CONTINUED:
            for _ in range(CONTENT_BYTES // TOKEN_BYTES - 1):
                next(words)
    return token_ids


@cache
def _words(count: int) -> struct.Struct:
    """Packs and unpacks `count` words."""
    return struct.Struct(f">{count}I")
