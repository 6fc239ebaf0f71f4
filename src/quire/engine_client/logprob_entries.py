"""Log-probabilities of many tokens, kept as bytes until they are read.

An entry with the 20 most likely tokens takes 1.6 KB as Python objects, which the garbage collector
scans repeatedly, but 0.25 KB as bytes. So an answer that is collected before it is sent keeps its
entries as bytes. Called by `engine_loop`, which packs long lists, and by `outputs`.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from quire.core.step import TokenLogprobs

CHUNK_TOKENS = 32
"""Number of entries that are decoded at a time, which takes a tenth of a millisecond."""

_NUM_LOOSE = 4
"""Number of latest entries that stay objects, so that a stream that reads each entry at once never
packs."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TokenLogprobs).decode
_decode_all = msgspec.msgpack.Decoder(list[bytes]).decode


class LogprobEntries:
    """Entries of tokens in order. Invariant: the entries in `_packed` precede those in `_loose`."""

    __slots__ = ("_loose", "_packed")

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._loose: list[TokenLogprobs] = []

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs] | bytes) -> "LogprobEntries":
        """`entries` are objects, or bytes from `pack`."""
        made = cls()
        if isinstance(entries, bytes):
            made._packed = _decode_all(entries)
        else:
            made._loose += entries
        return made

    def append(self, entry: TokenLogprobs) -> None:
        self._loose.append(entry)
        if len(self._loose) > _NUM_LOOSE:
            self._packed += map(_encode, self._loose)
            self._loose.clear()

    def __len__(self) -> int:
        return len(self._packed) + len(self._loose)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        yield from map(_decode, self._packed)
        yield from self._loose

    def chunks(self) -> Iterator[list[TokenLogprobs]]:
        """All entries in chunks of at most CHUNK_TOKENS; no chunk is empty."""
        entries = iter(self)
        while chunk := list(islice(entries, CHUNK_TOKENS)):
            yield chunk


def pack(entries: Sequence[TokenLogprobs]) -> bytes:
    """Encode entries for another process, in the form that `LogprobEntries.of` accepts without
    decoding each."""
    return _encode(list(map(_encode, entries)))
