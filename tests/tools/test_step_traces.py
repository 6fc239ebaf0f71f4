"""The digests by which two versions of the scheduler are compared."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "step_traces.py"
OPTIONS = ("--num-seeds", "2", "--num-worlds", "3", "--num-steps", "40")


def test_a_seed_has_the_same_digest_in_each_run() -> None:
    command = [sys.executable, str(SCRIPT), *OPTIONS]  # a process, since it replaces methods
    first, second = (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 2
