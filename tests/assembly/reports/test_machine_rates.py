"""Rates of this machine: there, plausible, and measured once."""

import dataclasses
import logging

import pytest
import torch

from quire.assembly.device_setup import choose_setup
from quire.assembly.reports import machine_rates
from quire.assembly.reports.machine_rates import measure_rates
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.registry import load_config
from quire.options.engine_options import EngineOptions

CPU = torch.device("cpu")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_rates, "_measured", {})
    options = EngineOptions(model=str(EMBEDDED_MODEL), dtype="float32")
    return choose_setup(options, load_config(EMBEDDED_MODEL), CPU, 1)


def test_machine_rates_are_measured_once(setup, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        rates = measure_rates(setup, None)
        assert measure_rates(setup, None) is rates
    assert rates is not None and 1e7 < rates.bytes_per_s < 1e13
    assert 1e7 < rates.operations_per_s < 1e16
    (line,) = [each.message for each in caplog.records if "this machine reads" in each.message]
    assert "Tflop/s" in line


def test_interpreted_kernels_have_no_machine_rates(setup) -> None:
    assert measure_rates(dataclasses.replace(setup, is_triton=True), None) is None


def test_no_memory_to_measure_in_is_no_failure(setup, monkeypatch, caplog) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(machine_rates, "measure_reads", fail)
    with caplog.at_level(logging.INFO, "quire"):
        assert measure_rates(setup, None) is None
    assert "no memory was left" in caplog.text
    monkeypatch.setattr(machine_rates, "_measured", {})

    def break_down(*_: object) -> float:
        raise RuntimeError("another failure")

    monkeypatch.setattr(machine_rates, "measure_reads", break_down)
    with pytest.raises(RuntimeError, match="another failure"):
        measure_rates(setup, None)
