"""The crash matrix in its short form: a few ways of all that goes wrong with a folder."""

import pytest
from benchmarks.tiers import crash_matrix
from tests.forking import Forks


@pytest.mark.timeout(300)
@pytest.mark.long
def test_crashes_and_damage_to_a_folder_change_no_token(forks: Forks) -> None:
    """In a process of its own, since it forks, and this one has threads."""
    status, printed = forks.run("-m", "benchmarks.tiers.crash_matrix", "--short")
    assert status == 0, printed
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(crash_matrix.CASES)
    assert all(line.endswith("| ok |") for line in lines[1:])
    killed = [line for line in lines if " killed" in line]
    assert len(killed) == 3, "before, in the middle of, and after a call"
    loaded = [line for line in lines if "tokens loaded" in line]
    assert len(loaded) > 10, "something was there to go wrong"
