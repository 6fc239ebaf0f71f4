"""Whether the native library is there, and what a test that needs it does if it isn't."""

from collections.abc import Callable

import pytest

from quire.errors import ConfigurationError

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
