"""Remembers what an engine measured at its start, for later starts with the same options.

Measuring takes half a second or more. The key of an entry has the options, the model's kind and
size, the kernels and the number of processors. A model at the same path may have changed, and so
may the machine, so `runtime.calibration.still_holds` checks the costs by a few steps. Called by
`build`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.assembly.device_setup import DeviceSetup
from quire.core.scheduling.cost_model import StepCostModel
from quire.engine.step_work import MachineRates
from quire.errors import ConfigurationError
from quire.measurement_file import MeasurementFile
from quire.observability.log import get_logger
from quire.observability.machine_processors import usable_processors
from quire.options.engine_options import EngineOptions
from quire.version import __version__

FORMAT = 1

logger = get_logger(__name__)


class StartCosts(NamedTuple):
    """The costs that an engine measures at its start."""

    model: StepCostModel
    #: The rates of rank 0's device; None if they could not be measured.
    rates: MachineRates | None


class StartCostFile:
    """One entry of a file: the costs of an engine with these facts."""

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        """`path` may begin with ~. Without a home folder, nothing is found or stored."""
        self._entries: MeasurementFile | None = None
        try:
            file = Path(path).expanduser()
        except RuntimeError as error:  # as for a user id without an entry, and without HOME
            logger.info("nothing is remembered in %s: %s", path, error)
        else:
            self._entries = MeasurementFile(file, "start costs", FORMAT, "--start-costs")
        self._facts = facts

    def find(self) -> StartCosts | None:
        """The costs that were stored last; None if the file has none."""
        if self._entries is None or (entry := self._entries.find(self._facts)) is None:
            return None
        try:
            rates = entry["rates"]
            model = StepCostModel([float(each) for each in entry["coefficients"]])
            return StartCosts(model, None if rates is None else MachineRates(*map(float, rates)))
        except (KeyError, TypeError, ValueError, OverflowError, AssertionError):
            self._entries.warn_of_damage()
            return None

    def store(self, costs: StartCosts) -> None:
        """Store the costs in place of older ones. Logs a warning if the file can't be written."""
        if self._entries is None:
            return
        try:
            self._entries.store(
                self._facts, {"coefficients": costs.model.coefficients, "rates": costs.rates}
            )
        except ConfigurationError as error:
            logger.warning("%s", error)


def start_facts(
    options: EngineOptions, setup: DeviceSetup, engine_facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that affects step times, by name, as plain data. `engine_facts` are those that the
    engine reports."""
    kernels = setup.kernels
    return {
        "options": options.as_mapping(),
        **{name: engine_facts[name] for name in ("architecture", "num_parameters")},
        "kernels": setup.name,
        "sources": None if kernels is None else kernels.library.source_digest().decode(),
        "num_threads": setup.num_threads,
        "num_processors": usable_processors(),
        "version": __version__,
    }
