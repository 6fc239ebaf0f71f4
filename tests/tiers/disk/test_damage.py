"""Files that are torn, flipped, truncated, or from elsewhere: a miss, and never wrong bytes."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles, broken_disk
from tests.tiers.disk.store_world import (
    FINGERPRINT,
    NUM_BYTES,
    OTHER,
    Opened,
    check_tails,
    name_of,
    names_in,
    payload_of,
    read,
    segments,
    write,
)

from quire.tiers.disk.files import Targets
from quire.tiers.disk.io_limits import DAMAGE_LOG_S
from quire.tiers.disk.record import ENTRY_BYTES, HEADER_BYTES, Record, pack_entries, seed_of
from quire.tiers.disk.segment import (
    _TRAILER,
    _TRAILER_MAGIC,
    DESCRIPTOR_BYTES,
    TRAILER_BYTES,
    VERSION,
    _trailer,
    read_segment,
)

pytestmark = pytest.mark.usefixtures("each_reader")

NUMBERS = range(1, 13)
NAMES = [name_of(number) if number % 5 else name_of(number) + b"/3" for number in NUMBERS]


def make(path: Path, *, sealed: bool, fingerprint: bytes = FINGERPRINT) -> Path:
    """One segment of twelve records; returns its file."""
    opened = Opened(path, files=FaultyFiles(), fingerprint=fingerprint)
    write(opened.store, NUMBERS)
    opened.close(seals=sealed)
    [file] = segments(path, fingerprint)
    return file


@pytest.fixture(params=["sealed", "unsealed"])
def segment(quick_path: Path, request: pytest.FixtureRequest) -> Path:
    return make(quick_path, sealed=request.param == "sealed")


def found_after(path: Path, content: bytes) -> tuple[list[bytes], list[bytes]]:
    """What a new process finds in a segment of this content, and what of that comes."""
    path.write_bytes(content)
    opened = Opened(path.parent.parent, files=FaultyFiles())
    check_tails(opened.store, NUMBERS)
    found = names_in(opened.store, NUMBERS)
    came = [name for name, done in zip(found, read(opened.store, found), strict=True) if done]
    assert names_in(opened.store, NUMBERS) == came, "what did not come is forgotten"
    check_tails(opened.store, NUMBERS)
    opened.store.prepare_to_write()  # what lies there can be gone on with
    write(opened.store, [77])
    assert read(opened.store, [name_of(77)]) == [True]
    opened.close()
    again = Opened(path.parent.parent, files=FaultyFiles())
    assert set(came) | {name_of(77)} <= set(names_in(again.store, [*NUMBERS, 77]))
    again.close(seals=False)
    return found, came


def clean(path: Path) -> None:
    """Take away what `found_after` added beside."""
    for other in path.parent.glob("*.seg"):
        if other != path:
            other.unlink()


def test_whole_segments_are_found_whole(segment: Path) -> None:
    assert found_after(segment, segment.read_bytes()) == (NAMES, NAMES)


def test_a_segment_that_is_cut_off_anywhere_keeps_what_is_before(segment: Path) -> None:
    whole = segment.read_bytes()
    last = []
    for end in [*range(0, len(whole), 512), *range(len(whole) - 70, len(whole), 9)]:
        found, came = found_after(segment, whole[:end])
        clean(segment)
        assert found == came == NAMES[: len(found)], "cut off at the first that is not whole"
        num_whole = max(end - DESCRIPTOR_BYTES, 0) // (HEADER_BYTES + NUM_BYTES + 128)
        assert len(found) >= num_whole - 1
        last = found
    assert len(last) >= len(NAMES) - 1


def test_a_part_that_was_never_written_is_a_miss(segment: Path) -> None:
    """After a power failure 512 bytes may lack anywhere: those of later pages reached the disk."""
    whole = segment.read_bytes()
    for begin in range(0, len(whole), 512):
        torn = whole[:begin] + bytes(len(whole[begin : begin + 512])) + whole[begin + 512 :]
        _, came = found_after(segment, torn)
        clean(segment)
        if begin == 0:
            assert not came, "nothing says whose records these are"
        else:
            assert came[:1] == NAMES[:1] or begin < 1200


def flips(size: int) -> Iterator[int]:
    """Offsets in the descriptor, the first records, and the footer."""
    yield from range(0, DESCRIPTOR_BYTES + HEADER_BYTES, 3)
    yield from range(DESCRIPTOR_BYTES + HEADER_BYTES, 3000, 97)
    yield from range(size - TRAILER_BYTES - 2 * ENTRY_BYTES, size, 5)


def test_a_flipped_bit_anywhere_gives_no_wrong_byte(segment: Path) -> None:
    whole = segment.read_bytes()
    for offset in flips(len(whole)):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << offset % 8
        _, came = found_after(segment, bytes(flipped))
        clean(segment)
        if offset < DESCRIPTOR_BYTES:
            assert not came
        elif offset > 3000 and len(whole) - offset < TRAILER_BYTES:
            assert came[:11] == NAMES[:11], "without the footer the headers are read"


def test_damage_after_the_index_was_read_is_a_miss(segment: Path) -> None:
    whole = segment.read_bytes()
    for offset in range(DESCRIPTOR_BYTES + HEADER_BYTES, len(whole) - 2500, 331):
        segment.write_bytes(whole)
        opened = Opened(segment.parent.parent, files=FaultyFiles())
        flipped = bytearray(whole)
        flipped[offset] ^= 0x80
        segment.write_bytes(flipped)
        done = read(opened.store, NAMES)
        assert done.count(False) <= 1
        assert opened.store.damage.num_records == done.count(False)
        assert read(opened.store, NAMES) == done, "found neither by itself nor in a run"
        opened.close(seals=False)


def test_a_file_that_shrank_or_went_is_a_miss(segment: Path) -> None:
    opened = Opened(segment.parent.parent, files=FaultyFiles())
    os.truncate(segment, 5000)
    target = bytearray(payload_of(NAMES[-1]))
    last = opened.store.read([(0, NAMES[-1])], Targets.in_turn(target, [len(target)]))
    assert last.done == [False], "what the memory held before did not come from the file"
    done = read(opened.store, NAMES)
    assert done == [True] * done.count(True) + [False] * done.count(False)
    assert 3 <= done.count(True) <= 4
    opened.store.close()
    segment.unlink()
    assert not any(read(opened.store, NAMES))
    assert not names_in(opened.store, NUMBERS), "not asked for again and again"
    opened.close(seals=False)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_segment_of_another_namespace_or_number_is_not_read(tmp_path: Path, sealed: bool) -> None:
    own = make(tmp_path / "own", sealed=True)
    foreign = make(tmp_path / "foreign", sealed=sealed, fingerprint=OTHER)
    shutil.copy(foreign, own.parent / "00000002.seg")
    shutil.copy(own, own.parent / "00000003.seg")
    opened = Opened(tmp_path / "own", files=FaultyFiles())
    assert names_in(opened.store, NUMBERS) == NAMES and len(opened.store.index) == len(NAMES)
    assert all(read(opened.store, NAMES))
    opened.store.prepare_to_write()
    write(opened.store, [50])
    assert (own.parent / "00000004.seg").exists(), "no number is used twice"
    opened.close()


def test_records_of_another_namespace_behind_an_own_descriptor_are_not_read(
    tmp_path: Path,
) -> None:
    """The checksums of headers and footers are seeded with the namespace."""
    for sealed in (True, False):
        own = make(tmp_path / f"own{sealed}", sealed=True)
        foreign = make(tmp_path / f"foreign{sealed}", sealed=sealed, fingerprint=OTHER)
        head = own.read_bytes()[:DESCRIPTOR_BYTES]
        found, _ = found_after(own, head + foreign.read_bytes()[DESCRIPTOR_BYTES:])
        assert found == []


@pytest.mark.parametrize(
    "forge",
    [
        lambda record, end: record._replace(offset=(1 << 64) - 64),
        lambda record, end: record._replace(num_bytes=(1 << 32) - 1),
        lambda record, end: record._replace(offset=end),
    ],
)
def test_a_footer_that_points_beyond_its_records_is_none(
    tmp_path: Path, forge: Callable[[Record, int], Record]
) -> None:
    """With checksums that are right: whoever writes in the folder can make them."""
    file = make(tmp_path, sealed=True)
    contents = read_segment(FaultyFiles(), file, 1, FINGERPRINT)
    assert contents is not None
    footer = pack_entries([forge(record, contents.end) for record in contents.records])
    trailer = _trailer(footer, len(contents.records), contents.end, seed_of(FINGERPRINT))
    content = file.read_bytes()[: contents.end]
    assert found_after(file, content + footer + trailer) == (NAMES, NAMES)


def test_a_footer_as_large_as_no_segment_is_not_read(tmp_path: Path) -> None:
    """The file is nearly all hole: it takes no room on the disk, but would take all memory."""
    file = make(tmp_path, sealed=False)
    size = 1 << 43
    with file.open("r+b") as opened:
        opened.truncate(size)
        opened.seek(size - TRAILER_BYTES)
        head = _TRAILER_MAGIC, VERSION, 10**9, DESCRIPTOR_BYTES
        footer_bytes = size - DESCRIPTOR_BYTES - TRAILER_BYTES
        opened.write(_TRAILER.pack(*head, footer_bytes, b""))
    contents = read_segment(FaultyFiles(), file, 1, FINGERPRINT)
    assert contents is not None and len(contents.records) == len(NAMES)


def test_a_descriptor_of_another_version_is_not_read(tmp_path: Path) -> None:
    file = make(tmp_path, sealed=True)
    content = bytearray(file.read_bytes())
    content[8] += 1
    assert found_after(file, bytes(content))[0] == []


def test_bytes_come_right_however_few_a_call_moves(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.most_bytes = 77
    opened = Opened(tmp_path, files=files)
    write(opened.store, NUMBERS)
    assert all(read(opened.store, NAMES))
    opened.close()
    again = Opened(tmp_path, files=files)
    assert again.store._unfinished[0][1].is_sealed
    assert all(read(again.store, NAMES))
    again.close()


def test_one_record_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    file = make(tmp_path, sealed=True)
    offset = file.read_bytes().index(payload_of(NAMES[6]))
    files = FaultyFiles()

    def fails(name: str, given: tuple[object, ...]) -> OSError | None:
        if name != "preadv" or len(opened.store.index) < 5:
            return None
        _, buffers, begin = given
        size = sum(len(buffer) for buffer in buffers)  # type: ignore[attr-defined]
        return broken_disk() if begin <= offset < begin + size else None  # type: ignore[operator]

    opened = Opened(tmp_path, files=files)
    files.fails_when = fails
    sizes = [NUM_BYTES] * len(NAMES)
    wanted = [(0, name) for name in NAMES], Targets.in_turn(bytearray(sum(sizes)), sizes)
    result = opened.store.read(*wanted)
    assert result.error is not None and result.done == [index != 6 for index in range(12)]
    again = opened.store.read(*wanted)
    assert again.error is None and not opened.store.index.find(0, NAMES[6])
    opened.close(seals=False)


def test_record_of_another_length_is_a_miss(tmp_path: Path) -> None:
    """Another layout of groups under one fingerprint would be a mistake; it shows none of it."""
    make(tmp_path, sealed=True)
    opened = Opened(tmp_path, files=FaultyFiles())
    target = bytearray(NUM_BYTES - 8)
    assert opened.store.read([(0, NAMES[0])], Targets.in_turn(target, [len(target)])).done == [
        False
    ]
    assert target == bytes(NUM_BYTES - 8)
    opened.close(seals=False)


def test_damaged_records_are_logged_once_a_minute_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make(tmp_path, sealed=True)
    contents = read_segment(FaultyFiles(), file, 1, FINGERPRINT)
    assert contents is not None
    with file.open("r+b") as opened_file:
        for record in contents.records:
            opened_file.seek(record.offset)
            first = opened_file.read(1)[0]
            opened_file.seek(record.offset)
            opened_file.write(bytes([first ^ 1]))
    now_s = 100.0
    opened = Opened(tmp_path, files=FaultyFiles(), clock=lambda: now_s)
    names = names_in(opened.store, NUMBERS)

    assert read(opened.store, names[:2]) == [False, False]
    assert read(opened.store, names[2:5]) == [False] * 3
    [first_line] = caplog.messages
    assert "2 cached blocks were damaged or unreadable, 2 since the start" in first_line

    now_s += DAMAGE_LOG_S
    assert read(opened.store, names[5:6]) == [False]
    assert len(caplog.messages) == 2
    assert "4 cached blocks were damaged or unreadable, 6 since the start" in caplog.messages[1]
    opened.close(seals=False)


def test_bytes_behind_a_damaged_header_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make(tmp_path, sealed=False)
    size = file.stat().st_size
    with file.open("r+b") as opened_file:
        opened_file.seek(DESCRIPTOR_BYTES)
        opened_file.write(b"\0")
    Opened(tmp_path, files=FaultyFiles()).close(seals=False)
    assert f"the last {size - DESCRIPTOR_BYTES} of {size} bytes are unreadable" in caplog.text
