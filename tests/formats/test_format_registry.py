"""The names of the weight formats: what reads them, what they cost, and one from outside."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.registering import restored

from quire.errors import ConfigurationError
from quire.formats.format_registry import WEIGHT_FORMATS, WeightFormatEntry, weight_formats


@pytest.fixture(autouse=True)
def own_formats() -> Iterator[None]:
    with restored(WEIGHT_FORMATS):
        yield


def test_names_are_in_the_order_of_the_registry() -> None:
    assert [*WEIGHT_FORMATS] == ["int8", "int4"]


def test_the_largest_weights_come_first() -> None:
    WEIGHT_FORMATS.register("int6", WeightFormatEntry("a scale per output", 6, "elsewhere:Int6"))
    assert [*weight_formats()] == ["int8", "int6", "int4"]


@pytest.mark.parametrize(("bits", "share"), [(16, 0.0), (8, 0.4), (4.5, 0.6), (2, 0.7)])
def test_saved_share_leaves_out_the_embedding(bits: float, share: float) -> None:
    assert WeightFormatEntry("", bits, "").saved_share == share


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigurationError, match="'int8' is registered by quire and by tests"):
        WEIGHT_FORMATS.register("int8", replace(WEIGHT_FORMATS.get("int8"), bits=7))


def test_names_are_read_without_torch() -> None:
    code = "import sys, quire.formats.format_registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
