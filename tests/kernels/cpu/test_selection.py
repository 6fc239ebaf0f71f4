"""Which kernels an engine gets, what the log says of it, and whose threads compute."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from quire.errors import ConfigurationError
from quire.kernels.cpu import selection
from quire.kernels.cpu.library import NativeLibrary, NativeUnavailableError
from quire.kernels.cpu.selection import describe_kernels, select_kernels, set_torch_threads
from quire.observability.machine_processors import usable_processors

Log = pytest.LogCaptureFixture


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> NativeLibrary:
        raise NativeUnavailableError("it was not built; build it")

    monkeypatch.setattr(selection, "load_library", missing)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_auto_takes_the_best_and_says_so(library: NativeLibrary, caplog: Log) -> None:
    best = next(iter(library.isas()))
    with caplog.at_level(logging.INFO, "quire"):
        kernels = select_kernels("auto", 3, torch.bfloat16)
    assert kernels is not None
    assert (kernels.isa, kernels.num_threads) == (best, 3)
    assert caplog.messages == [f"kernels: {best}, num_threads=3"]


def test_an_instruction_set_can_be_named(library: NativeLibrary) -> None:
    *_, last = library.isas()
    kernels = select_kernels(last, None, torch.float32)
    assert kernels is not None
    assert kernels.isa == last


def test_torch_can_be_asked_for(caplog: Log) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        assert select_kernels("torch", 2, torch.float32) is None
    assert caplog.messages == ["kernels: torch, as requested"]


def test_without_a_library_torch_serves_and_the_log_says_why(no_library: None, caplog: Log) -> None:
    assert select_kernels("auto", None, torch.float32) is None
    assert caplog.messages == ["kernels: torch, which is slower, since it was not built; build it"]
    assert caplog.records[0].levelname == "WARNING"


def test_without_a_library_named_kernels_are_refused(no_library: None) -> None:
    with pytest.raises(ConfigurationError, match="kernels='avx2' can't be used: it was not built"):
        select_kernels("avx2", None, torch.float32)


def test_a_dtype_that_only_torch_computes_in(caplog: Log) -> None:
    assert select_kernels("auto", None, torch.float16) is None
    (message,) = caplog.messages
    assert message.startswith("kernels: torch, which is slower, since the native kernels compute")
    assert "float32 and bfloat16, not in torch.float16" in message
    with pytest.raises(ConfigurationError, match=r"kernels='portable' .*not in torch\.float16"):
        select_kernels("portable", None, torch.float16)


def test_torch_has_one_thread_beside_native_kernels_and_its_own_without(
    library: NativeLibrary, torch_threads: None
) -> None:
    own = min(selection._torch_threads_at_start(), usable_processors())
    kernels = select_kernels("auto", 2)
    set_torch_threads(None, 3)
    assert torch.get_num_threads() == 3
    set_torch_threads(kernels, 2)
    assert torch.get_num_threads() == 1
    set_torch_threads(None, None)
    assert torch.get_num_threads() == own


def test_where_no_thread_can_be_started_the_callers_own_computes(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = library.create
    few = SimpleNamespace(
        isas=library.isas,
        isas_for_tests=library.isas_for_tests,
        create=lambda isa, num_threads: create(isa, 1) if num_threads == 1 else None,
        destroy=library.destroy,
    )
    monkeypatch.setattr(selection, "load_library", lambda: few)
    kernels = select_kernels("auto", 6, takes_fewer=True)
    assert kernels is not None and kernels.num_threads == 1
    (message,) = caplog.messages
    assert message.startswith("kernels: 1 of 6 threads, since the system starts no more")
    # An option that was given is obeyed or refused. torch, too, could not start so many.
    with pytest.raises(ConfigurationError, match="num_threads is 6, but the system"):
        select_kernels("auto", 6)


def test_torch_has_no_more_threads_than_its_control_group_allows(
    monkeypatch: pytest.MonkeyPatch, torch_threads: None
) -> None:
    monkeypatch.setattr(selection, "_torch_threads_at_start", lambda: 8)
    monkeypatch.setattr(selection, "usable_processors", lambda: 2)
    set_torch_threads(None, None)
    assert torch.get_num_threads() == 2


def test_the_description_lists_versions_and_kernels_best_first(library: NativeLibrary) -> None:
    versions, kernels = describe_kernels().splitlines()
    assert f"torch {torch.__version__}" in versions
    for isa in library.isas():
        assert isa in kernels
    assert kernels.startswith(f"kernels: {next(iter(library.isas()))}, ")


def test_reason_for_missing_native_kernels_is_described(no_library: None) -> None:
    assert describe_kernels().splitlines()[1] == (
        "kernels: torch, since it was not built; build it"
    )
