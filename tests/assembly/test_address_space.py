"""What too little memory makes of an import, or of a step, becomes a sentence."""

import resource

import pytest

from quire.assembly import build
from quire.assembly.address_space import LEAST_BYTES, named_memory_failures
from quire.engine_process import engine_main
from quire.errors import InsufficientMemoryError


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process is told to have, in its first entry; there is no limit at first."""
    limits = [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[0], resource.RLIM_INFINITY))
    return limits


def test_far_too_little_is_refused_before_anything_is_tried(limit: list[int]) -> None:
    limit[0] = LEAST_BYTES - 1
    tried = []
    refusal = pytest.raises(InsufficientMemoryError, match=f"limited to {LEAST_BYTES - 1} bytes")
    with refusal, named_memory_failures():
        tried.append(1)
    assert not tried
    limit[0] = LEAST_BYTES
    with named_memory_failures():
        tried.append(1)
    assert tried


def test_a_limit_of_threads_is_no_lack_of_memory(limit: list[int]) -> None:
    refusal = pytest.raises(InsufficientMemoryError, match="starts no more threads")
    with refusal, named_memory_failures():
        raise RuntimeError("can't start new thread")


def test_the_engines_process_says_so_too(limit: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def build_engine(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(build, "build_engine", build_engine)
    with pytest.raises(InsufficientMemoryError, match="starts no more threads"):
        engine_main._build_engine({}, lambda *_: None)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
)
@pytest.mark.parametrize("limited", [False, True])
def test_failures_for_lack_of_memory_are_named(
    error: Exception, limited: bool, limit: list[int]
) -> None:
    limit[0] = LEAST_BYTES if limited else resource.RLIM_INFINITY
    with pytest.raises(InsufficientMemoryError) as caught, named_memory_failures():
        raise error
    assert ("`ulimit -v`" in str(caught.value)) is limited
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'torch'"), OSError(2, "No such file"), RuntimeError("x")]
)
def test_unrelated_errors_are_raised_unchanged(error: Exception, limit: list[int]) -> None:
    with pytest.raises(type(error)) as caught, named_memory_failures():
        raise error
    assert caught.value is error
