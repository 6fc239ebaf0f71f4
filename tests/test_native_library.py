"""A run that was to test the native kernels and lacks them fails, unless it may leave them out."""

import pytest
from tests.native_library import OPTION, why_missing

from quire.kernels.cpu.library import NativeLibrary, NativeUnavailableError


def missing() -> NativeLibrary:
    raise NativeUnavailableError("it was not built; build it")


def test_present_library_yields_no_reason() -> None:
    assert why_missing(lambda: "the library", may_be_missing=False) is None


def test_a_missing_library_fails_the_test_and_names_the_way_out() -> None:
    with pytest.raises(pytest.fail.Exception, match=f"build it; to leave out .*: {OPTION}"):
        why_missing(missing, may_be_missing=False)


def test_a_run_may_say_that_it_goes_without() -> None:
    assert why_missing(missing, may_be_missing=True) == "it was not built; build it"


def test_the_option_is_pytests(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption(OPTION) in (False, True)
