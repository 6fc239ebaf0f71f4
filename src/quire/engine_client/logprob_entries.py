"""Log-probabilities of many tokens, kept as bytes until they are read.

As objects, those of one token with the 20 likeliest take 1.6 KB, at which the garbage collector
looks again and again; as bytes 0.25 KB. An answer that is kept until it is written keeps them so.
Knows no requests. Called by `engine_main`, which packs what is long, and by `outputs`.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from quire.core.step import TokenLogprobs

CHUNK_TOKENS = 32
"""So many are read at a time: a tenth of a millisecond."""

_NUM_LOOSE = 4
"""What a stream takes as it comes is never packed."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TokenLogprobs).decode
_decode_all = msgspec.msgpack.Decoder(list[bytes]).decode


class LogprobEntries:
    """The entries of tokens in order. Invariant: `_packed` are followed by `_loose`."""

    __slots__ = ("_loose", "_packed")

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._loose: list[TokenLogprobs] = []

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs] | bytes) -> "LogprobEntries":
        """entries: as they are, or as `pack` made them."""
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
        """All entries, CHUNK_TOKENS at a time or fewer; none is empty."""
        entries = iter(self)
        while chunk := list(islice(entries, CHUNK_TOKENS)):
            yield chunk


def pack(entries: Sequence[TokenLogprobs]) -> bytes:
    """Entries as `LogprobEntries.of` takes them from another process, without looking at each."""
    return _encode(list(map(_encode, entries)))
