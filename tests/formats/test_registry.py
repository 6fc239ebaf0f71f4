"""The names of the weight formats: what reads them, what they cost, and one from outside."""

import subprocess
import sys
from dataclasses import replace

import pytest

from quire.formats import registry
from quire.formats.registry import (
    WeightFormatEntry,
    register_weight_format,
    weight_format_names,
    weight_formats,
)


@pytest.fixture(autouse=True)
def own_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))


def test_names_are_in_the_order_of_the_registry() -> None:
    assert weight_format_names() == ("int8", "int4")


def test_the_largest_weights_come_first() -> None:
    register_weight_format("int6", WeightFormatEntry("a scale per output", 6, "elsewhere:Int6"))
    assert [*weight_formats()] == ["int8", "int6", "int4"]


@pytest.mark.parametrize(("bits", "share"), [(16, 0.0), (8, 0.4), (4.5, 0.6), (2, 0.7)])
def test_saved_share_leaves_out_the_embedding(bits: float, share: float) -> None:
    assert WeightFormatEntry("", bits, "").saved_share == share


def test_a_name_is_taken_once() -> None:
    entry = weight_formats()["int8"]
    register_weight_format("int8", replace(entry))
    with pytest.raises(ValueError, match="there is a weight format 'int8' already"):
        register_weight_format("int8", replace(entry, bits=7))


def test_names_are_read_without_torch() -> None:
    code = "import sys, quire.formats.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
