"""The checksum of what is kept on disk, and records that are read and checked by one call."""

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from tests.native_library import require_isa

from quire.kernels.cpu.library import NativeLibrary
from quire.kernels.options import NATIVE_KERNELS

LONG = [*range(241, 5001), 24 << 10, 100_003]


@pytest.fixture(params=NATIVE_KERNELS)
def isa(request: pytest.FixtureRequest, library: NativeLibrary) -> int:
    require_isa(library, request.param)
    return library.isas()[request.param]


def test_digests_are_those_of_xxhash(isa: int, library: NativeLibrary) -> None:
    data = random.Random(3).randbytes(max(LONG) + 1)
    found = ctypes.create_string_buffer(16)
    for num_bytes in LONG:
        for begin in (0, 1):  # at any alignment
            part = data[begin : begin + num_bytes]
            library.xxh3_128(isa, part, num_bytes, found)
            assert found.raw == xxhash.xxh3_128_digest(part), num_bytes


class Records:
    """A file of records with gaps, and a memory that they are read to."""

    def __init__(self, library: NativeLibrary, path: Path, num_records: int) -> None:
        self.library = library
        chance = random.Random(num_records)
        self.content = bytearray(chance.randbytes(100))
        self.places: list[tuple[int, int]] = []
        for _ in range(num_records):
            self.content += bytes(chance.choice((0, 0, 128, 5000)))
            num_bytes = chance.choice((241, 1000, 24 << 10, 200_000))
            self.places.append((len(self.content), num_bytes))
            self.content += chance.randbytes(num_bytes)
        self.digests = b"".join(
            xxhash.xxh3_128_digest(self.content[begin : begin + size])
            for begin, size in self.places
        )
        self.size = sum(size for _, size in self.places)
        self.memory = ctypes.create_string_buffer(self.size)
        path.write_bytes(self.content)
        self.descriptor = os.open(path, os.O_RDONLY)

    def wanted(self) -> bytes:
        return b"".join(self.content[begin : begin + size] for begin, size in self.places)

    def read(self, isa: int) -> tuple[int, list[int]]:
        """The error's number, and which are sound."""
        address, parts = ctypes.addressof(self.memory), []
        for begin, size in self.places:
            parts += [begin, size, address]
            address += size
        count = len(self.places)
        sound = (ctypes.c_uint8 * count)(*[7] * count)
        error = self.library.read_records(
            *(isa, self.descriptor, count, (ctypes.c_int64 * len(parts))(*parts)),
            *(self.digests, sound),
        )
        return error, list(sound)


@pytest.fixture
def records(tmp_path: Path, library: NativeLibrary) -> Iterator[Records]:
    made = Records(library, tmp_path / "records", 300)
    yield made
    os.close(made.descriptor)


def test_records_are_read_to_their_places(isa: int, records: Records) -> None:
    assert records.read(isa) == (0, [1] * 300)
    assert records.memory.raw == records.wanted()


def test_a_damaged_record_is_not_sound_and_the_others_are(isa: int, records: Records) -> None:
    for index in (0, 57, 299):
        begin, size = records.places[index]
        writable = os.open(f"/proc/self/fd/{records.descriptor}", os.O_WRONLY)
        os.pwrite(writable, bytes([records.content[begin + size - 1] ^ 1]), begin + size - 1)
        os.close(writable)
    assert records.read(isa)[1] == [int(index not in (0, 57, 299)) for index in range(300)]


def test_records_beyond_the_end_of_the_file_are_not_read(isa: int, records: Records) -> None:
    begin, size = records.places[200]
    os.truncate(f"/proc/self/fd/{records.descriptor}", begin + size - 1)
    records.memory[:] = records.wanted()  # what memory held before does not count
    assert records.read(isa) == (0, [1] * 200 + [0] * 100)


def test_a_failed_read_is_reported(isa: int, records: Records, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    own, records.descriptor = records.descriptor, folder
    error, sound = records.read(isa)
    records.descriptor = own
    os.close(folder)
    assert os.strerror(error) == "Is a directory"
    assert not any(sound)
