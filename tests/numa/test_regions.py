"""Where a process's memory is, and what of it is new."""

from pathlib import Path

from quire.numa.regions import added_memory, anonymous_memory


def test_private_memory_is_found_and_files_are_not(tmp_path: Path) -> None:
    maps = tmp_path / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(
        "55d0c0000000-55d0c0100000 rw-p 00000000 00:00 0                          [heap]\n"
        "7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \n"
        "7f0001000000-7f0001800000 rw-p 00000000 00:00 0 [anon:weights]\n"
        "7f0002000000-7f0002800000 rw-s 00000000 00:01 77 /dev/zero (deleted)\n"
        "7f0003000000-7f0003800000 rw-p 00001000 08:01 123 /models/model.safetensors\n"
        "7f0004000000-7f0004001000 rw-p 00000000 00:00 0 \n"
        "7f0005000000-7f0005800000 r--p 00000000 00:00 0 \n"
        "7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]\n"
    )
    assert [begin for begin, _ in anonymous_memory(tmp_path)] == [
        0x55D0C0000000,
        0x7F0000000000,
        0x7F0001000000,
    ]
    assert [begin for begin, _ in anonymous_memory(tmp_path, with_heap=False)] == [
        0x7F0000000000,
        0x7F0001000000,
    ]


def test_added_memory_is_memory_that_was_in_no_region_before() -> None:
    before = [(10, 20), (30, 40), (60, 70)]
    after = [(5, 12), (15, 35), (50, 80), (90, 95)]
    assert added_memory(before, after) == [(5, 10), (20, 30), (50, 60), (70, 80), (90, 95)]
    assert added_memory(before, before) == []
    assert added_memory([], after) == after
