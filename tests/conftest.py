"""What holds for all tests: no network, one torch thread, Hypothesis without a clock.

`pytest --kernels NAME` runs the engines of all tests that don't ask for other kernels on these;
`pytest -n auto` runs the tests in several processes (README.md here says which tests run alone).
"""

import asyncio
import gc
import logging
import os
import subprocess
from collections.abc import Generator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tests.collecting import is_first, put_first
from tests.forking import Forks, rank_starter, shared_forks, starter
from tests.native_library import OPTION as WITHOUT_NATIVE
from tests.native_library import why_missing
from tests.processes import FOLDER, add_option, run_in_processes
from tests.real_weights import NO_REAL_WEIGHTS
from tests.real_weights import minilm as minilm
from tests.real_weights import smollm2 as smollm2
from tests.real_weights import smollm2_gguf as smollm2_gguf
from tests.rotation import Rotation
from tests.turns import Turns

from quire.kernels.options import KERNELS
from quire.observability.log import LIBRARIES
from quire.options.engine_options import EngineOptions

if TYPE_CHECKING:  # brings torch, which reads the variables below
    from quire.kernels.cpu.library import NativeLibrary

# Both are read when the libraries are first imported, and inherited by processes that tests start.
# One thread each: pytest and such a process would otherwise fight for the same few cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when a kernel is decorated: in tests all Triton kernels run in the interpreter, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shared machine makes single examples slow at random; the timeout of pytest bounds whole tests.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_option(parser)
    parser.addoption(
        "--kernels",
        default=EngineOptions().kernels,
        choices=KERNELS,
        help="what engines compute with where a test doesn't say (%(default)s)",
    )
    parser.addoption(
        WITHOUT_NATIVE,
        action="store_true",
        help="skip the tests that need the native library where it can't be loaded, instead of"
        " failing them",
    )
    parser.addoption(
        "--rotate", action="store_true", help="run only a quarter of the long tests (rotation.py)"
    )
    parser.addoption(
        "--write-rotated", action="store_true", help="list the long tests of this run anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the kernels that were asked for the default of the option, in this process."""
    name = config.getoption("--kernels")
    EngineOptions.__init__.__defaults__ = tuple(
        name if field.name == "kernels" else field.default for field in fields(EngineOptions)
    )
    config.pluginmanager.register(Rotation(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What collecting makes lives to the end: the garbage collector is not to look at it again and
    again, which was a quarter of the time of all tests. So with torch's loggers: pytest (from 9.1
    on) adds its handlers to those that do not propagate six times a test, and torch has forty."""
    gc.disable()
    try:
        return (yield)
    finally:
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch") and isinstance(logger, logging.Logger):
                logger.propagate = True
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def log_settings() -> Generator[None]:
    """What a command sets of loggers ends with its test.

    `propagate` above all: pytest (from 9.1 on) adds its own handlers to each logger that does not
    propagate, and those of one test's setup would be put back here for good.
    """
    loggers = [logging.getLogger(name) for name in ("quire", *LIBRARIES)]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        if logger.level != level:  # to set a level empties the caches of all loggers there are
            logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests lacked real weights: skipped tests are otherwise only counted."""
    skipped = [
        report.nodeid
        for report in terminalreporter.stats.get("skipped", ())
        if NO_REAL_WEIGHTS in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped: {NO_REAL_WEIGHTS}", yellow=True)
        for nodeid in skipped:
            terminalreporter.line(nodeid)


# ---- several processes (processes.py) ------------------------------------------------------------

TURNS = pytest.StashKey[Turns]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("processes") != "0":
        put_first(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return run_in_processes(session, num_first=sum(map(is_first, session.items)))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the timeout: waiting does not count
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked `alone` runs while all other processes of this run wait."""
    stash = item.config.stash
    if FOLDER not in stash:
        return (yield)
    if TURNS not in stash:
        stash[TURNS] = Turns(Path(stash[FOLDER]))
    is_alone = item.get_closest_marker("alone") is not None
    with stash[TURNS].turn(is_alone=is_alone):
        return (yield)


# ---- which kernels compute ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def why_not_native(pytestconfig: pytest.Config) -> str | None:
    """Why the native library can't be loaded, if this run may do without; None: it is loaded."""
    from quire.kernels.cpu.library import load_library

    return why_missing(load_library, may_be_missing=pytestconfig.getoption(WITHOUT_NATIVE))


@pytest.fixture(scope="session")
def native_library(why_not_native: str | None) -> "NativeLibrary":
    """The native library, for a test that needs it."""
    from quire.kernels.cpu.library import load_library

    if why_not_native is not None:
        pytest.skip(f"no native kernels: {why_not_native}")
    return load_library()


@pytest.fixture(scope="session")
def why_torch(request: pytest.FixtureRequest) -> str | None:
    """Why engines run on torch where a test doesn't say otherwise; None: they do not."""
    if EngineOptions().kernels == "torch":
        return "as asked for"
    why: str | None = request.getfixturevalue("why_not_native")
    return why


@pytest.fixture(scope="session")
def native_engine(why_torch: str | None) -> None:
    """Skips a test of what only engines on native kernels promise."""
    if why_torch is not None:
        pytest.skip(f"engines run on torch: {why_torch}")


@pytest.fixture(scope="session")
def kernel_flags(why_torch: str | None) -> list[str]:
    """For a command that is to say nothing of kernels that weren't built."""
    return ["--kernels", EngineOptions().kernels if why_torch is None else "torch"]


# ---- processes of their own -------------------------------------------------------------------


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Runs programs in the repository's folder."""
    return shared_forks()


@pytest.fixture
def forked_engines(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes that this process starts are forks: they need not import torch."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starter(forks))


@pytest.fixture
def forked_ranks(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that this process starts are forks, which are not among its own children."""
    from quire.runtime import executor  # brings torch

    found = SimpleNamespace(Popen=rank_starter(forks), TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(executor, "subprocess", found)
