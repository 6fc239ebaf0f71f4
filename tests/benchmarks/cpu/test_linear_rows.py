"""Every format's linear is multiplied, and a table divides times by the time of one row."""

from collections.abc import Callable
from types import ModuleType

import pytest

from quire.kernels.cpu.library import NativeKernels, load_library


@pytest.fixture
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks.cpu.linear_rows")


def test_every_format_is_measured(script: ModuleType) -> None:
    names = [*script.ROUNDED_FORMATS, *script.GIVEN_FORMATS]
    cases = [script.Case.of(name, (32, 256), 0.0) for name in names]
    script.measure(cases, NativeKernels(load_library(), None, 1), (32, 256), [1, 3], 2)
    for case in cases:
        assert [len(times) for times in case.times_s.values()] == [2, 2]
        assert len(case.linears) == 2


def test_times_are_divided_by_the_least_of_one_row(script: ModuleType) -> None:
    case = script.Case("int8", [script.make_linear("int8", 32, 256)])
    case.times_s = {1: [2e-6, 4e-6, 3e-6], 8: [6e-6, 5e-6, 8e-6]}
    cells = case.cells()
    assert cells[:2] == ["int8", "2"]
    assert cells[3:] == ["1.00 (1.50)", "2.50 (3.00)"]
    assert script.lines([case], [1, 8])[0] == "| format | one row, us | GB/s | 1 | 8 |"


def test_one_row_comes_first(script: ModuleType) -> None:
    with pytest.raises(SystemExit):
        script.main(["--rows", "2,4"])
