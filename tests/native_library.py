"""Whether the native library is there, and what a test that needs it does if it isn't."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from quire.errors import ConfigurationError

if TYPE_CHECKING:  # brings torch
    from quire.kernels.cpu.library import NativeLibrary

OPTION = "--without-native"


def why_missing(load: Callable[[], object], *, may_be_missing: bool) -> str | None:
    """Why `load` finds no native library; None where it finds one.

    Fails the test that asks where the run may not do without: skipped tests would make a run
    without the kernels look complete.
    """
    try:
        load()
    except ConfigurationError as error:
        if may_be_missing:
            return str(error)
        pytest.fail(f"{error}; to leave out the tests that need it: {OPTION}", pytrace=False)
    return None


def require_isa(library: "NativeLibrary", isa: str) -> None:
    """Skip the test if this processor lacks the instruction set, or the library does."""
    if isa not in library.isas():
        pytest.skip(
            f"no kernels of {isa}: this processor lacks it, or only its best instruction set was"
            " built (./scripts/build --for-tests)"
        )
