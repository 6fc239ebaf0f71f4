"""The thread pool, worked hard by a program of its own: no task is lost, none is done twice."""

import subprocess
from pathlib import Path

import pytest

from quire.kernels.cpu import build

PROGRAM = Path(__file__).parent / "pool_stress.cpp"


def compiled(folder: Path, *flags: str) -> Path:
    """The program, with the pool of the library. Raises BuildError."""
    output = folder / "pool_stress"
    command = [build.find_compiler(), "-std=c++20", "-O1", "-g0", "-pthread", *flags]
    files = [str(PROGRAM), str(build.SOURCES / "threads" / "pool.cpp")]
    build._run([*command, f"-I{build.SOURCES}", *files, "-o", str(output)])
    return output


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return compiled(tmp_path_factory.mktemp("plain"))
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def watched_stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Under ThreadSanitizer, which not every compiler and system has."""
    try:
        program = compiled(tmp_path_factory.mktemp("watched"), "-fsanitize=thread")
    except build.BuildError as error:
        pytest.skip(str(error))
    empty = subprocess.run([program, "1"], capture_output=True, text=True, timeout=60)
    if "FATAL: ThreadSanitizer" in empty.stderr:  # it can't map its memory on this system
        pytest.skip(empty.stderr)
    return program


@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_every_task_runs_once(stress: Path, num_threads: int) -> None:
    run = subprocess.run([stress, str(num_threads)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "done\n")


@pytest.mark.parametrize("num_threads", [2, 8])
def test_threads_have_no_data_races(watched_stress: Path, num_threads: int) -> None:
    run = subprocess.run(
        [watched_stress, str(num_threads)], capture_output=True, text=True, timeout=100
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert "WARNING: ThreadSanitizer" not in run.stderr
