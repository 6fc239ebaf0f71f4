"""Reads the fields of a GGUF file's header in order, without trusting its lengths.

    string: length u64 | bytes          array: type u32 | count u64 | values
    value:  type u32 | value            all little-endian

Each length and count is compared with the number of bytes left before anything is allocated. An
array of numbers becomes a view of the file, and an array of strings stores their offsets. So a
false length can't use more memory than the file has bytes. Called by `header`.
"""

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from quire.errors import shown
from quire.hub.model_files import shown_name

Value = bool | int | float | str | npt.NDArray[Any] | Sequence[str]
"""The value of a metadata field. An array is a read-only numpy array or a sequence of strings."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Ids of number types -> their letters in struct and numpy."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_STRINGS = 1 << 20
"""Maximum number of strings in all arrays together. Reading a string takes a third of a
microsecond. Vocabularies have up to 262,144 tokens and fewer than 600,000 merges."""
_MAX_STRING_BYTES = 4 << 20
"""Maximum number of bytes of a string. The longest published strings are chat templates below
100,000."""
_MAX_KEPT_BYTES = 32 << 20
"""Maximum number of characters of all strings outside arrays. Each takes up to four bytes of
memory."""


def shortest_decimal(number: float) -> float:
    """The shortest decimal number that rounds to an fp32 value: 1e-05, not 9.99999974e-06. Returns
    a number that is no fp32 value unchanged."""
    single = np.float32(number)
    return float(str(single)) if float(single) == number else number


class MalformedError(ValueError):
    """An error in a file. The message is a clause that says what is wrong with the file."""


class StringArray(Sequence[str]):
    """The strings of an array in a file, each decoded when it is accessed."""

    def __init__(self, content: mmap.mmap, starts: "array[int]") -> None:
        """`starts` has the offset of each string's length field, then that of the array's end."""
        self._content = content
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return self._content[self._starts[at] + _LENGTH.size : self._starts[at + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        content, size = self._content, _LENGTH.size
        return (content[start + size : end].decode() for start, end in pairwise(self._starts))


class FieldReader:
    """Reads values in order from the offset `at`. The methods raise MalformedError."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._num_kept = 0
        self._num_strings = 0
        self.at = 0

    @property
    def num_left(self) -> int:
        """Number of bytes that have not been read."""
        return len(self._content) - self.at

    def number(self, letter: str, what: str) -> Any:
        """Read a number. `letter` is its type in the module struct."""
        try:
            (value,) = struct.unpack_from("<" + letter, self._content, self.at)
        except struct.error:
            raise MalformedError(f"it ends within {what}") from None
        self.at += struct.calcsize("<" + letter)
        return value

    def string(self, what: str) -> str:
        """Read a string. Raises MalformedError also if it is not UTF-8."""
        found = self._string(what)
        self._num_kept += len(found)
        if self._num_kept > _MAX_KEPT_BYTES:
            raise MalformedError(
                f"its strings have more than {_MAX_KEPT_BYTES} letters up to {what}, which is more"
                " than is read"
            )
        return found

    def _string(self, what: str) -> str:
        start = self.at
        length = self.number("Q", f"the length of {what}")
        self._check_left(length, 1, what)
        if length > _MAX_STRING_BYTES:
            raise MalformedError(
                f"{what} has {length} bytes, but at most {_MAX_STRING_BYTES} are read"
            )
        self.at += length
        try:
            return self._content[start + _LENGTH.size : self.at].decode()
        except UnicodeDecodeError:
            raise MalformedError(f"{what} is not UTF-8") from None

    def value(self, what: str) -> Value:
        """Read a type and then a value of that type."""
        return self._value(self.number("I", f"the type of {what}"), what)

    def _value(self, kind: int, what: str) -> Value:
        if kind in _SCALARS:
            number: int | float = self.number(_SCALARS[kind], what)
            return number
        if kind == _BOOL:
            return self._check_bools(self.number("B", what), what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        raise MalformedError(f"{what} has the type {kind}, which no version of GGUF has")

    def _array(self, what: str) -> Value:
        kind = self.number("I", f"the type of {what}")
        count = self.number("Q", f"the length of {what}")
        if kind in _SCALARS or kind == _BOOL:
            return self._numbers(kind, count, what)
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            raise MalformedError(f"{what} is an array of arrays, which no known field is")
        raise MalformedError(f"{what} has entries of type {kind}, which no version of GGUF has")

    def _numbers(self, kind: int, count: int, what: str) -> npt.NDArray[Any]:
        dtype = np.dtype("<" + _SCALARS.get(kind, "B"))
        self._check_left(count, dtype.itemsize, what)
        found = np.frombuffer(self._content, dtype, count, self.at) if count else np.empty(0, dtype)
        found.flags.writeable = False
        self.at += count * dtype.itemsize
        if kind != _BOOL:
            return found
        if count:
            self._check_bools(int(found.max()), what)
        return found.view(np.bool_)

    def _strings(self, count: int, what: str) -> StringArray:
        self._check_left(count, _LENGTH.size, what)
        self._num_strings += count
        if self._num_strings > _MAX_STRINGS:
            raise MalformedError(
                f"its arrays have {self._num_strings} strings up to {what}, but at most "
                f"{_MAX_STRINGS} are read"
            )
        starts = array("Q", [self.at])
        content, end, at = self._content, len(self._content), self.at
        read, add = _LENGTH.unpack_from, starts.append
        try:
            for _ in range(count):  # the same as `_string`, without its calls
                (length,) = read(content, at)
                start, at = at + 8, at + 8 + length
                if at > end or length > _MAX_STRING_BYTES:
                    break
                content[start:at].decode()
                add(at)
        except (struct.error, UnicodeDecodeError):
            pass  # the loop below reads the broken string again and raises
        while len(starts) <= count:  # only if a string is broken: `_string` raises
            self.at = starts[-1]
            self._string(what)
            add(self.at)
        self.at = at
        return StringArray(self._content, starts)

    def _check_left(self, count: int, size: int, what: str) -> None:
        if count * size > self.num_left:
            raise MalformedError(
                f"{what} would have {count} entries of {size} bytes or more, but the file ends "
                f"{self.num_left} bytes further on"
            )

    def _check_bools(self, highest: int, what: str) -> bool:
        if highest > 1:
            raise MalformedError(f"{what} has a boolean of value {shown(highest)}, not 0 or 1")
        return bool(highest)


def field_name(name: str) -> str:
    """The name of a metadata field or tensor for a message."""
    return shown_name(name) if name else "the field without a name"
