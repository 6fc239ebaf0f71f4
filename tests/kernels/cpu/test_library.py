"""A library that doesn't fit is refused, with what to do; one that fits tells what it has."""

import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.native_library import require_isa

from quire.errors import ConfigurationError
from quire.kernels.cpu import abi, build
from quire.kernels.cpu import library as module
from quire.kernels.cpu.library import (
    NativeKernels,
    NativeLibrary,
    NativeUnavailableError,
)
from quire.kernels.options import NATIVE_KERNELS
from quire.observability.machine_processors import usable_processors

STUB = """
#include <stdint.h>
int32_t quire_abi_version() {{ return {version}; }}
const char* quire_source_digest() {{ return "{digest}"; }}
int32_t quire_num_isas() {{ return 1; }}
const char* quire_isa_name(int32_t index) {{ return "portable"; }}
int32_t quire_isa_supported(int32_t index) {{ return {is_supported}; }}
"""


@pytest.fixture
def stub(tmp_path: Path):
    """Compiles a library with all functions, of a version and digest; `without`: but for one."""
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))

    def make(version: int, digest: str, without: str = "", is_supported: int = 1) -> Path:
        others = [name for name in module._SIGNATURES if f" {name}(" not in f"{STUB} {without}("]
        source, output = tmp_path / "stub.c", tmp_path / f"{version}{digest}{without}.so"
        text = STUB.format(version=version, digest=digest, is_supported=is_supported)
        source.write_text(text + "".join(f"void {name}() {{}}\n" for name in others))
        command = [compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(output)]
        subprocess.run(command, check=True)
        return output

    return make


def refusal(path: Path) -> str:
    with pytest.raises(NativeUnavailableError) as caught:
        NativeLibrary(path)
    message = str(caught.value)
    assert str(path) in message
    assert "run `python -m quire.kernels.cpu.build`" in message
    return message


def test_a_missing_library(tmp_path: Path) -> None:
    assert "was not built" in refusal(tmp_path / "none.so")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library")
    assert "can't be loaded" in refusal(path)


def test_a_library_of_other_sources_is_refused(stub) -> None:
    assert "was built from other sources" in refusal(stub(abi.ABI_VERSION, "0123"))


def test_a_library_of_these_sources_is_taken(stub) -> None:
    path = stub(abi.ABI_VERSION, build.source_digest())
    assert NativeLibrary(path).path == path


def test_a_library_for_another_processor_is_refused(stub) -> None:
    path = stub(abi.ABI_VERSION, build.source_digest(), is_supported=0)
    assert "was built for another processor only" in refusal(path)


def test_installed_without_sources_no_digest_is_asked_for(
    stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path / "gone")
    NativeLibrary(stub(abi.ABI_VERSION, "0123"))


def test_a_library_of_another_version_is_refused(stub) -> None:
    path = stub(abi.ABI_VERSION + 1, build.source_digest())
    assert "is of another version of quire" in refusal(path)


def test_a_library_that_lacks_a_function_is_refused(stub) -> None:
    path = stub(abi.ABI_VERSION, build.source_digest(), without="quire_argmax")
    assert "quire_argmax" in refusal(path)


def test_instruction_sets_come_best_first_and_the_last_runs_everywhere(
    library: NativeLibrary,
) -> None:
    everywhere, *_ = build.isa_flags()
    require_isa(library, everywhere)
    names = list(library.isas())
    assert names == [name for name in NATIVE_KERNELS if name in names]
    assert names[-1] == everywhere
    assert NativeKernels(library).isa == names[0]


def test_an_instruction_set_that_is_not_there_is_refused_by_name(library: NativeLibrary) -> None:
    with pytest.raises(ConfigurationError, match=r"'avx1024' do not run.*is: \w+.*builds all"):
        NativeKernels(library, "avx1024")


def test_kernels_compiled_for_tests_are_named_and_warn_where_they_are_taken(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, *_ = library.isas()
    assert best not in library.isas_for_tests()
    NativeKernels(library, best, 1)
    assert not caplog.messages
    monkeypatch.setattr(library, "isa_optimized", lambda index: 0, raising=False)
    assert library.isas_for_tests() == tuple(library.isas())
    NativeKernels(library, best, 1)
    assert [best in text and "compiled for tests" in text for text in caplog.messages] == [True]


def tasks_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_threads_come_and_go_with_the_kernels(library: NativeLibrary) -> None:
    gc.collect()
    before = tasks_of_this_process()
    kernels = NativeKernels(library, num_threads=4)
    assert kernels.num_threads == 4
    threads = tasks_of_this_process() - before
    assert len(threads) == 3  # the caller is the fourth
    del kernels
    # A thread that was joined is listed until the system has put it away, a moment later.
    deadline_s = time.monotonic() + 60
    while threads & tasks_of_this_process() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert not threads & tasks_of_this_process()


def test_by_default_every_processor_has_a_thread(library: NativeLibrary) -> None:
    assert NativeKernels(library).num_threads == usable_processors()


@pytest.mark.alone
def test_idle_threads_use_no_processor(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, num_threads=3)
    time.sleep(0.05)  # they spin a moment first
    before_s = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before_s < 0.02
    assert kernels.context is not None


def test_a_forked_process_leaves_the_threads_alone(library: NativeLibrary) -> None:
    kernels = NativeKernels(library, num_threads=3)
    child = os.fork()
    if child == 0:
        kernels.__del__()
        os._exit(7)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked process waited for threads that it doesn't have")
    assert os.waitstatus_to_exitcode(status) == 7


def test_the_documented_command_exists() -> None:
    pattern = r"python -m (quire\.kernels\.cpu\.\w+)"
    assert re.search(pattern, str(build.__doc__))[1] == build.__name__


def test_threads_that_can_not_be_started_are_an_error_and_end_those_that_were() -> None:
    program = """
import resource, sys, threading
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels, NativeUnavailableError, load_library
try:
    library = load_library()
except NativeUnavailableError:
    sys.exit(0)  # not built: there is nothing to start
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_STACK, (16 << 20, 16 << 20))
try:
    NativeKernels(library, num_threads=500)
except ConfigurationError as error:
    assert "num_threads is 500" in str(error), error
else:
    sys.exit("500 stacks of 16 MiB fit into 1 GiB")
fewer = NativeKernels(library, num_threads=500, takes_fewer=True)
assert fewer.num_threads in (62, 31, 15), fewer.num_threads
del fewer
assert len([line for line in open("/proc/self/status") if line == "Threads:\\t1\\n"]) == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
