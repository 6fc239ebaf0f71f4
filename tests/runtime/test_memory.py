"""What the machine has, read from the kernel."""

from quire.runtime.memory import available_memory_bytes, total_memory_bytes


def test_available_is_a_part_of_the_total() -> None:
    assert 0 < available_memory_bytes() <= total_memory_bytes() < 1 << 50
